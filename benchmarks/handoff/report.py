"""The figures as lines for a terminal and as a page of markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.handoff.loads import PROBE_TOKENS, Handoffs
from benchmarks.handoff.measure import AFTER, BEFORE, TARGET_ITL_S, Cell, Results, Taken

MAX_GAP_S = 5e-3  # median, beside the time of the bytes
MAX_GAP_EXCESS_S = 10e-3  # p99, beside a decode step
MAX_GROWTH = 5e-3  # seconds of the gap for each second of the prefill pod's step
MAX_GAP_ITLS = 2.0
MAX_WORST_GAP_ITLS = 5.0
MIN_STREAM_SPEEDUP = 3.0
MAX_TTFT_RATIO = 0.8
MIN_THROUGHPUT_RATIO = 0.97
MAX_ITL_RATIO = 1.10
MAX_SCHEDULER_S = 300e-6


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    row: int
    what: str
    unit: str
    before: float | None  # None: not measured
    after: float
    target: str
    is_met: bool | None  # None: there is nothing to compare with
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """After to before."""
        return self.after / self.before if self.before else None


def report(results: Results) -> list[Figure]:
    """All figures of which something was measured."""
    before, after = results.taken.get(BEFORE, Taken()), results.taken[AFTER]
    figures: list[Figure] = []
    for connector in dict.fromkeys(cell.connector for cell in after.handoffs):
        figures += _handoffs(connector, before, after, results.copy_s)
    if after.first_gaps:
        figures += _first_gaps(before, after)
    if after.beside:
        figures += _beside(before, after)
    if after.at_once:
        figures += _at_once(before, after)
    figures += _itls(before, after)
    if after.scheduler:
        figures.append(_scheduler(before, after))
    return figures


def p99(samples: Sequence[float]) -> float:
    """The smallest sample that 99 % of the samples do not exceed."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def _handoffs(connector: str, before: Taken, after: Taken, copy_s: float) -> Iterator[Figure]:
    def both(figure: Callable[[Sequence[Handoffs]], float]) -> tuple[float | None, float]:
        old, new = (_of(connector, taken) for taken in (before, after))
        return figure(old) if old else None, figure(new)

    most_s = MAX_GAP_S + copy_s
    old, new = both(lambda cells: max(statistics.median(cell.gaps) for cell in cells))
    target = f"at most 5 ms + {copy_s * 1e3:.1f} ms, the copying of {PROBE_TOKENS} tokens' KV there and back"
    yield _ms(1, f"{connector}: handoff p50, at the worst step", old, new, target, new <= most_s)
    old, new = both(lambda cells: max(p99(cell.gaps) for cell in cells))
    excess_s = max(p99(cell.gaps) - cell.decode_s for cell in _of(connector, after))
    target = "at most a decode step + 10 ms"
    yield _ms(1, f"{connector}: handoff p99, at the worst step", old, new, target, excess_s <= MAX_GAP_EXCESS_S)
    old, new = both(_growth)
    target = "at most 5 ms for each second"
    yield _ms(1, f"{connector}: growth of the p50 with the prefill step", old, new, target, new <= MAX_GROWTH)


def _growth(cells: Sequence[Handoffs]) -> float:
    """Seconds of the median gap for each second of a step, from the shortest to the longest."""
    shortest, longest = min(cells, key=lambda cell: cell.step_s), max(cells, key=lambda cell: cell.step_s)
    rise = statistics.median(longest.gaps) - statistics.median(shortest.gaps)
    return rise / (longest.step_s - shortest.step_s) if longest.step_s > shortest.step_s else 0.0


def _of(connector: str, taken: Taken) -> list[Handoffs]:
    return [each for cell, each in taken.handoffs.items() if cell.connector == connector]


def _first_gaps(before: Taken, after: Taken) -> Iterator[Figure]:
    what = "gap of first and second token, ITLs"
    for name, figure, most in (("p50", statistics.median, MAX_GAP_ITLS), ("worst", max, MAX_WORST_GAP_ITLS)):
        old = figure(before.first_gaps) if before.first_gaps else None
        new = figure(after.first_gaps)
        yield Figure(2, f"{what}, {name}", "", old, new, f"at most {most:g}", new <= most)


def _beside(before: Taken, after: Taken) -> Iterator[Figure]:
    def tail(taken: Taken) -> float | None:
        gaps = [gap for each in taken.beside for gap in each.gaps]
        return p99(gaps) if gaps else None

    def rate(taken: Taken) -> float | None:
        return statistics.median(each.tokens_per_s for each in taken.beside) if taken.beside else None

    step_s = statistics.median(each.decode_s + each.least_prompt_s for each in after.beside)
    most_s = max(2 * TARGET_ITL_S, step_s)
    new_tail, old_rate, new_rate = tail(after) or math.inf, rate(before), rate(after) or 0.0
    target = f"at most {most_s * 1e3:.0f} ms; a decode step and 64 tokens of a prompt take {step_s * 1e3:.0f} ms"
    yield _ms(3, "ITL p99 beside long prompts", tail(before), new_tail, target, new_tail <= most_s)
    is_met = new_rate >= MIN_STREAM_SPEEDUP * old_rate if old_rate is not None else None
    target = f"at least {MIN_STREAM_SPEEDUP:g} times"
    yield Figure(3, "throughput of the streams", "tokens/s", old_rate, new_rate, target, is_met)


