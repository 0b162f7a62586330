"""The figures as a page of markdown, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from benchmarks.harness.report import Page, Verdict, table, verdict_table
from benchmarks.router.measure import Results, StreamLoad
from benchmarks.router.systems import OURS, RIVAL

MAX_ADDED_S = 3e-3
MIN_TOKENS_PER_CPU_S = 15_000
MAX_DECISION_US = 200
MAX_BYTES_PER_STREAM = 40 * 1000

_Figures = TypeVar("_Figures")


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


def make_page(machine: dict[str, str], results: Results) -> Page:
    """Prints the tables, and returns the page with them."""
    words = "`python -m benchmarks.router`, whose help says what is measured. Medians."
    page = Page("What the router costs", words, {**machine, **results.versions})
    page.add("", *verdict_table(verdicts(results)))
    for title, lines in (
        ("Answers of one token", _answers(results)),
        ("Streams", _streams(results)),
        ("Memory per open stream", _idle(results)),
        ("Decisions", _decisions(results)),
    ):
        page.section(title)
        page.add(*lines)
    if RIVAL not in results.versions:
        page.add("", f"{RIVAL} was not measured: it is not installed, or was left out.")
    return page


def _by_load(figures: Mapping[tuple[str, Any], _Figures]) -> list[tuple[str, Any, _Figures]]:
    """Returns system, load and figures, with the systems of one load side by side."""
    found = [(name, load, each) for (name, load), each in figures.items()]
    return sorted(found, key=lambda item: (item[1], item[0]))


def _answers(results: Results) -> list[str]:
    columns = (
        "at once | system | requests/s | p50, ms | p99 | direct p50 | direct p99 | added p50 | added p99 | CPU, ms"
    )
    return table(
        columns,
        (
            (load, name, f"{each.requests_per_s:,.0f}", *(f"{1e3 * seconds:.2f}" for seconds in each[1:]))
            for name, load, each in _by_load(results.answers)
        ),
    )


def _streams(results: Results) -> list[str]:
    rows = []
    for name, load, each in _by_load(results.streams):
        rate = f"{1 / load.step_s:.0f}" if load.step_s else "as many as come"
        figures = (f"{each.tokens_per_cpu_s:,.0f}", f"{each.tokens_per_s:,.0f}", f"{each.tokens_per_event:.2f}")
        rows.append((load.num_streams, rate, name, *figures))
    columns = "streams | tokens/s of each | system | tokens/s per core of the router | tokens/s | tokens per event"
    return table(columns, rows)


def _idle(results: Results) -> list[str]:
    rows = [(load, name, f"{each.bytes_per_stream / 1e3:.1f}") for name, load, each in _by_load(results.idle)]
    return table("open streams | system | KB each", rows)


def _decisions(results: Results) -> list[str]:
    return table(
        "pods | indexed blocks | p50, us | p99, us | index, bytes per block and pod",
        (row[:1] + tuple(f"{figure:,.0f}" for figure in row[1:]) for row in results.decisions),
    )


def _streams_of(load: StreamLoad) -> str:
    rate = f"each {1 / load.step_s:.0f} tokens/s" if load.step_s else "as fast as they come"
    return f"{load.num_streams} at once, {rate}"
