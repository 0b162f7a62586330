"""A step that is being planned."""

from __future__ import annotations

import math

from common.engine.scheduler.request import Request
from common.step_budget import prefill_work


class StepPlan:
    """The tokens of the budget that each request gets."""

    __slots__ = ("budget", "new_block_ids", "num_context_tokens", "num_streams", "scheduled", "target_s", "work")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[Request, int] = {}  # tokens given, in batch order
        self.new_block_ids: dict[Request, list[int]] = {}  # blocks added to tables that the runner knows
        self.num_streams = 0  # requests that decode, so that a client waits for their next token
        self.target_s = math.inf  # tightest target of the streams for the time between tokens
        self.work = 0.0  # tokens, those of prompts weighed by what their attention takes
        self.num_context_tokens = 0  # whose KV the decoding requests read

    def decode(self, request: Request) -> None:
        """Let `request` compute its last token."""
        self.give(request, 1)
        if not request.is_producer:
            self.num_streams += 1
            self.target_s = min(self.target_s, request.target_itl_s)

    def give(self, request: Request, num_tokens: int) -> None:
        """Let `request` compute `num_tokens` tokens."""
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens
        self._weigh(request, num_tokens, 1)

    def take_back(self, request: Request) -> None:
        """Leave `request` out of the step."""
        num_tokens = self.scheduled.pop(request, 0)
        if num_tokens:
            self.budget += num_tokens
            self._weigh(request, num_tokens, -1)
        self.new_block_ids.pop(request, None)

    def _weigh(self, request: Request, num_tokens: int, sign: int) -> None:
        num_context_tokens = request.num_computed_tokens
        if num_tokens == 1:
            self.work += sign
            self.num_context_tokens += sign * num_context_tokens
        else:
            self.work += sign * prefill_work(num_tokens, num_context_tokens)
