"""The figures as a page of markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.handoff.loads import PROBE_TOKENS, AtOnce, Beside, Handoffs
from benchmarks.handoff.measure import TARGET_ITL_S, Results, Taken
from benchmarks.harness.checkouts import BEFORE, NOW
from benchmarks.harness.figures import p99
from benchmarks.harness.report import Page, table, verdict_word

MAX_GAP_S = 5e-3  # median, beside the time of the bytes
MAX_GAP_EXCESS_S = 10e-3  # p99, beside a decode step
MAX_GROWTH = 5e-3  # seconds of the gap for each second of the prefill pod's step
MAX_GAP_ITLS = 2.0
MAX_WORST_GAP_ITLS = 5.0
MIN_STREAM_SPEEDUP = 3.0
MAX_TTFT_RATIO = 0.8
MIN_THROUGHPUT_RATIO = 0.97
MAX_ITL_RATIO = 1.10


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

    @property
    def cells(self) -> Iterator[str]:
        """The cells of the row."""
        yield from (str(self.row), self.what, self.unit)
        yield "" if self.before is None else f"{self.before:.3g}"
        yield f"{self.after:.3g}"
        yield f"{self.after / self.before:.2f}" if self.before else ""
        yield from (self.target, verdict_word(self.is_met))


def report(results: Results) -> list[Figure]:
    """All figures of which something was measured."""
    before, after = results.taken.get(BEFORE, Taken()), results.taken[NOW]
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
    return figures


def _handoffs(connector: str, before: Taken, after: Taken, copy_s: float) -> Iterator[Figure]:
    olds, news = (
        [each for cell, each in taken.handoffs.items() if cell.connector == connector] for taken in (before, after)
    )

    def figure(what: str, of: Callable[[Sequence[Handoffs]], float], target: str, most_s: float | None) -> Figure:
        new = of(news)
        is_met = excess_s <= MAX_GAP_EXCESS_S if most_s is None else new <= most_s
        return _ms(1, f"{connector}: {what}", of(olds) if olds else None, new, target, is_met)

    excess_s = max(p99(cell.gaps) - cell.decode_s for cell in news)
    yield figure(
        "handoff p50, at the worst step",
        lambda cells: max(statistics.median(cell.gaps) for cell in cells),
        f"at most 5 ms + {copy_s * 1e3:.1f} ms, the copying of {PROBE_TOKENS} tokens' KV there and back",
        MAX_GAP_S + copy_s,
    )
    yield figure(
        "handoff p99, at the worst step",
        lambda cells: max(p99(cell.gaps) for cell in cells),
        "at most a decode step + 10 ms",
        None,
    )
    yield figure("growth of the p50 with the prefill step", _growth, "at most 5 ms for each second", MAX_GROWTH)


def _growth(cells: Sequence[Handoffs]) -> float:
    """Seconds of the median gap for each second of a step, from the shortest to the longest."""
    shortest, longest = min(cells, key=lambda cell: cell.step_s), max(cells, key=lambda cell: cell.step_s)
    rise = statistics.median(longest.gaps) - statistics.median(shortest.gaps)
    return rise / (longest.step_s - shortest.step_s) if longest.step_s > shortest.step_s else 0.0


def _first_gaps(before: Taken, after: Taken) -> Iterator[Figure]:
    what = "gap of first and second token, ITLs"
    for name, figure, most in (("p50", statistics.median, MAX_GAP_ITLS), ("worst", max, MAX_WORST_GAP_ITLS)):
        old = figure(before.first_gaps) if before.first_gaps else None
        new = figure(after.first_gaps)
        yield Figure(2, f"{what}, {name}", "", old, new, f"at most {most:g}", new <= most)


def _beside(before: Taken, after: Taken) -> Iterator[Figure]:
    def tail(taken: Taken) -> float:
        return p99([gap for each in taken.beside for gap in each.gaps])

    step_s = statistics.median(each.decode_s + each.least_prompt_s for each in after.beside)
    most_s = max(2 * TARGET_ITL_S, step_s)
    old, new = tail(before) if before.beside else None, tail(after)
    target = f"at most {most_s * 1e3:.0f} ms; a decode step and 64 tokens of a prompt take {step_s * 1e3:.0f} ms"
    yield _ms(3, "ITL p99 beside long prompts", old, new, target, new <= most_s)
    old, new = _rate(before.beside) if before.beside else None, _rate(after.beside)
    is_met = None if old is None else new >= MIN_STREAM_SPEEDUP * old
    yield Figure(3, "throughput of the streams", "tokens/s", old, new, f"at least {MIN_STREAM_SPEEDUP:g} times", is_met)


def _at_once(before: Taken, after: Taken) -> Iterator[Figure]:
    sooner, as_many = f"at most {MAX_TTFT_RATIO:.2f} times", f"at least {MIN_THROUGHPUT_RATIO:.2f} times"
    new, new_rate = _ttft(after.at_once), _rate(after.at_once)
    old, old_rate = (_ttft(before.at_once), _rate(before.at_once)) if before.at_once else (None, None)
    yield _ms(4, "TTFT p50", old, new, sooner, None if old is None else new <= MAX_TTFT_RATIO * old)
    is_met = None if old_rate is None else new_rate >= MIN_THROUGHPUT_RATIO * old_rate
    yield Figure(4, "throughput of the prompts", "tokens/s", old_rate, new_rate, as_many, is_met)
    if unbounded := after.at_once_unbounded:
        what = "/ that with target_itl_ms null"
        share = new / _ttft(unbounded)
        yield Figure(4, f"TTFT p50 {what}", "", None, share, sooner, share <= MAX_TTFT_RATIO)
        share = new_rate / _rate(unbounded)
        yield Figure(4, f"throughput {what}", "", None, share, as_many, share >= MIN_THROUGHPUT_RATIO)


def _ttft(taken: Sequence[AtOnce]) -> float:
    return statistics.median(ttft for each in taken for ttft in each.ttfts)


def _rate(taken: Sequence[AtOnce | Beside]) -> float:
    return statistics.median(each.tokens_per_s for each in taken)


def _itls(before: Taken, after: Taken) -> Iterator[Figure]:
    def share(taken: Taken, batch: int) -> float:
        return statistics.median(taken.itls[batch]) / statistics.median(taken.steps[batch])

    for batch in after.itls:
        old = share(before, batch) if batch in before.itls else None
        new = share(after, batch)
        steps = (f"{statistics.median(taken.steps[batch]) * 1e3:.2f} ms" for taken in (before, after) if taken.itls)
        target = f"at most {MAX_ITL_RATIO:.2f}; a step offline takes {', '.join(steps)}"
        yield Figure(5, f"ITL / step offline, batch {batch}", "", old, new, target, new <= MAX_ITL_RATIO)


def _ms(row: int, what: str, old: float | None, new: float, target: str, is_met: bool | None) -> Figure:
    return Figure(row, what, "ms", None if old is None else old * 1e3, new * 1e3, target, is_met)


def make_page(machine: Mapping[str, str], results: Results) -> Page:
    """Prints the tables, and returns the page with them."""
    words = "`python -m benchmarks.handoff`, whose help says what each row is."
    page = Page("How little prompts disturb streams", words, machine)
    columns = "row | figure | unit | before | now | now / before | target | "
    page.add("", *table(columns, (tuple(figure.cells) for figure in report(results))))
    if results.taken[NOW].handoffs:
        page.section("Handoffs beside a prefill pod that never rests")
        page.add(*_handoff_table(results))
    return page


def _handoff_table(results: Results) -> list[str]:
    rows = []
    for cell in results.taken[NOW].handoffs:
        for name, taken in results.taken.items():
            each = taken.handoffs[cell]
            gaps = (f"{statistics.median(each.gaps) * 1e3:.1f}", f"{p99(each.gaps) * 1e3:.1f}", len(each.gaps))
            rows.append((cell.connector, name, f"{each.step_s:.2f}", *gaps, f"{each.decode_s * 1e3:.1f}"))
    return table("connector | side | step of prefill, s | gap p50, ms | gap p99 | samples | decode step, ms", rows)
