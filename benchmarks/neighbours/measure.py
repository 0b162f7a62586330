"""Attacks one after the other, on clusters of their own, and what the neighbour saw."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.harness.checkouts import HERE
from benchmarks.harness.processes import Child
from benchmarks.neighbours.neighbour import Sight
from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from router.security.keys import digest_of

TARGET_ITL_S = 0.05  # the default of pods
MAX_GAP_S = 2 * TARGET_ITL_S
MAX_GRAMMAR_S = 1.0
LAYOUTS: Mapping[str, Sequence[str]] = {
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "colocated": ("--prefill", "0", "--decode", "1"),
}
# Threads that wait for each other would wait for the clients, too, which have the same cores.
_OPTIONS = ("--num-threads", "1")
_QUIET_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    seconds: float  # of each attack
    quiet_s: float  # before it
    streams: int  # of the neighbour
    layouts: Sequence[str]
    tries: int = 1  # of an attack beside which the neighbour sees what it must not; the best counts


class Row(NamedTuple):
    """One attack on one cluster."""

    attack: str
    layout: str
    quiet: Sight
    beside: Sight
    ends: Mapping[str, int]  # of the attacker's requests, by status

    @property
    def worst_gap_s(self) -> float:
        """The neighbour's longest gap beside the attack."""
        return self.beside.gaps_s[-1]

    @property
    def problems(self) -> list[str]:
        """Names the figures that are out of bounds for the neighbour; empty: none."""
        sight = self.beside
        found = ["gap"] if self.worst_gap_s > MAX_GAP_S else []
        # What a short answer without a grammar waits for is no matter of grammars.
        if sight.grammars_s and sight.grammars_s[-1] - sight.ttfts_s[-1] > MAX_GRAMMAR_S:
            found.append("grammar")
        return found + ([f"{len(sight.failures)} failed"] if sight.failures else [])


class Clients(NamedTuple):
    """Processes that send requests to one cluster."""

    neighbour: Child
    attacker: Child


def measure(plan: Plan, attacks: Sequence[str]) -> Iterator[Row]:
    """The attacks, on each of the layouts. A cluster that does not become quiet is replaced before the next attack."""
    for layout in plan.layouts:
        waiting = list(attacks)
        tried: list[Row] = []  # of the first that waits
        while waiting:
            with _running_cluster(layout) as clients:
                is_new = True
                while waiting:
                    clients.neighbour.ask("begin", plan.streams)
                    quiet = _watch_quiet(clients.neighbour, plan.quiet_s)
                    if quiet.gaps_s[-1] > MAX_GAP_S and not is_new:
                        break
                    is_new = False
                    tried.append(_attack(clients, waiting[0], layout, plan, quiet))
                    if not tried[-1].problems or len(tried) >= plan.tries:
                        yield min(tried, key=lambda row: (len(row.problems), row.worst_gap_s))
                        waiting, tried = waiting[1:], []


def _attack(clients: Clients, attack: str, layout: str, plan: Plan, quiet: Sight) -> Row:
    clients.attacker.ask("begin", attack)
    beside = _watch(clients.neighbour, plan.seconds)
    ends = clients.attacker.ask("end")["ends"]
    clients.neighbour.ask("end")
    return Row(attack, layout, quiet, beside, ends)


def _watch_quiet(neighbour: Child, seconds: float) -> Sight:
    """Without an attack; a few times while what came before is felt."""
    sight = _watch(neighbour, seconds)
    for _ in range(_QUIET_TRIES):
        if sight.gaps_s[-1] <= MAX_GAP_S:
            break
        sight = _watch(neighbour, seconds)
    return sight


def _watch(neighbour: Child, seconds: float) -> Sight:
    return Sight(**neighbour.ask("watch", seconds))


@contextlib.contextmanager
def _running_cluster(layout: str) -> Iterator[Clients]:
    keys = {name: secrets.token_hex(16) for name in ("neighbour", "attacker")}
    entries = [{"name": name, "hash": f"sha256:{digest_of(key).hex()}"} for name, key in keys.items()]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        scratch = Path(directory)
        file = scratch / "keys.yaml"
        file.write_text(yaml.safe_dump(entries))
        config = {"router": {"api_keys_file": str(file), "reasoning_parser": "qwen3"}}
        url = stack.enter_context(HERE.cluster(scratch, *LAYOUTS[layout], *_OPTIONS, config=config))
        model = (DEMO_MODEL_NAME, str(demo_model_path()))
        neighbour = stack.enter_context(
            Child("-m", "benchmarks.neighbours.neighbour", url, keys["neighbour"], model[0])
        )
        attacker = stack.enter_context(Child("-m", "benchmarks.neighbours.attacker", url, keys["attacker"], *model))
        for child in (neighbour, attacker):
            child.read_line()  # it is ready
        neighbour.ask("warm_up")
        yield Clients(neighbour, attacker)
