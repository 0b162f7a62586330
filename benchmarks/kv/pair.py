"""Two sides and the medium between them, as the benchmark sees them."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Child
from benchmarks.kv.medium import Medium, open_medium
from benchmarks.kv.wire import Close, Link, Meet, OpenBare, Ran, Ready, Run, Setup

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    seconds: float  # forward end until the last request is runnable
    latencies: tuple[float, ...]  # of each handoff, in seconds
    cpu_s: float  # of all processes
    num_stubbed: int  # digests left out


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that was looked at."""

    is_right: bool  # the target has the source's bytes
    producer_growth: int  # bytes resident at most, less those at the start
    consumer_growth: int


class Pair:
    """A producer and a consumer of one connector and block size."""

    def __init__(self, producer: Link, consumer: Link, medium: Medium) -> None:
        self._sides = (producer, consumer)
        self._medium = medium
        self._seed = 0
        self._introduce(is_bare=False)

    def open_bare(self) -> None:
        """Open the bare media."""
        for side in self._sides:
            side.send(OpenBare())
        self._introduce(is_bare=True)

    def run(self, run: Run) -> Sample:
        """One run and the cleaning after it, which is not measured."""
        server_cpu_s = self._medium.server_cpu_s
        produced, consumed = self._both(run)
        cpu_s = produced.cpu_s + consumed.cpu_s + self._medium.server_cpu_s - server_cpu_s
        self._medium.clean()
        latencies = tuple(end - produced.times[0] for end in consumed.times)
        return Sample(max(latencies), latencies, cpu_s, produced.num_stubbed + consumed.num_stubbed)

    def check(self, run: Run) -> Checked:
        """One run, not for its time."""
        produced, consumed = self._both(run)
        self._medium.clean()
        return Checked(produced.content == consumed.content, produced.rss_growth, consumed.rss_growth)

    def close(self) -> None:
        """End both sides."""
        for side in self._sides:
            side.send(Close())

    def next_seed(self) -> int:
        """Makes a run's blocks new to every store."""
        self._seed += 1
        return self._seed

    def _introduce(self, *, is_bare: bool) -> None:
        producer, consumer = (_expect(side, Ready).address for side in self._sides)
        self._sides[0].send(Meet(consumer, is_bare))
        self._sides[1].send(Meet(producer, is_bare))

    def _both(self, run: Run) -> tuple[Ran, Ran]:
        for side in self._sides:
            side.send(run)
        produced, consumed = (_expect(side, Ran) for side in self._sides)
        if error := produced.error or consumed.error:
            raise SystemExit(f"a handoff failed: {error}")
        return produced, consumed


def _expect(side: Link, kind: type) -> Any:
    try:
        message = side.receive()
    except (EOFError, ConnectionError):
        raise SystemExit("a side of the benchmark died; its error is above") from None
    assert isinstance(message, kind), message
    return message


@contextmanager
def open_pair(connector: str, block_bytes: int, num_blocks: int, tmpfs: Path) -> Iterator[Pair]:
    """Start the medium and both sides, each with a KV cache of `num_blocks`."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=tmpfs))
        medium = stack.enter_context(open_medium(connector, Path(scratch)))
        setup = Setup(medium.connector, {"timeout_s": 120.0, **medium.options}, block_bytes, num_blocks, scratch)
        between = socket.socketpair()
        sides = [
            stack.enter_context(_side(role, setup, end, medium.env))
            for role, end in zip(("producer", "consumer"), between, strict=True)
        ]
        for end in between:
            end.close()  # so that a side sees the end of the other
        pair = Pair(sides[0], sides[1], medium)
        yield pair
        pair.close()


@contextmanager
def _side(role: str, setup: Setup, between: socket.socket, env: Mapping[str, str]) -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    numbers = (theirs.fileno(), between.fileno())
    command = ("-m", "benchmarks.kv.side", role, *map(str, numbers))
    # UCX chatters on its output.
    with Child(*command, variables=env, ends_with_input=True, stdout=subprocess.DEVNULL, pass_fds=numbers):
        theirs.close()
        with ours:
            link = Link(ours)
            link.send(setup)
            yield link
