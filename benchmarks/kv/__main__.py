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

KV caches and media are in memory, 4 GiB of it, at most, in /dev/shm.

nixl takes what UCX picks between processes of one machine, shared memory; nixl-tcp has to use TCP, and is left out
between pods.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from benchmarks.harness.command import make_parser
from benchmarks.kv.measure import MIB, Plan, measure
from benchmarks.kv.medium import CONNECTORS
from benchmarks.kv.report import facts, make_page

FULL = Plan(
    block_bytes=(MIB // 16, MIB),
    num_blocks=(1, 16, 128, 1024),
    concurrency=(4, 16),
    repeats=300,
    pod_blocks=(1, 16, 128),
    pod_repeats=5,
)
QUICK = Plan(
    block_bytes=(MIB // 16,), num_blocks=(1, 16), concurrency=(2,), repeats=1, pod_blocks=(1, 16), pod_repeats=1
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.kv", __doc__, has_quick=True)
    parser.add_argument("--connectors", default=",".join(CONNECTORS), help="which; default: all")
    args = parser.parse_args(argv)
    connectors = args.connectors.split(",")
    if unknown := set(connectors) - set(CONNECTORS):
        parser.error(f"--connectors: {', '.join(sorted(unknown))} is none of {', '.join(CONNECTORS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is in memory is removed
    machine = facts()
    plan = QUICK if args.quick else FULL
    results = measure(plan, connectors, lambda figures: print(figures, file=sys.stderr, flush=True))
    make_page(machine, results).write(args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
