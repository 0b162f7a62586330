"""Runs random requests among random faults: `python -m tests.e2e.chaos --seed 7 --requests 300 --connector redis`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from common.demo_model import demo_model_path
from common.tokenization import Tokenizer
from tests.e2e.chaos.run import chaos_fleet, make_jobs, num_recoveries, run_rounds
from tests.e2e.clients.answers import Checker
from tests.e2e.faults.cases import CONNECTORS


def main() -> None:
    """Raises AssertionError if a request ended wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--connector", choices=CONNECTORS, action="append")
    args = parser.parse_args()
    started = time.monotonic()
    jobs = make_jobs(args.seed, args.requests)
    sys.stdout.write(f"reference: {time.monotonic() - started:.1f} s\n")
    checker = Checker(Tokenizer.from_directory(demo_model_path()))
    for connector in args.connector or CONNECTORS:
        started = time.monotonic()
        with chaos_fleet(connector) as fleet:
            sys.stdout.write(f"{connector}: ready after {time.monotonic() - started:.1f} s\n")
            sys.stdout.flush()
            outcomes = asyncio.run(run_rounds(fleet, jobs, checker, random.Random(f"{args.seed} {connector}")))
            recoveries = num_recoveries(fleet)
        seconds = time.monotonic() - started
        sys.stdout.write(f"{connector}: {dict(outcomes)}, {recoveries:.0f} recoveries, {seconds:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
