"""The figures of a run as a terminal shows them: the table of `vllm bench serve`, with more lines."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.figures import Distribution, Figures
from loadgen.slo import Slo, describe
from loadgen.workload import LoadOptions

_WIDTH, _NAME_WIDTH = 60, 46
_BUSY = 0.8  # of a core, above which the load generator may be what is measured
_LATE_MS = 10.0
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WORDS = {"mean": "Mean", "median": "Median", "p90": "P90", "p99": "P99"}


def as_table(figures: Figures, slo: Slo, options: LoadOptions) -> str:
    """Returns the table, and below it what the reader of the figures has to know."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [f"{name + ':':<{_NAME_WIDTH}} {value}" for name, value in rows(figures, slo, options)]
    for name, (short, title) in LATENCIES.items():
        lines += [title.center(_WIDTH, "-"), *_statistics(short, figures.latencies[name])]
    if figures.send_delay is not None:
        lines += ["Sent after the scheduled time".center(_WIDTH, "-"), *_statistics("delay", figures.send_delay)]
    if figures.errors:
        lines.append("Errors".center(_WIDTH, "-"))
        lines += [f"{kind + ':':<{_NAME_WIDTH}} {errors.num_requests}" for kind, errors in figures.errors.items()]
    lines.append("=" * _WIDTH)
    return "\n".join([*lines, *(f"note: {remark}" for remark in remarks(figures))])


def rows(figures: Figures, slo: Slo, options: LoadOptions) -> Iterator[tuple[str, str]]:
    """Yields names and values of what is no latency."""
    yield "Successful requests", str(figures.completed)
    yield "Failed requests", str(figures.failed)
    if figures.num_unfinished:
        yield "Unfinished requests", str(figures.num_unfinished)
    if options.max_concurrency is not None:
        yield "Maximum request concurrency", str(options.max_concurrency)
    if options.rate is not None:
        yield "Request rate configured (RPS)", f"{options.rate:.2f}"
    yield "Benchmark duration (s)", f"{figures.duration_s:.2f}"
    yield "Total input tokens", str(figures.total_input_tokens)
    yield "Total generated tokens", str(figures.total_output_tokens)
    yield "Request throughput (req/s)", f"{figures.request_throughput:.2f}"
    if figures.goodput is not None and figures.attainment is not None:
        yield "Request goodput (req/s)", f"{figures.goodput:.2f}"
        yield f"Requests within {describe(slo)} (%)", f"{100 * figures.attainment:.1f}"
    yield "Output token throughput (tok/s)", f"{figures.output_throughput:.2f}"
    yield "Peak output token throughput (tok/s)", f"{figures.max_output_tokens_per_s:.2f}"
    yield "Peak concurrent requests", str(figures.max_concurrent_requests)
    yield "Total token throughput (tok/s)", f"{figures.total_token_throughput:.2f}"
    if figures.draft_acceptance is not None:
        yield "Drafts that were right (%)", f"{100 * figures.draft_acceptance:.1f}"
    if figures.tokens_per_step is not None:
        yield "Output tokens per step of a request", f"{figures.tokens_per_step:.2f}"
    yield "Load generator, share of a core (%)", f"{100 * figures.cpu_share:.0f}"


def remarks(figures: Figures) -> Iterator[str]:
    """Yields what limits the meaning of the figures."""
    if figures.num_unfinished:
        yield "the run was interrupted: unfinished requests, the slowest perhaps among them, are in none of the figures"
    for kind, errors in figures.errors.items():
        yield f"{kind}, first of {errors.num_requests}: {' '.join(errors.example.split())}"
    if figures.failed:
        yield "latencies and throughput are those of successful requests only"
    if figures.num_without_usage:
        yield f"{figures.num_without_usage} answers came without usage: their chunks are counted as tokens"
    if figures.cpu_share > _BUSY:
        yield f"the load generator was busy for {figures.cpu_share:.0%} of the time; figures may be its own limits"
    if figures.send_delay is not None and figures.send_delay.p99 > _LATE_MS:
        yield "requests were sent late; goodput counts from the scheduled time, TTFT and E2EL from sending"


def _statistics(short: str, values: Distribution) -> Iterator[str]:
    for field, word in _WORDS.items():
        yield f"{f'{word} {short} (ms):':<{_NAME_WIDTH}} {getattr(values, field):.2f}"
