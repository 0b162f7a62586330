"""Tables and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gateway.measure import Cost, Plan, Results
from benchmarks.harness.report import Page, Verdict, table, verdict_table

MAX_REQUEST_S = 1.5e-3
MAX_TOKEN_S = 60e-6
MAX_RATIO = 1.03


def verdicts(results: Results, *, is_bounded: bool = True) -> list[Verdict]:
    """All targets that something was measured of. `is_bounded`: those of what it may cost more than before, too."""
    found = []
    for name, cost in results.medians.items():
        request, token = f"{cost.request_s * 1e3:.2f} ms", f"{cost.token_s * 1e6:.1f} us"
        found.append(Verdict(f"{name}: at most 1.5 ms per request", request, cost.request_s <= MAX_REQUEST_S))
        found.append(Verdict(f"{name}: at most 60 us per streamed token", token, cost.token_s <= MAX_TOKEN_S))
    for name, ratio in results.ratios.items() if is_bounded else ():
        for what, times in zip(("request", "streamed token", "token with a rate"), ratio, strict=True):
            target = f"{name}: at most 3 % more than before per {what}"
            found.append(Verdict(target, f"{100 * (times - 1):+.1f} %", times <= MAX_RATIO))
    return found


def make_page(machine: Mapping[str, str], plan: Plan, results: Results, *, is_bounded: bool = True) -> Page:
    """Prints the tables, and returns the page with them. `is_bounded`: see `verdicts`."""
    fast, paced = plan.fast, plan.paced
    answers = f"{plan.num_answers:,} answers of one token, {plan.concurrency} at a time"
    streams = f"{fast.num_streams} streams of {fast.num_tokens} tokens, as fast as they come"
    with_rate = f"{paced.num_streams} of {paced.num_tokens}, one each {paced.step_s * 1e3:g} ms"
    words = "`python -m benchmarks.gateway`, whose help says what is measured. Processor time of the router.\n\n"
    words += f"Medians of {plan.repeats} repeats, each of {answers}, of {streams}, and of {with_rate}."
    page = Page("What each API of the gateway costs", words, machine)
    page.add("", *verdict_table(verdicts(results, is_bounded=is_bounded)))
    page.section("Costs")
    kinds = ("ms per request", "us per streamed token", "us per token with a rate")
    columns = " | ".join(["requests", *(f"{kind} | before | difference" for kind in kinds)])
    before, ratios = results.medians_before, results.ratios
    rows = ((name, *_cells(cost, before.get(name), ratios.get(name))) for name, cost in results.medians.items())
    page.add(*table(columns, rows))
    return page


def _cells(now: Cost, before: Cost | None, ratio: Cost | None) -> Iterator[str]:
    for index, seconds in enumerate(now):
        yield _figure(index, seconds)
        yield "-" if before is None else _figure(index, before[index])
        yield "-" if ratio is None else f"{100 * (ratio[index] - 1):+.1f} %"


def _figure(index: int, seconds: float) -> str:
    """The first of a Cost in ms, the others in us."""
    return f"{seconds * 1e3:.2f}" if index == 0 else f"{seconds * 1e6:.1f}"
