"""A step that is being planned."""

from __future__ import annotations

from common.engine.scheduler.request import Request
from common.step_budget import prefill_work


class StepPlan:
    """The tokens of the budget that each request gets."""

    __slots__ = (
        "_max_prompt_rows",
        "_max_tokens",
        "_num_prompt_rows",
        "_prompt_work",
        "drafts",
        "has_prompts",
        "new_block_ids",
        "num_context_tokens",
        "scheduled",
    )

    def __init__(self, max_tokens: int, max_prompt_rows: int) -> None:
        """`max_prompt_rows`: most prompt tokens whose logits are kept for log probabilities, which takes memory."""
        self._max_tokens = max_tokens
        self._max_prompt_rows = max_prompt_rows
        self._num_prompt_rows = 0
        self._prompt_work = 0.0  # beyond one for each token
        self.scheduled: dict[Request, int] = {}  # tokens given, in batch order
        self.has_prompts = False
        self.drafts: dict[Request, list[int]] = {}  # token ids, among those given
        self.new_block_ids: dict[Request, list[list[int]]] = {}  # of each group, added to known tables
        self.num_context_tokens = 0  # whose KV the requests that compute one token read

    @property
    def num_tokens(self) -> int:
        """Tokens given."""
        return sum(self.scheduled.values())

    @property
    def budget(self) -> int:
        """Tokens left."""
        return self._max_tokens - self.num_tokens

    def room_for(self, request: Request) -> int:
        """Tokens of its prompt that `request` may get at most."""
        if not request.wants_prompt_logprobs:
            return self.budget
        return min(self.budget, self._max_prompt_rows - self._num_prompt_rows)

    @property
    def work(self) -> float:
        """Tokens given, those of prompts weighed by what their attention takes."""
        return self.num_tokens + self._prompt_work

    @property
    def stream_target_s(self) -> float | None:
        """Shortest time between tokens that a request which decodes was promised. None: none decodes."""
        targets = (each.target_itl_s for each in self.scheduled if not (each.is_producer or each.pooling))
        return min(targets, default=None)

    def decode(self, request: Request, num_context_tokens: int) -> None:
        """Let `request` compute its last token, which comes after `num_context_tokens`."""
        self.scheduled[request] = 1
        self.num_context_tokens += num_context_tokens

    def draft(self, request: Request, token_ids: list[int], num_context_tokens: int) -> None:
        """Let `request`, which decodes in this step after `num_context_tokens`, compute drafts of its next tokens. Each
        is a row of the batch of its own, that reads what comes before it. Called last, when nothing is taken back."""
        self.scheduled[request] += len(token_ids)
        self.drafts[request] = token_ids
        self.num_context_tokens += len(token_ids) * num_context_tokens

    def give(self, request: Request, num_tokens: int) -> None:
        """Let `request` compute `num_tokens` tokens."""
        self.scheduled[request] = num_tokens
        self.has_prompts = True
        self._weigh(request, num_tokens, 1)

    def take_back(self, request: Request) -> None:
        """Leave `request` out of the step."""
        if request in self.scheduled:
            self._weigh(request, self.scheduled.pop(request), -1)
        self.new_block_ids.pop(request, None)

    def _weigh(self, request: Request, num_tokens: int, sign: int) -> None:
        num_context_tokens = request.num_scheduled_tokens
        if request.wants_prompt_logprobs:
            self._num_prompt_rows += sign * num_tokens
        if num_tokens == 1:
            self.num_context_tokens += sign * num_context_tokens
        else:
            self._prompt_work += sign * (prefill_work(num_tokens, num_context_tokens) - num_tokens)
