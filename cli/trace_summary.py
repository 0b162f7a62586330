"""Sums up the trace of an engine: the time of each operator."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.errors import BatonError

_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = "step "  # begins the names of steps, which have their numbers in them
_IDLE = ("wait", "transfer")
_PHASES = ("schedule", "prepare", "forward", "sample", "device", "update")


class Event(msgspec.Struct, gc=False):
    """An event of Chrome's trace format. Times are microseconds."""

    name: str
    ph: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0


class _Trace(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")


@dataclass(slots=True)
class OperatorTime:
    """Time of all calls of one operator, without those that it calls."""

    name: str
    num_calls: int = 0
    self_us: float = 0.0


class TraceSummary(NamedTuple):
    """Operators, those with the most time first."""

    host: list[OperatorTime]
    device: list[OperatorTime]


def summarize(path: Path) -> TraceSummary:
    """Reads a compressed trace. Raises BatonError if it is none."""
    try:
        events = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=_Trace).events
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise BatonError(f"{path}: not a trace: {error}") from error
    complete = [event for event in events if event.ph == "X"]
    return TraceSummary(
        _by_self_time(event for event in complete if event.cat in _HOST),
        _by_self_time(event for event in complete if event.cat in _DEVICE),
    )


def _by_self_time(events: Iterable[Event]) -> list[OperatorTime]:
    lanes: dict[tuple[int | str, int | str], list[Event]] = {}
    for event in events:
        lanes.setdefault((event.pid, event.tid), []).append(event)
    found: dict[str, OperatorTime] = {}
    for lane in lanes.values():
        _add_lane(lane, found)
    busy = [operator for operator in found.values() if operator.name not in _IDLE]
    return sorted(busy, key=attrgetter("self_us"), reverse=True)


def _add_lane(lane: list[Event], found: dict[str, OperatorTime]) -> None:
    """Adds the events of one thread or stream, which contain each other or do not overlap."""
    lane.sort(key=lambda event: (event.ts, -event.dur))
    open_until: list[tuple[float, OperatorTime]] = []  # the innermost last
    for event in lane:
        while open_until and open_until[-1][0] <= event.ts:
            open_until.pop()
        if open_until:
            open_until[-1][1].self_us -= event.dur
        name = _name_of(event)
        operator = found.setdefault(name, OperatorTime(name))
        operator.num_calls += 1
        operator.self_us += event.dur
        open_until.append((event.ts + event.dur, operator))


def _name_of(event: Event) -> str:
    if event.name.startswith(_STEP):
        return "(steps, outside phases)"
    return f"({event.name}, outside operators)" if event.name in _PHASES else event.name
