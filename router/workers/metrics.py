"""One exposition of the metrics of all workers.

Counters and histograms are sums. Those of workers that died stay in them, as they were when last read: a sum that fell
would look like a restart of the router, and its whole value like an increase. Gauges are sums as well, but for those
that each worker says of the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

_POD_PREFIX = "baton_router_pod_"  # figures of pods, of which each worker hears
_COUNTED_BY_WORKERS = {"baton_router_pod_ejections"}  # though the names begin like those of pods' figures
_SUMMED_TYPES = {"counter", "histogram"}
_SAME_OF_ALL: Mapping[str, Callable[[float, float], float]] = {
    "baton_router_build_info": max,
    "baton_router_discovery_pods": max,
    "baton_router_pod_ready": min,  # a pod that one worker cannot use deserves a look
    "baton_router_prefix_index_blocks": max,
    "process_max_fds": min,
    "process_start_time_seconds": min,
}

_Key = tuple[str, tuple[tuple[str, str], ...]]  # name and sorted labels of a sample


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with all its series, as one worker has it."""

    name: str
    documentation: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


def read_families(registry: CollectorRegistry) -> list[Family]:
    """All metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class Exposition:
    """Metrics of workers, each known by a number that no other has, its successor included."""

    def __init__(self) -> None:
        self._last: dict[int, list[Family]] = {}  # last metrics of each running worker
        self._retired: list[Family] = []  # sums over workers that have ended

    def update(self, worker: int, families: list[Family]) -> None:
        """Replaces what the worker said before."""
        self._last[worker] = families

    def retire(self, worker: int) -> None:
        """The worker has died: what it counted is kept, what it had is not."""
        kept = [family for family in self._last.pop(worker, []) if _outlives_worker(family)]
        self._retired = list(_merged([self._retired, kept]))

    def text(self, own: CollectorRegistry) -> bytes:
        """In Prometheus' format; `own`: what is only the parent's."""
        return generate_latest(_Families([*_merged([*self._last.values(), self._retired]), *read_families(own)]))


def _outlives_worker(family: Family) -> bool:
    return family.kind in _SUMMED_TYPES and not _is_of_pods(family.name)


def _is_of_pods(name: str) -> bool:
    return name.startswith(_POD_PREFIX) and name not in _COUNTED_BY_WORKERS


def _merged(workers: Iterable[list[Family]]) -> Iterator[Family]:
    by_name: dict[str, list[Family]] = {}
    for families in workers:
        for family in families:
            by_name.setdefault(family.name, []).append(family)
    for same in by_name.values():
        yield same[0] if len(same) == 1 else reduce(_joined, same)


def _joined(first: Family, second: Family) -> Family:
    join = _SAME_OF_ALL.get(first.name) or (max if _is_of_pods(first.name) else float.__add__)
    values: dict[_Key, tuple[dict[str, str], float]] = {}
    for name, labels, value in [*first.samples, *second.samples]:
        key = name, tuple(sorted(labels.items()))
        if (known := values.get(key)) is not None:
            value = min(known[1], value) if name.endswith("_created") else join(known[1], value)
        values[key] = labels, value
    samples = [(name, labels, value) for (name, _), (labels, value) in values.items()]
    return Family(first.name, first.documentation, first.kind, samples)


class _Families:
    """A collector for `generate_latest`."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
