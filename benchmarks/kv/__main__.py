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
    stock        bare nixl whose progress thread spins, as NIXL's own Python class sets it; bare's sleeps, like ours
    CPU s/GiB    of producer, consumer and server
    digest       part of the time that is saved when digests of blocks cost nothing
    memory       most bytes resident in each process during a handoff, less those before: the KV caches are in both
    hidden       between real pods with a real model: see benchmarks/kv/pods.py

nixl takes what UCX picks between processes of one machine, shared memory; nixl-tcp has to use TCP, and is left out
between pods.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.kv.measure import MIB, Plan, measure
from benchmarks.kv.medium import CONNECTORS
from benchmarks.kv.report import facts, format_markdown, format_row, verdicts
from benchmarks.page import format_verdict

KIB = 1 << 10


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = _parser().parse_args(argv)
    plan = _plan(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is in memory is removed
    machine = facts()
    results = measure(plan, lambda figures: print(format_row(figures), flush=True))
    found = verdicts(results)
    print("\n".join(["", *(f"left out for the memory bound: {what}" for what in results.skipped)]))
    print("\n".join(map(format_verdict, found)))
    if args.json:
        content = {"machine": machine, **asdict(results), "targets": [asdict(verdict) for verdict in found]}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(format_markdown(machine, results, found, args.note))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connectors", type=_names, default=CONNECTORS, help=f"of {','.join(CONNECTORS)}")
    parser.add_argument("--block-kib", type=_numbers, default=(64, 1024), help="sizes of blocks")
    parser.add_argument("--blocks", type=_numbers, default=(1, 16, 128, 1024), help="numbers of blocks of a handoff")
    parser.add_argument("--concurrency", type=_numbers, default=(4, 16), help="handoffs at once")
    parser.add_argument("--concurrent-blocks", type=int, default=16, help="blocks of each of several handoffs at once")
    parser.add_argument("--repeats", type=int, default=300, help="most repeats of a cell")
    parser.add_argument("--cell-s", type=float, default=2.5, help="seconds after which a cell is not repeated any more")
    parser.add_argument("--memory-mib", type=int, default=8192, help="skip what needs more memory")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="directory in memory")  # noqa: S108
    parser.add_argument("--contiguous", action="store_true", help="neighbouring blocks; default: shuffled ones")
    parser.add_argument("--pod-blocks", type=_numbers, default=(1, 16, 128), help="blocks that pods hand over")
    parser.add_argument("--pod-repeats", type=int, help="handoffs of each kind between pods, 0 for none; default: 5")
    parser.add_argument("--quick", action="store_true", help="little, and no pods, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--note", default="", help="a remark for the page of markdown")
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
        is_contiguous=args.contiguous,
        pod_blocks=tuple(sorted(args.pod_blocks)),
        pod_repeats=args.pod_repeats,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
