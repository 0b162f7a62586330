"""Whether two endpoints differ beyond noise.

Runs take turns, ABBA ABBA ..., so that what drifts with time meets both alike. Requests of one run share its
conditions; so a run, not a request, is one observation. For each figure an exact rank-sum test (Wilcoxon, Mann-Whitney)
over the runs says how likely such an order of them is without a difference. Several figures are tested, so their
p-values are corrected by Holm's method.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loadgen.figures import Figures

ALPHA = 0.05
FIGURES: Mapping[str, Callable[[Figures], float]] = {
    "Median TTFT (ms)": lambda figures: figures.latencies["ttft"].median,
    "P99 TTFT (ms)": lambda figures: figures.latencies["ttft"].p99,
    "Median ITL (ms)": lambda figures: figures.latencies["itl"].median,
    "P99 ITL (ms)": lambda figures: figures.latencies["itl"].p99,
    "Median E2EL (ms)": lambda figures: figures.latencies["e2el"].median,
    "Output token throughput (tok/s)": lambda figures: figures.output_throughput,
}


class Difference(NamedTuple):
    """One figure of both endpoints."""

    name: str
    a: float  # median over its runs
    b: float
    p_value: float  # corrected

    @property
    def ratio(self) -> float | None:
        """How much more B has, as a share; None where A has nothing."""
        return self.b / self.a - 1 if self.a else None

    @property
    def is_significant(self) -> bool:
        """Whether the difference is beyond noise."""
        return self.p_value < ALPHA

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.is_significant:
            return "within noise"
        return f"B is {'higher' if self.b > self.a else 'lower'}"


def order(repeats: int) -> str:
    """Returns the order of runs: "ABBA" for each repeat."""
    return "ABBA" * repeats


def differences(runs_a: Sequence[Figures], runs_b: Sequence[Figures]) -> list[Difference]:
    """Returns what the runs of A and B say of each figure."""
    columns = {name: ([of(run) for run in runs_a], [of(run) for run in runs_b]) for name, of in FIGURES.items()}
    p_values = holm([rank_sum_p(a, b) for a, b in columns.values()])
    return [
        Difference(name, statistics.median(a), statistics.median(b), p_value)
        for (name, (a, b)), p_value in zip(columns.items(), p_values, strict=True)
    ]


def rank_sum_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p-value of the exact rank-sum test; equal values share the mean of their ranks."""
    ranks = _doubled_ranks([*a, *b])
    observed, expected = sum(ranks[: len(a)]), len(a) * sum(ranks) / len(ranks)
    # Of all ways to choose so many ranks: how often each sum comes.
    sums: list[Counter[int]] = [Counter({0: 1}), *(Counter[int]() for _ in a)]
    for rank in ranks:
        for size in range(len(a), 0, -1):
            for total, ways in sums[size - 1].items():
                sums[size][total + rank] += ways
    as_far = sum(ways for total, ways in sums[-1].items() if abs(total - expected) >= abs(observed - expected) - 1e-9)
    return as_far / sums[-1].total()


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number, by Holm's method."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for position, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = highest
    return corrected


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the ranks, which are whole numbers also where values are equal."""
    return [sum(other < value for other in values) + sum(other <= value for other in values) + 1 for value in values]
