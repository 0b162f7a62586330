"""A cache of the constraints that were compiled last: processes, and errors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.engine.grammar.base import Grammar, GrammarKey
from common.engine.grammar.processes import GrammarProcess
from common.errors import InvalidRequestError

_PROBLEM_BYTES = 1024  # of a constraint's error


class ProblemCache:
    """The errors of the constraints that were refused last."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._problems: OrderedDict[GrammarKey, InvalidRequestError] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._problems)

    def get(self, key: GrammarKey) -> InvalidRequestError | None:
        """Returns what is wrong with it, if that is known."""
        problem = self._problems.get(key)
        if problem is not None:
            self._problems.move_to_end(key)
        return problem

    def put(self, key: GrammarKey, problem: InvalidRequestError) -> None:
        """Keeps it, and drops those not used for longest."""
        if key not in self._problems:
            self.num_bytes += _size(key)
        self._problems[key] = problem
        while self._problems and (len(self._problems) > self._max_entries or self.num_bytes > self._max_bytes):
            dropped, _ = self._problems.popitem(last=False)
            self.num_bytes -= _size(dropped)


def _size(key: GrammarKey) -> int:
    return len(key.constraint.text) + _PROBLEM_BYTES


@dataclass(slots=True)
class Kept:
    """The process of a grammar that was compiled, and the requests that have matchers there."""

    process: GrammarProcess
    num_bytes: int  # memory that is the process's own
    users: set[Grammar]
    shared_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shared_bytes = self.process.resident_bytes - self.num_bytes

    def measure(self) -> None:
        """Finds out what it takes by now: matchers grow."""
        self.num_bytes = max(0, self.process.resident_bytes - self.shared_bytes)


class ProcessCache:
    """The processes of grammars that were compiled. Those that are used stay; others are kept within bounds.

    What those in use take is bounded, too: a tenant that holds as much as is left starts no more. So one that is alone
    gets half, two get a third each, and there is always room for another one.
    """

    def __init__(self, max_entries: int, max_bytes: int, max_used_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_used_bytes = max_used_bytes
        self._kept: OrderedDict[GrammarKey, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def all(self) -> list[Kept]:
        """Returns all processes."""
        return list(self._kept.values())

    def _used(self) -> dict[GrammarKey, Kept]:
        return {key: kept for key, kept in self._kept.items() if kept.users}

    def find(self, key: GrammarKey) -> Kept | None:
        """Returns the process that has the grammar."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def put(self, key: GrammarKey, kept: Kept) -> list[GrammarProcess]:
        """Keeps a process. Returns those that are to be ended, as do the methods below."""
        before = self._kept.get(key)
        self._kept[key] = kept
        return ([] if before is None else [before.process]) + self._trim(key)

    def release(self, grammar: Grammar) -> list[GrammarProcess]:
        """A request no longer uses its process. Drops one that is gone."""
        kept = self._kept.get(grammar.key)
        if kept is None or grammar not in kept.users:
            return []
        kept.users.discard(grammar)
        if kept.process.is_gone or (kept.process.is_late and not kept.users):
            del self._kept[grammar.key]
            return [kept.process]
        return self._trim()

    def full_tenants(self) -> set[str]:
        """Returns the tenants whose grammars in use take as much memory as is left, or more."""
        held = _held(self._used())
        left = self._max_used_bytes - held.total()
        return {tenant for tenant, num_bytes in held.items() if num_bytes >= left}

    def excess(self) -> list[GrammarProcess]:
        """Returns processes in use that have grown out of the bound: the largest ones of whoever holds most."""
        used = self._used()
        processes: list[GrammarProcess] = []
        while (held := _held(used)).total() > self._max_used_bytes:
            [(tenant, _)] = held.most_common(1)
            largest = max((key for key in used if key.tenant == tenant), key=lambda key: used[key].num_bytes)
            processes.append(used.pop(largest).process)
        return processes

    def drop_gone(self) -> list[GrammarProcess]:
        """Drops those that have ended while they were not used."""
        gone = [key for key, kept in self._kept.items() if not kept.users and not kept.process.is_alive()]
        return [self._kept.pop(key).process for key in gone]

    def drop_all(self) -> list[GrammarProcess]:
        """Drops those that are used, too."""
        processes = [kept.process for kept in self._kept.values()]
        self._kept.clear()
        return processes

    def _trim(self, latest: GrammarKey | None = None) -> list[GrammarProcess]:
        """Drops what is not used, but for the `latest`, which is about to be."""
        unused = OrderedDict((key, kept) for key, kept in self._kept.items() if not kept.users)
        num_bytes = sum(kept.num_bytes for kept in unused.values())
        num_entries = len(unused)
        if latest is not None:
            unused.pop(latest, None)
        ended: list[GrammarProcess] = []
        while unused and (num_entries > self._max_entries or num_bytes > self._max_bytes):
            key, kept = unused.popitem(last=False)
            del self._kept[key]
            num_entries -= 1
            num_bytes -= kept.num_bytes
            ended.append(kept.process)
        return ended


def _held(used: Mapping[GrammarKey, Kept]) -> Counter[str]:
    """Memory by tenant."""
    held: Counter[str] = Counter()
    for key, kept in used.items():
        held[key.tenant] += kept.num_bytes
    return held
