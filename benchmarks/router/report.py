"""The figures as a page of markdown, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page import Verdict
from benchmarks.router.measure import Results, StreamLoad
from benchmarks.router.systems import OURS, RIVAL

PACKAGES = ("grpcio", "protobuf", "uvicorn", "uvloop", "httptools", "tokenizers", "msgspec")  # whose versions matter
MAX_ADDED_S = 3e-3
MIN_TOKENS_PER_CPU_S = 15_000
MAX_DECISION_US = 200
MAX_BYTES_PER_STREAM = 40 * 1000


def verdicts(results: Results) -> list[Verdict]:
    """All targets that something was measured of."""
    found = []
    if added := [each.added_p50_s for (name, load), each in results.answers.items() if (name, load) == (OURS, 1)]:
        met = added[0] < MAX_ADDED_S
        found.append(Verdict("added latency p50 under 3 ms, one request at a time", f"{added[0] * 1e3:.2f} ms", met))
    for (name, load), streams in results.streams.items():
        if name == OURS:
            what = f"15,000 streamed tokens/s per core, {_streams_of(load)}"
            met = streams.tokens_per_cpu_s >= MIN_TOKENS_PER_CPU_S
            found.append(Verdict(what, f"{streams.tokens_per_cpu_s:,.0f}", met))
    for (name, number), idle in results.idle.items():
        if name == OURS:
            met = idle.bytes_per_stream < MAX_BYTES_PER_STREAM
            measured = f"{idle.bytes_per_stream / 1e3:.1f} KB"
            found.append(Verdict(f"memory per open stream under 40 KB, {number} streams", measured, met))
    if results.decisions:
        most = results.decisions[-1]
        what = f"decision under 200 us at {most.num_pods} pods and {most.num_blocks:,} blocks"
        found.append(Verdict(what, f"{most.p50_us:.0f} us", most.p50_us < MAX_DECISION_US))
    return found


def format_tables(results: Results, found: Sequence[Verdict]) -> str:
    """All tables, in markdown."""
    lines = ["## Targets", "", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {each.target} | {each.measured} | {'pass' if each.is_met else '**FAIL**'} |" for each in found]
    lines += ["", "## Answers of one token", "", *_answers(results)]
    lines += ["", "## Streams", "", *_streams(results)]
    lines += ["", "## Memory per open stream", "", *_idle(results)]
    lines += ["", "## Decisions", "", *_decisions(results)]
    if RIVAL not in results.versions:
        lines += ["", f"{RIVAL} was not measured: it is not installed, or was left out."]
    return "\n".join(lines) + "\n"


def format_page(machine: dict[str, str], results: Results, found: Sequence[Verdict], note: str) -> str:
    """The page that a run writes."""
    facts = {**machine, **results.versions}
    lines = ["# What the router costs", "", "`python -m benchmarks.router`, whose help says what is measured. Medians."]
    lines += ["", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += ["", note] if note else []
    return "\n".join([*lines, "", format_tables(results, found)])


def _answers(results: Results) -> list[str]:
    lines = [
        "| at once | system | requests/s | p50, ms | p99 | direct p50 | direct p99 | added p50 | added p99 | CPU, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, concurrency), each in sorted(results.answers.items(), key=lambda item: (item[0][1], item[0][0])):
        times = [each.p50_s, each.p99_s, each.direct_p50_s, each.direct_p99_s, each.added_p50_s, each.added_p99_s]
        cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in [*times, each.cpu_s])
        lines.append(f"| {concurrency} | {name} | {each.requests_per_s:,.0f} | {cells} |")
    return lines


def _streams(results: Results) -> list[str]:
    lines = [
        "| streams | tokens/s of each | system | tokens/s per core of the router | tokens/s | tokens per event |",
        "|---|---|---|---|---|---|",
    ]
    for (name, load), each in sorted(results.streams.items(), key=lambda item: (item[0][1], item[0][0])):
        rate = f"{1 / load.step_s:.0f}" if load.step_s else "as many as come"
        figures = f"{each.tokens_per_cpu_s:,.0f} | {each.tokens_per_s:,.0f} | {each.tokens_per_event:.2f}"
        lines.append(f"| {load.num_streams} | {rate} | {name} | {figures} |")
    return lines


def _idle(results: Results) -> list[str]:
    lines = ["| open streams | system | KB each |", "|---|---|---|"]
    for (name, number), each in sorted(results.idle.items(), key=lambda item: (item[0][1], item[0][0])):
        lines.append(f"| {number} | {name} | {each.bytes_per_stream / 1e3:.1f} |")
    return lines


def _decisions(results: Results) -> list[str]:
    lines = ["| pods | indexed blocks | p50, us | p99, us |", "|---|---|---|---|"]
    lines += [
        f"| {each.num_pods} | {each.num_blocks:,} | {each.p50_us:.0f} | {each.p99_us:.0f} |"
        for each in results.decisions
    ]
    return lines


def _streams_of(load: StreamLoad) -> str:
    rate = f"each {1 / load.step_s:.0f} tokens/s" if load.step_s else "as fast as they come"
    return f"{load.num_streams} at once, {rate}"
