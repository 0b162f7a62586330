"""Routing policies side by side, on simulated clusters.

    python -m benchmarks.simulate [--setup NAME] [--requests N] [--policies A|B] [--markdown FILE]
    python -m benchmarks.simulate --overload [--markdown FILE]
    python -m benchmarks.simulate --routers 2 --routers 4   # several routers on the same pods, next to one

Pods and time are simulated, everything that decides is the router's own: policies, prefix index, load accounting,
learned rates. Results depend on nothing but the seed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, row, table
from benchmarks.simulate.overload import COLUMNS as OVERLOAD_COLUMNS
from benchmarks.simulate.overload import HEAD as OVERLOAD_HEAD
from benchmarks.simulate.overload import LOADS, MODES, overload
from benchmarks.simulate.report import RouterRow, Row, policies_table, routers_table, verdicts
from benchmarks.simulate.timing import CPU_DEMO, H100_8B
from benchmarks.simulate.traces import MAKERS, TraceMaker
from planning.simulator.cluster import Outcome, SimulatedCluster
from planning.simulator.hardware import Hardware
from planning.simulator.router import Setting
from planning.simulator.trace import Trace

POLICIES = ("round_robin", "least_loaded", "power_of_two", "session_affinity", "prefix_affinity", "kv_aware")
_FEW_POLICIES = ("round_robin", "least_loaded", "kv_aware")
_NUM_REQUESTS = 5_000
_MEAN_TURNS = {"chats": 4.5, "agents": 8}  # of a session


class Setup(NamedTuple):
    """A cluster, and how much comes to it: requests per second and pod that computes prompts, by trace."""

    title: str
    hardware: Hardware
    num_prefill: int
    num_decode: int
    rates: dict[str, float]
    policies: tuple[str, ...]

    def trace(self, name: str, num_requests: int, seed: int) -> Trace:
        """The trace of that name, of about so many requests."""
        maker = next(make for make in MAKERS if make.__name__ == name)
        rate = self.rates[name] * (self.num_prefill or self.num_decode)
        num_sessions = round(num_requests / _MEAN_TURNS.get(name, 1))
        return maker(TraceMaker(self.hardware.block_size, seed=seed), num_sessions, rate)


SETUPS = {
    "h100": Setup(
        "100 prefill and 100 decode pods, H100, 8B model",
        H100_8B,
        100,
        100,
        {"system_prompts": 12, "chats": 14, "agents": 10, "bursts": 9, "quarter_shared": 10, "unshared": 8},
        POLICIES,
    ),
    "h100-colocated": Setup(
        "100 decode pods that prefill themselves, H100, 8B model",
        H100_8B,
        0,
        100,
        {"system_prompts": 7, "chats": 8, "agents": 5, "bursts": 7, "quarter_shared": 5, "unshared": 4},
        _FEW_POLICIES,
    ),
    "cpu": Setup(
        "100 prefill and 100 decode pods, two CPU cores each, demo model",
        CPU_DEMO,
        100,
        100,
        {"system_prompts": 4, "chats": 5, "agents": 3.5, "bursts": 5, "quarter_shared": 4, "unshared": 3},
        _FEW_POLICIES,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per set-up, and what it says about the targets."""
    parser = make_parser("benchmarks.simulate", __doc__)
    parser.add_argument("--setup", choices=SETUPS, action="append", help="default: all")
    parser.add_argument("--trace", choices=[make.__name__ for make in MAKERS], action="append", help="default: all")
    parser.add_argument("--policies", help="separated by |, as their parts are by commas; default: the set-up's")
    parser.add_argument("--requests", type=int, default=_NUM_REQUESTS, help="about so many per trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routers", type=int, action="append", help="so many on the same pods, next to one")
    parser.add_argument("--overload", action="store_true", help="admission under overload, instead of policies")
    args = parser.parse_args(argv)
    if args.overload:
        page = Page(*OVERLOAD_HEAD, {})
        page.add("", *table(OVERLOAD_COLUMNS))
        for load in LOADS:
            for mode in MODES:
                page.add(row(*overload(load, mode).cells))
        page.write(args.markdown)
        return 0
    page = Page(*(_ROUTERS_HEAD if args.routers else _HEAD), {})
    for name in args.setup or SETUPS:
        setup = SETUPS[name]
        traces = [setup.trace(trace_name, args.requests, args.seed) for trace_name in args.trace or setup.rates]
        page.section(setup.title)
        if args.routers:
            page.add(*routers_table([compare_routers(setup, trace, args.routers) for trace in traces]))
        else:
            policies = args.policies.split("|") if args.policies else setup.policies
            rows = [each for trace in traces for each in compare(setup, trace, policies)]
            page.add(*policies_table(rows, verdicts(rows)))
    page.write(args.markdown)
    return 0


def compare(setup: Setup, trace: Trace, policies: Sequence[str]) -> list[Row]:
    """One row per policy, and kv_aware once more with remote_prefill auto if there are prefill pods."""
    rows = [Row(trace.name, trace.shares, policy, run(setup, trace, policy, "prefer")) for policy in policies]
    if setup.num_prefill and "kv_aware" in policies:
        rows.append(Row(trace.name, trace.shares, "kv_aware, auto", run(setup, trace, "kv_aware", "auto")))
    return rows


def compare_routers(setup: Setup, trace: Trace, nums: Sequence[int]) -> RouterRow:
    """Serves a trace by one router, and by several among which its requests are spread."""
    one, *several = [run(setup, trace, "kv_aware", "auto", num_routers) for num_routers in (1, *nums)]
    return RouterRow(trace.name, one, several)


def run(setup: Setup, trace: Trace, policy: str, remote_prefill: str, num_routers: int = 1) -> Outcome:
    """Serve a trace and check that nothing is left over."""
    setting = Setting(
        setup.hardware, setup.num_prefill, setup.num_decode, policy, remote_prefill, num_routers=num_routers
    )
    cluster = SimulatedCluster(setting)
    started = time.perf_counter()
    outcome = cluster.serve(trace)
    problems = cluster.check()
    assert not problems, problems
    print(f"{trace.num_requests} requests in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return outcome


_HEAD = (
    "Routing policies on simulated clusters",
    """\
`python -m benchmarks.simulate --markdown FILE`. Pods and time are simulated; policies, prefix index, load accounting
and learned rates are the router's own. The timing of the H100 pods follows from the hardware's figures, that of the CPU
pods is fitted to [engine.md](engine.md); both are in `benchmarks/simulate/timing.py`. Results depend on nothing but the
seed.

Policies have `remote_prefill: prefer`, so that only they differ; the last row of each trace is the router's default.
Cached: share of the prompts' tokens that whoever computed them had in its cache. Local: prompts that decode pods
computed. Goodput: requests per second with the first token within 500 ms and 25 ms per further token.""",
)

_ROUTERS_HEAD = (
    "Several routers on the same pods",
    """\
`python -m benchmarks.simulate --routers 2 --routers 4 --markdown FILE`. kv_aware with `remote_prefill: auto`; each
request, also each turn of a conversation, comes to any of the routers by lot. A router has an index of its own, fed by
the pods' events, and knows of no claims but its own.

Cached: share of the prompts' tokens that whoever computed them had in its cache. Kept: for each router, that share of
its requests over that of the same requests when one router takes them all; the target is 90 % for the worst.""",
)


if __name__ == "__main__":
    sys.exit(main())
