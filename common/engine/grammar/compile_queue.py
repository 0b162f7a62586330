"""Constraints that wait to be compiled, in fair shares of tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from common.engine.grammar.base import Grammar, GrammarKey
from common.errors import OverloadedError

MAX_PENDING = 64  # constraints of one tenant that wait or are compiled


@dataclass(slots=True, eq=False)
class Job:
    """A constraint to compile, for the requests of one tenant that wait for it."""

    key: GrammarKey
    waiting: dict[Grammar, None] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        """The tenant of the job."""
        return self.key.tenant


class CompileQueue:
    """Tenants take turns, and one tenant has at most `max_per_tenant` jobs under way: one place more is there for the
    others, so that a grammar waits for one of another tenant only if two tenants have slow ones."""

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._jobs: dict[GrammarKey, Job] = {}  # all that wait or are under way
        self._waiting: OrderedDict[str, OrderedDict[Job, None]] = OrderedDict()  # by tenant; whose turn it is first
        self._running: dict[str, int] = {}  # jobs under way, by tenant

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, grammar: Grammar) -> None:
        """Lets a request wait for its grammar. Raises OverloadedError if its tenant has too many."""
        key = grammar.key
        job = self._jobs.get(key)
        if job is None:
            waiting = self._waiting.get(grammar.tenant, ())
            num_pending = len(waiting) + self._running.get(grammar.tenant, 0)
            if num_pending >= MAX_PENDING:
                raise OverloadedError(f"{num_pending} grammars of this tenant are waiting or being compiled already")
            job = self._jobs[key] = Job(key)
            self._waiting.setdefault(grammar.tenant, OrderedDict())[job] = None
        job.waiting[grammar] = None

    def remove(self, grammar: Grammar) -> None:
        """A request no longer waits. A job for which none does is dropped, or, under way, is left without any."""
        job = self._jobs.get(grammar.key)
        if job is None:
            return
        job.waiting.pop(grammar, None)
        if not job.waiting and job in self._waiting.get(job.tenant, ()):
            self._leave(job)
            del self._jobs[job.key]

    def next(self, full_tenants: Collection[str] = ()) -> Job | None:
        """Takes the next job that may run, of none of the `full_tenants`. None: not now."""
        if sum(self._running.values()) > self._max_per_tenant:
            return None
        tenants = (each for each in self._waiting if self._running.get(each, 0) < self._max_per_tenant)
        tenant = next((each for each in tenants if each not in full_tenants), None)
        if tenant is None:
            return None
        job = next(iter(self._waiting[tenant]))
        self._leave(job)
        if tenant in self._waiting:
            self._waiting.move_to_end(tenant)
        self._running[tenant] = self._running.get(tenant, 0) + 1
        return job

    def settle(self, job: Job) -> list[Grammar]:
        """A job is over. Returns those that still wait for it."""
        del self._jobs[job.key]
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        return list(job.waiting)

    def _leave(self, job: Job) -> None:
        waiting = self._waiting[job.tenant]
        del waiting[job]
        if not waiting:
            del self._waiting[job.tenant]