def _at_once(before: Taken, after: Taken) -> Iterator[Figure]:
    def ttft(taken: Taken) -> float | None:
        return statistics.median(ttft for each in taken.at_once for ttft in each.ttfts) if taken.at_once else None

    def rate(taken: Taken) -> float | None:
        return statistics.median(each.tokens_per_s for each in taken.at_once) if taken.at_once else None

    sooner, as_many = f"at most {MAX_TTFT_RATIO:.2f} times", f"at least {MIN_THROUGHPUT_RATIO:.2f} times"
    old, new = ttft(before), ttft(after) or math.inf
    yield _ms(4, "TTFT p50", old, new, sooner, None if old is None else new <= MAX_TTFT_RATIO * old)
    old_rate, new_rate = rate(before), rate(after) or 0.0
    is_met = None if old_rate is None else new_rate >= MIN_THROUGHPUT_RATIO * old_rate
    yield Figure(4, "throughput of the prompts", "tokens/s", old_rate, new_rate, as_many, is_met)
    if after.at_once_unbounded:
        unbounded = Taken(at_once=after.at_once_unbounded)
        share = new / (ttft(unbounded) or math.inf)
        what = "/ that with target_itl_ms null"
        yield Figure(4, f"TTFT p50 {what}", "", None, share, sooner, share <= MAX_TTFT_RATIO)
        share = new_rate / (rate(unbounded) or math.inf)
        yield Figure(4, f"throughput {what}", "", None, share, as_many, share >= MIN_THROUGHPUT_RATIO)


def _itls(before: Taken, after: Taken) -> Iterator[Figure]:
    def share(taken: Taken, batch: int) -> float:
        return statistics.median(taken.itls[batch]) / statistics.median(taken.steps[batch])

    for batch in after.itls:
        old = share(before, batch) if batch in before.itls else None
        new = share(after, batch)
        steps = (f"{statistics.median(taken.steps[batch]) * 1e3:.2f} ms" for taken in (before, after) if taken.itls)
        note = f"a step offline takes {', '.join(steps)}"
        target = f"at most {MAX_ITL_RATIO:.2f}"
        yield Figure(5, f"ITL / step offline, batch {batch}", "", old, new, target, new <= MAX_ITL_RATIO, note)


def _scheduler(before: Taken, after: Taken) -> Figure:
    old = statistics.median(before.scheduler) * 1e6 if before.scheduler else None
    new = statistics.median(after.scheduler)
    target = f"at most {MAX_SCHEDULER_S * 1e6:.0f} us"
    note = f"before: {before.reasons[6]}" if 6 in before.reasons else ""
    return Figure(6, "schedule and update", "us", old, new * 1e6, target, new <= MAX_SCHEDULER_S, note)


def _ms(row: int, what: str, old: float | None, new: float, target: str, is_met: bool | None) -> Figure:
    return Figure(row, what, "ms", None if old is None else old * 1e3, new * 1e3, target, is_met)


def format_figure(figure: Figure) -> str:
    """One line."""
    verdict = {True: "pass", False: "FAIL", None: "    "}[figure.is_met]
    old = "" if figure.before is None else f", before {figure.before:.3g} (x{figure.ratio or 0:.2f})"
    unit = f" {figure.unit}" if figure.unit else ""
    return f"{verdict} {figure.row}  {figure.what}: {figure.after:.3g}{unit}{old}; {figure.target}"


def format_page(
    machine: Mapping[str, str], results: Results, figures: Sequence[Figure], note: str, plot: str | None
) -> str:
    """All tables, in markdown."""
    lines = ["# How little prompts disturb streams", ""]
    lines += ["`python -m benchmarks.handoff`, whose help says what each row is.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += ["", note] if note else []
    lines += [
        "",
        "| row | figure | unit | before | after | after / before | target | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += map(_table_row, figures)
    if after := results.taken[AFTER].handoffs:
        lines += ["", "## Handoffs beside a prefill pod that never rests", ""]
        lines += [f"![median gap against the step of the prefill pod]({plot})", ""] if plot else []
        lines += _handoff_table(results, list(after))
    return "\n".join(lines) + "\n"


def _table_row(figure: Figure) -> str:
    verdict = {True: "pass", False: "**FAIL**", None: ""}[figure.is_met]
    before = "" if figure.before is None else f"{figure.before:.3g}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    target = f"{figure.target}; {figure.note}" if figure.note else figure.target
    cells = (figure.row, figure.what, figure.unit, before, f"{figure.after:.3g}", ratio, target, verdict)
    return f"| {' | '.join(map(str, cells))} |"


def _handoff_table(results: Results, cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| connector | side | step of prefill, s | gap p50, ms | gap p99 | samples | decode step, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for name, taken in results.taken.items():
            each = taken.handoffs[cell]
            figures = (statistics.median(each.gaps), p99(each.gaps))
            lines.append(
                f"| {cell.connector} | {name} | {each.step_s:.2f} | {figures[0] * 1e3:.1f} | {figures[1] * 1e3:.1f} "
                f"| {len(each.gaps)} | {each.decode_s * 1e3:.1f} |"
            )
    return lines
