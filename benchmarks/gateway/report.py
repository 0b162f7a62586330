"""Tables and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gateway.measure import Cost, Plan, Results
from benchmarks.router.report import Verdict

MAX_REQUEST_S = 1.5e-3
MAX_TOKEN_S = 60e-6
MAX_RATIO = 1.03


def verdicts(results: Results) -> list[Verdict]:
    """All targets that something was measured of."""
    found = []
    for name, cost in results.medians.items():
        request, token = f"{cost.request_s * 1e3:.2f} ms", f"{cost.token_s * 1e6:.1f} us"
        found.append(Verdict(f"{name}: at most 1.5 ms per request", request, cost.request_s <= MAX_REQUEST_S))
        found.append(Verdict(f"{name}: at most 60 us per streamed token", token, cost.token_s <= MAX_TOKEN_S))
    for name, ratio in results.ratios.items():
        for what, times in zip(("request", "streamed token"), ratio, strict=True):
            target = f"{name}: at most 3 % more than before per {what}"
            found.append(Verdict(target, f"{100 * (times - 1):+.1f} %", times <= MAX_RATIO))
    return found


def format_tables(results: Results, found: Sequence[Verdict]) -> str:
    """All tables, in markdown."""
    lines = ["## Targets", "", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {each.target} | {each.measured} | {'pass' if each.is_met else '**FAIL**'} |" for each in found]
    return "\n".join([*lines, "", "## Costs", "", *_costs(results), ""])


def format_page(machine: Mapping[str, str], plan: Plan, results: Results, found: Sequence[Verdict], note: str) -> str:
    """The page that a run writes."""
    load = plan.streams
    answers = f"{plan.num_answers:,} answers of one token, {plan.concurrency} at a time"
    streams = f"{load.num_streams} streams of {load.num_tokens} tokens, one each {load.step_s * 1e3:g} ms"
    lines = [
        "# What each API of the gateway costs",
        "",
        "`python -m benchmarks.gateway`, whose help says what is measured. Processor time of the router.",
        "",
        f"Medians of {plan.repeats} repeats, each of {answers}, and of {streams}.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
    ]
    lines += ["", note] if note else []
    return "\n".join([*lines, "", format_tables(results, found)])


def _costs(results: Results) -> list[str]:
    lines = [
        "| requests | ms per request | before | difference | us per streamed token | before | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    before, ratios = results.medians_before, results.ratios
    for name, cost in results.medians.items():
        requests, tokens = _cells(cost, before.get(name), ratios.get(name))
        lines.append(f"| {name} | {requests} | {tokens} |")
    return lines


def _cells(now: Cost, before: Cost | None, ratio: Cost | None) -> tuple[str, str]:
    request, token = f"{now.request_s * 1e3:.2f}", f"{now.token_s * 1e6:.1f}"
    if before is None or ratio is None:
        return f"{request} | - | -", f"{token} | - | -"
    return (
        f"{request} | {before.request_s * 1e3:.2f} | {100 * (ratio.request_s - 1):+.1f} %",
        f"{token} | {before.token_s * 1e6:.1f} | {100 * (ratio.token_s - 1):+.1f} %",
    )
