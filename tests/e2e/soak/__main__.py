"""Soaks a cluster and prints what its processes hold: `python -m tests.e2e.soak --requests 10000 --connector nixl`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kv_store.registry import JOINING_CONNECTOR_NAMES
from tests.e2e.machine import describe_machine
from tests.e2e.soak.footprint import MAX_GROWTH, NUM_SPARE, Sample, baseline_of, growth_problems
from tests.e2e.soak.run import NUM_BLOCKS, NUM_CLIENTS, Soak, soak_cluster

MAX_SHOWN = 20  # wrong answers
_EXPLANATION = """# Soak

`python -m tests.e2e.soak --requests {num_requests} --connector {connector} --seed {seed} --markdown FILE`

- machine: {machine}
- date: {date}, {minutes:.0f} minutes
- requests: {outcomes}
- verdict: {verdict}

One router, one prefill pod and two decode pods of {num_blocks} blocks each, started by `baton up`; {num_clients}
clients at once. Requests are drawn from the seed: completions and chats over HTTP and gRPC, streamed or not, with any
sampling options; some clients leave in the middle, others drop their connection and resume the stream, and some
requests must be refused. Each row was read when all had ended: resident memory in MiB / open file descriptors /
threads / asyncio tasks (engine cores have none). At each of these moments `CheckIntegrity` found every pod sound, with
no request, KV block or transfer left. "Flat" means: after the last request no process has over {growth:.0%} more
memory, or over {spare} more descriptors, threads or tasks, than after the first {warm_up}.

Answers are checked for status, finish reason and number of tokens.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an answer was wrong, or a process holds more and more."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connector", choices=JOINING_CONNECTOR_NAMES, default="nixl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, soak_cluster(args.connector, Path(directory)) as cluster:
        soak = Soak(cluster, args.seed)
        asyncio.run(soak.run(args.requests, _print))
    problems = growth_problems(baseline_of(soak.samples), soak.samples[-1])
    problems += [f"{len(soak.failures)} wrong answers"] if soak.failures else []
    sys.stderr.write("".join(f"{line}\n" for line in [*soak.failures[:MAX_SHOWN], *problems]))
    sys.stdout.write(f"{dict(soak.outcomes)}\n")
    if args.markdown:
        explanation = _EXPLANATION.format(
            num_requests=args.requests,
            connector=args.connector,
            seed=args.seed,
            machine=describe_machine(),
            date=datetime.now(UTC).date(),
            minutes=(time.monotonic() - started) / 60,
            outcomes=", ".join(f"{count} {kind}" for kind, count in sorted(soak.outcomes.items())),
            verdict="; ".join(problems) or "flat, and no wrong answer",
            num_blocks=NUM_BLOCKS,
            num_clients=NUM_CLIENTS,
            growth=MAX_GROWTH,
            spare=NUM_SPARE,
            warm_up=baseline_of(soak.samples).num_requests,
        )
        args.markdown.write_text(explanation + _table(soak.samples))
    return int(bool(problems))


def _print(sample: Sample) -> None:
    values = ", ".join(f"{name} {usage}" for name, usage in sample.usages.items())
    sys.stdout.write(f"{sample.num_requests}: {values}\n")
    sys.stdout.flush()


def _table(samples: Sequence[Sample]) -> str:
    names = list(samples[0].usages)
    rows = [["requests", *names], ["---"] * (1 + len(names))]
    rows += [[str(sample.num_requests), *(str(sample.usages[name]) for name in names)] for sample in samples]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
