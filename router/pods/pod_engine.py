"""One of a pod's engines: a target of its own for requests, as each has its own queue and prefix cache. Most pods have
one."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from common.pb import pods_pb2
from router.placing.index import PrefixIndex
from router.placing.policies import HeldAdapters
from router.pods.load import PodLoad

MAX_ENGINES = 64  # most engines of one pod
_NO_SUMS = frozenset(
    {
        "last_step_s",
        "last_step_tokens",
        "draining",
        "kv_events",
        "data_parallel_rank",
        "adapters",
        "running_adapters",
    }
)


class PodEngine:
    """An engine as the router knows it, across the pod's connections."""

    def __init__(self, index: PrefixIndex, data_parallel_rank: int) -> None:
        self.data_parallel_rank = data_parallel_rank
        self.load = PodLoad()
        self.slot: int | None = None  # in the index; None while not connected
        self.is_fed = False  # it has told which blocks it holds
        self.stats: pods_pb2.PodStats | None = None  # its last report; None while there is none of this connection
        self.adapters = HeldAdapters()
        self._index = index

    def hold(self, adapters: HeldAdapters) -> None:
        """It has these adapters from now on."""
        if adapters != self.adapters:
            self.adapters = adapters
            if self.load.row is not None:
                self.load.row.hold(adapters)

    def connected(self, info: pods_pb2.PodInfo) -> None:
        """The pod was reached."""
        self.slot = self._index.join(capacity=max(1, info.num_blocks))
        self.is_fed = False
        self.load.connected()

    def disconnected(self) -> None:
        """The connection has ended. Idempotent."""
        if self.slot is not None:
            self._index.forget(self.slot)
            self.slot = None

    def apply(self, events: pods_pb2.KVEvents) -> bool:
        """See PrefixIndex.apply."""
        assert self.slot is not None
        applied = self._index.apply(
            self.slot, events.sequence, events.stored, events.removed, is_snapshot=events.is_snapshot
        )
        self.is_fed = self.is_fed or applied
        return applied


def join_reports(by_engine: Sequence[pods_pb2.PodStats]) -> pods_pb2.PodStats:
    """The reports of several engines together: sums, and the longest of their last steps."""
    joined = pods_pb2.PodStats()
    for engine, stats in enumerate(by_engine):
        num_before = len(joined.ranks)
        _add(joined, stats)
        for rank in joined.ranks[num_before:]:
            rank.engine = engine
    slowest = max(by_engine, key=lambda stats: stats.last_step_s)
    joined.last_step_s, joined.last_step_tokens = slowest.last_step_s, slowest.last_step_tokens
    joined.draining = any(stats.draining for stats in by_engine)
    joined.running_adapters.extend(sorted({digest for stats in by_engine for digest in stats.running_adapters}))
    return joined


def _add(total: Message, addend: Message) -> None:
    for field, value in addend.ListFields():
        if field.name in _NO_SUMS:
            continue
        if field.name == "ranks":
            total.ranks.extend(value)  # type: ignore[attr-defined]
        elif isinstance(value, Message):
            _add(getattr(total, field.name), value)
        else:
            setattr(total, field.name, getattr(total, field.name) + value)
