"""Who sends requests, as their API keys say."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request."""

    name: str = ""  # for logs, metrics and fairness; empty: the request came without a key
    salt: str = ""  # part of every block hash, so that tenants share no KV; empty: shared by all who have none
    weight: float = 1.0  # its share while requests queue, relative to others'
    min_priority: int | None = None  # the most urgent that its requests may have; None: any
    models: frozenset[str] | None = None  # names of models and adapters that it may use; None: all

    def may_use(self, name: str) -> bool:
        """Whether its requests may name this model or adapter."""
        return self.models is None or name in self.models

    def priority_of(self, asked: int) -> int:
        """The priority of a request that asks for `asked`. 0, which is also not to ask, gives what it may have at most.
        Raises InvalidRequestError for more."""
        least = self.min_priority
        if least is None or asked >= least:
            return asked
        if asked == 0:
            return least
        problem = f"priority must be at least {least} for this key, got {asked}; lower numbers go first"
        raise InvalidRequestError(problem, param="priority")
