"""A step in the making."""

from __future__ import annotations

from common.engine.scheduler.request import Request


class Plan:
    """Who gets how many of the budget's tokens."""

    __slots__ = ("budget", "new_block_ids", "scheduled")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[Request, int] = {}  # tokens given, in batch order
        self.new_block_ids: dict[Request, list[int]] = {}  # blocks added to tables that the runner knows

    def give(self, request: Request, num_tokens: int) -> None:
        """Let `request` compute `num_tokens` tokens."""
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens

    def take_back(self, request: Request) -> None:
        """Leave `request` out of the step."""
        self.budget += self.scheduled.pop(request, 0)
        self.new_block_ids.pop(request, None)
