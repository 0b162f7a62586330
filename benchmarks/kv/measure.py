"""Cells of the table: what is run, and the figures of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.figures import in_turn, p99, ratio
from benchmarks.kv.pair import GIB, Checked, Pair, Sample, open_pair
from benchmarks.kv.pods import PodHandoffs, measure_pods
from benchmarks.kv.wire import MODES, Mode, Run

MIB = 1 << 20
_MIN_REPEATS = 5
_FEW_BLOCKS = 16  # whose staging is compared with that of the most blocks, and on which bare media are checked
_CELL_S = 2.5  # after which a cell is not repeated any more
CONCURRENT_BLOCKS = 16  # of each of several handoffs at once
TMPFS = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements of a run."""

    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]
    concurrency: tuple[int, ...]  # handoffs at once, of CONCURRENT_BLOCKS each
    repeats: int  # at most
    pod_blocks: tuple[int, ...]  # of prompts that real pods hand over, ascending
    pod_repeats: int


@dataclass(frozen=True, slots=True)
class Way:
    """Medians of one way of moving the bytes."""

    seconds: float
    bytes_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one number of blocks and of handoffs at once."""

    connector: str
    block_bytes: int
    num_blocks: int
    num_handoffs: int
    num_samples: int
    p50_s: float  # handoff latency
    p99_s: float
    ways: dict[Mode, Way]
    share_of_bare: float  # of its bandwidth: median over pairs of runs
    own_s: float  # ours less the bare medium: median over pairs of runs
    digest_share: float | None  # of the handoff; None: not measured

    @property
    def total_bytes(self) -> int:
        """Bytes of all handoffs of a run."""
        return self.block_bytes * self.num_blocks * self.num_handoffs

    @property
    def bare(self) -> Way:
        """The bare medium."""
        return self.ways["bare"]


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory that handoffs took beside the KV caches."""

    connector: str
    block_bytes: int
    num_blocks: int
    producer_bytes: int
    consumer_bytes: int


@dataclass(frozen=True, slots=True)
class Results:
    """All of it."""

    cells: list[Cell]
    staging: list[Staging]
    pods: list[PodHandoffs]


def measure(plan: Plan, connectors: Sequence[str], tell: Callable[[Cell | PodHandoffs], None]) -> Results:
    """Run everything; `tell` gets each figure when it is done."""
    results = Results([], [], [])
    shapes = [(blocks, 1) for blocks in plan.num_blocks]
    shapes += [(CONCURRENT_BLOCKS, handoffs) for handoffs in plan.concurrency]
    for connector in connectors:
        for block_bytes in plan.block_bytes:
            _measure_pair(plan, connector, block_bytes, shapes, results, tell)
        if connector != "nixl-tcp":
            for handoffs in measure_pods(connector, plan.pod_blocks, plan.pod_repeats, TMPFS):
                results.pods.append(handoffs)
                tell(handoffs)
    return results


def _measure_pair(
    plan: Plan,
    connector: str,
    block_bytes: int,
    shapes: Sequence[tuple[int, int]],
    results: Results,
    tell: Callable[[Cell | PodHandoffs], None],
) -> None:
    num_blocks = max(blocks * handoffs for blocks, handoffs in shapes) + 1  # and the null block
    few = min(_FEW_BLOCKS, num_blocks - 1)
    with open_pair(connector, block_bytes, num_blocks, TMPFS) as pair:
        for blocks in sorted({few, max(blocks for blocks, _ in shapes)}):
            results.staging.append(_measure_staging(pair, connector, block_bytes, blocks))
        pair.open_bare()
        for mode in _modes(connector)[1:-1]:
            _check(pair, mode, few)
        for blocks, handoffs in shapes:
            cell = _measure_cell(plan, pair, connector, block_bytes, blocks, handoffs)
            results.cells.append(cell)
            tell(cell)


def _check(pair: Pair, mode: Mode, num_blocks: int) -> Checked:
    """One run that must bring the right bytes."""
    checked = pair.check(Run(mode, pair.next_seed(), num_blocks, check=True))
    if not checked.is_right:
        raise SystemExit(f"{mode}: the consumer has other bytes than the producer")
    return checked


def _measure_staging(pair: Pair, connector: str, block_bytes: int, num_blocks: int) -> Staging:
    checked = _check(pair, "ours", num_blocks)
    return Staging(connector, block_bytes, num_blocks, checked.producer_growth, checked.consumer_growth)


def _measure_cell(plan: Plan, pair: Pair, connector: str, block_bytes: int, num_blocks: int, num_handoffs: int) -> Cell:
    """All modes in turn, each round in another order; the first round warms up."""
    modes = _modes(connector) if num_handoffs == 1 else MODES[:2]
    samples: dict[Mode, list[Sample]] = {mode: [] for mode in modes}
    give_up = time.monotonic() + _CELL_S
    for repeat in range(plan.repeats + 1):
        if repeat > _MIN_REPEATS and time.monotonic() > give_up:
            break
        for mode in in_turn(modes, repeat):
            sample = pair.run(Run(mode, pair.next_seed(), num_blocks, num_handoffs))
            if repeat:
                samples[mode].append(sample)
    total_bytes = block_bytes * num_blocks * num_handoffs
    ways = {mode: _way(taken, total_bytes) for mode, taken in samples.items()}
    ours, bare = samples["ours"], samples["bare"]
    latencies = [latency for sample in ours for latency in sample.latencies]
    return Cell(
        connector=connector,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_handoffs=num_handoffs,
        num_samples=len(latencies),
        p50_s=statistics.median(latencies),
        p99_s=p99(latencies),
        ways=ways,
        share_of_bare=ratio((b.seconds for b in bare), (o.seconds for o in ours)),
        own_s=statistics.median(o.seconds - b.seconds for o, b in zip(ours, bare, strict=True)),
        digest_share=_digest_share(ours, samples.get("undigested", [])),
    )


def _modes(connector: str) -> tuple[Mode, ...]:
    """One write of NIXL's is what it is, on whatever thread."""
    return tuple(mode for mode in MODES if mode != "threaded" or not connector.startswith("nixl"))


def _way(samples: Sequence[Sample], total_bytes: int) -> Way:
    seconds = statistics.median(sample.seconds for sample in samples)
    cpu_s = statistics.fmean(sample.cpu_s for sample in samples)  # the kernel counts it too coarsely for a median
    return Way(seconds, total_bytes / seconds, cpu_s * GIB / total_bytes)


def _digest_share(ours: Sequence[Sample], undigested: Sequence[Sample]) -> float | None:
    """Part of a handoff that is saved if digests cost nothing; None if none was left out after all."""
    if not undigested or not undigested[0].num_stubbed:
        return None
    return statistics.median(1 - u.seconds / o.seconds for o, u in zip(ours, undigested, strict=True))
