"""Handoffs of KV between two processes on this machine, next to their bare media.

    python -m benchmarks.kv [--markdown FILE] [--connectors nixl,redis] [--quick]

For each connector a producer and a consumer, processes of their own, hand over blocks of one KV cache to another. The
same bytes of the same blocks then go between the same processes over the bare medium, and by one memcpy into shared
memory; all in turn, so that whatever else runs on the machine hits all of them.

    latency      from the end of prefill's forward until the request is runnable on the decode side: saving, telling
                 (on a socket between the two, in place of the pods' gRPC stream), loading, verifying. All blocks of a
                 handoff are saved after the forward, as if the prompt had been one chunk.
    GB/s         bytes handed over / time from forward end to the last of them runnable
    bare         shared-storage: a file written and read for each block, same tmpfs. redis: SET and GET in pipelines,
                 same client, same server. Both on one thread. nixl: one write of the same descriptors, polled. No
                 digest, no copy on top.
    threaded     the stores' bare media on as many threads as their connectors have
    CPU s/GiB    of producer, consumer and server
    digest       part of the time that is saved when digests of blocks cost nothing
    memory       most bytes resident in each process during a handoff, less those before: the KV caches are in both
    hidden       between real pods with a real model: see benchmarks/kv/pods.py

nixl takes what UCX picks between processes of one machine, shared memory; nixl-tcp has to use TCP, and is left out
between pods.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command import make_parser
from benchmarks.kv.measure import MIB, Plan, measure
from benchmarks.kv.medium import CONNECTORS
from benchmarks.kv.report import facts, make_page

KIB = 1 << 10


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is in memory is removed
    machine = facts()
    results = measure(_plan(args), lambda figures: print(figures, file=sys.stderr, flush=True))
    make_page(machine, results).write(args.markdown)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.kv", __doc__, repeats=300, has_quick=True)
    parser.add_argument("--connectors", type=_names, default=CONNECTORS, help=f"of {','.join(CONNECTORS)}")
    parser.add_argument("--block-kib", type=_numbers, default=(64, 1024), help="sizes of blocks")
    parser.add_argument("--blocks", type=_numbers, default=(1, 16, 128, 1024), help="numbers of blocks of a handoff")
    parser.add_argument("--concurrency", type=_numbers, default=(4, 16), help="handoffs at once")
    parser.add_argument("--concurrent-blocks", type=int, default=16, help="blocks of each of several handoffs at once")
    parser.add_argument("--cell-s", type=float, default=2.5, help="seconds after which a cell is not repeated any more")
    parser.add_argument("--memory-mib", type=int, default=8192, help="skip what needs more memory")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="directory in memory")  # noqa: S108
    parser.add_argument("--pod-blocks", type=_numbers, default=(1, 16, 128), help="blocks that pods hand over")
    parser.add_argument("--pod-repeats", type=int, help="handoffs of each kind between pods, 0 for none; default: 5")
    return parser


def _plan(args: argparse.Namespace) -> Plan:
    unknown = set(args.connectors) - set(CONNECTORS)
    if unknown:
        raise SystemExit(f"--connectors: {', '.join(sorted(unknown))} is none of {', '.join(CONNECTORS)}")
    if args.quick:
        args.block_kib, args.blocks, args.concurrency, args.repeats = (64,), (1, 16), (2,), 1
    if args.pod_repeats is None:
        args.pod_repeats = 0 if args.quick else 5
    return Plan(
        connectors=tuple(args.connectors),
        block_bytes=tuple(size * KIB for size in args.block_kib),
        num_blocks=tuple(args.blocks),
        concurrency=tuple(args.concurrency),
        concurrent_blocks=args.concurrent_blocks,
        repeats=args.repeats,
        cell_s=args.cell_s,
        memory_bytes=args.memory_mib * MIB,
        tmpfs=args.tmpfs,
        pod_blocks=tuple(sorted(args.pod_blocks)),
        pod_repeats=args.pod_repeats,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
