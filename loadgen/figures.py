"""The figures of a run, computed as `vllm bench serve` does, of which they have the names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadgen.load import Run
from loadgen.samples import Sample
from loadgen.slo import Slo, keeps

PERCENTILES = (90, 99)  # besides the median


class Distribution(NamedTuple):
    """Milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float


class Errors(NamedTuple):
    """Failures of one kind."""

    num_requests: int
    example: str  # the first message


class Figures(NamedTuple):
    """Latencies are those of requests that succeeded."""

    completed: int
    failed: int
    num_unfinished: int  # requests that an interruption left; they are in no other figure
    errors: Mapping[str, Errors]
    num_without_usage: int  # requests whose tokens are counted as chunks
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float  # per second, as are the next
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float  # within one second
    max_concurrent_requests: int
    goodput: float | None  # requests per second that keep the SLOs; None: there are none
    attainment: float | None  # share of all requests, successful or failed, that keep them
    latencies: Mapping[str, Distribution]  # ttft, tpot, itl, e2el
    send_delay: Distribution | None  # None: no request had a time at which to be sent
    cpu_share: float  # of one core, that the load generator took
    num_accepted_drafts: int  # of the output tokens, those that were guessed and verified
    num_rejected_drafts: int  # that are no output tokens

    @property
    def draft_acceptance(self) -> float | None:
        """The share of drafts that were right; None: the endpoint tells of none."""
        num_drafts = self.num_accepted_drafts + self.num_rejected_drafts
        return self.num_accepted_drafts / num_drafts if num_drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens of a request's step: one, and drafts that were right. None: the endpoint tells of no drafts."""
        num_steps = self.total_output_tokens - self.num_accepted_drafts
        return None if self.draft_acceptance is None or num_steps <= 0 else self.total_output_tokens / num_steps


def summarise(run: Run, slo: Slo) -> Figures:
    """Returns the figures of a run."""
    good = [sample for sample in run.samples if sample.failure is None]
    num_input = sum(sample.num_prompt_tokens for sample in good)
    num_output = sum(sample.num_output_tokens for sample in good)
    num_kept = sum(keeps(sample, slo) for sample in good)
    delays = [sample.delay_s for sample in run.samples if sample.due_s is not None and sample.sent_s]
    duration_s = max(run.duration_s, 1e-9)
    return Figures(
        completed=len(good),
        failed=len(run.samples) - len(good),
        num_unfinished=run.num_unfinished,
        errors=_errors(run.samples),
        num_without_usage=sum(not sample.has_usage for sample in good),
        duration_s=run.duration_s,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(good) / duration_s,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        max_output_tokens_per_s=float(tokens_per_second(run).max(initial=0.0)),
        max_concurrent_requests=max((number for _, number in concurrency(good)), default=0),
        goodput=num_kept / duration_s if slo else None,
        attainment=num_kept / max(len(run.samples), 1) if slo else None,
        latencies={name: distribution(values) for name, values in latencies_ms(good).items()},
        send_delay=distribution([1e3 * delay for delay in delays]) if delays else None,
        cpu_share=run.cpu_s / duration_s,
        num_accepted_drafts=sum(sample.num_accepted_drafts for sample in good),
        num_rejected_drafts=sum(sample.num_rejected_drafts for sample in good),
    )


def latencies_ms(good: Iterable[Sample]) -> dict[str, list[float]]:
    """Returns all values, in milliseconds, of requests that succeeded."""
    good = list(good)
    tpots = (sample.tpot_s for sample in good)
    return {
        "ttft": [1e3 * sample.ttft_s for sample in good],
        "tpot": [1e3 * tpot for tpot in tpots if tpot is not None],
        "itl": [1e3 * gap for sample in good for gap in sample.gaps_s],
        "e2el": [1e3 * sample.e2e_s for sample in good],
    }


def distribution(values: Sequence[float]) -> Distribution:
    """Returns mean and percentiles; all zero if there are no values."""
    column = np.asarray(values if len(values) else [0.0])
    p50, p90, p99 = np.percentile(column, (50, *PERCENTILES))
    return Distribution(float(column.mean()), float(p50), float(column.std()), float(p90), float(p99))


def tokens_per_second(run: Run) -> npt.NDArray[np.float64]:
    """Returns the output tokens of each second of the run. A chunk counts as its share of the answer's tokens."""
    good = [sample for sample in run.samples if sample.failure is None]
    if not good:
        return np.zeros(0)
    times = np.concatenate([sample.token_times for sample in good]) - run.started_s
    weights = np.concatenate(
        [np.full(len(sample.token_times), sample.num_output_tokens / len(sample.token_times)) for sample in good]
    )
    return np.bincount(times.astype(np.int64), weights=weights).astype(np.float64)


def concurrency(good: Iterable[Sample]) -> list[tuple[float, int]]:
    """Returns when how many requests were under way: each time at which the number changes."""
    changes = [change for sample in good for change in ((sample.sent_s, 1), (sample.token_times[-1], -1))]
    number, steps = 0, []
    for when_s, change in sorted(changes):  # an end before a beginning at the same time
        number += change
        steps.append((when_s, number))
    return steps


def _errors(samples: Iterable[Sample]) -> dict[str, Errors]:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    examples: dict[str, str] = {}
    for failure in failures:
        examples.setdefault(failure.kind, failure.message)
    return {
        kind: Errors(count, examples[kind]) for kind, count in Counter(each.kind for each in failures).most_common()
    }


def as_json(figures: Figures) -> dict[str, Any]:
    """Returns the figures under the names that `vllm bench serve` gives them."""
    latencies = {
        f"{statistic}_{name}_ms": value
        for name, values in figures.latencies.items()
        for statistic, value in values._asdict().items()
    }
    return {
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "unfinished": figures.num_unfinished,
        "errors": {kind: errors._asdict() for kind, errors in figures.errors.items()},
        "requests_without_usage": figures.num_without_usage,
        "total_input_tokens": figures.total_input_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "request_throughput": figures.request_throughput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "max_output_tokens_per_s": figures.max_output_tokens_per_s,
        "max_concurrent_requests": figures.max_concurrent_requests,
        "request_goodput": figures.goodput,
        "slo_attainment": figures.attainment,
        "accepted_drafts": figures.num_accepted_drafts,
        "rejected_drafts": figures.num_rejected_drafts,
        "draft_acceptance": figures.draft_acceptance,
        "tokens_per_step": figures.tokens_per_step,
        **latencies,
        "send_delay_ms": None if figures.send_delay is None else figures.send_delay._asdict(),
        "load_generator_cpu_share": figures.cpu_share,
    }


def requests_as_json(run: Run) -> list[dict[str, Any]]:
    """Returns each request: times in seconds from the beginning of the run, gaps in milliseconds."""
    return [
        {
            "due": None if sample.due_s is None else sample.due_s - run.started_s,
            "sent": sample.sent_s - run.started_s if sample.sent_s else None,
            "input_tokens": sample.num_prompt_tokens,
            "output_tokens": sample.num_output_tokens,
            "ttft_ms": 1e3 * sample.ttft_s if sample.failure is None else None,
            "itl_ms": [1e3 * gap for gap in sample.gaps_s] if sample.failure is None else [],
            "error": None if sample.failure is None else sample.failure.kind,
        }
        for sample in run.samples
    ]
