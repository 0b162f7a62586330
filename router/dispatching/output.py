"""The output of a generation so far, and the front that waits for it: tokens, log probabilities, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from common.errors import BatonError
from common.pb import common_pb2, pods_pb2
from common.types import FinishReason
from router.dispatching.legs import Known
from router.dispatching.token_log import OutputDelta, TokenLog
from router.dispatching.validity import invalid_drafts, invalid_end, invalid_prompt_logprobs, invalid_tokens
from router.fairness.turns import others_turn
from router.requests.request import GenerationRequest

_AT_ONCE = 256  # log probabilities of a prompt's tokens that are checked; takes a few milliseconds


class Output:
    """The output of a generation. If log probabilities of the prompt are wanted, no output is told before they have
    come."""

    def __init__(self, request: GenerationRequest) -> None:
        resumption = request.resumption
        wants_prompt = request.sampling.prompt_logprobs is not None
        self._request = request
        self._log = TokenLog(resumption.known_token_ids if resumption is not None else ())
        self.token_ids: Sequence[int] = self._log.token_ids  # all so far
        self._num_known = len(self.token_ids)  # before this attempt began
        self._num_prompt_logprobs = len(request.prompt_token_ids) - 1 if wants_prompt else 0  # to come before tokens
        self.prompt_logprobs: list[common_pb2.PositionLogprobs] = []  # complete with the first output; not of token 0
        self.lacks_prompt = self._num_prompt_logprobs > 0  # those are still to come
        self.finish_reason: FinishReason | None = resumption.finish_reason if resumption is not None else None
        self.held_end: FinishReason | None = None  # it ended on its pods, and these have not come yet
        self.error: BatonError | None = None
        self._was_cut = False  # there was more than the front took at once
        self._ended = False  # the front knows the end
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_new(self) -> int:
        """Tokens that were not known before it began."""
        return len(self.token_ids) - self._num_known

    @property
    def is_over(self) -> bool:
        """Finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def known(self) -> Known:
        """Returns the start of the next attempt. Where the prompt is computed again for its log probabilities, the
        output is, too; each token is compared with the known one."""
        sampling = self._request.sampling
        if self.lacks_prompt:
            return Known((), sampling)
        if sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Known(self.token_ids, sampling)

    # --- from pods ---

    def problem_in(self, delta: pods_pb2.TokenDelta, vocab_size: int) -> str:
        """Returns the problem with a decode pod's message; empty: there is none."""
        start, sampling = delta.start_index, self._request.sampling
        token_ids, logprobs, prompt_logprobs = delta.token_ids, delta.logprobs, delta.prompt_logprobs  # wrapped once
        problem = ""
        if prompt_logprobs:
            num_prompt_tokens = len(self._request.prompt_token_ids)
            problem = invalid_prompt_logprobs(
                delta.prompt_start, prompt_logprobs, num_prompt_tokens, sampling, vocab_size
            )
            if delta.prompt_start > len(self.prompt_logprobs) + 1:
                problem = problem or f"log probabilities from token {delta.prompt_start} of the prompt on"
        if not problem and (token_ids or logprobs):
            problem = invalid_tokens(start, token_ids, logprobs, sampling, vocab_size)
        if not problem:
            problem = invalid_drafts(delta.num_verified_drafts, delta.num_accepted_drafts, len(token_ids))
        if not problem and delta.finish_reason:
            num_tokens = max(len(self.token_ids), start + len(token_ids))
            problem = invalid_end(delta.finish_reason, num_tokens, sampling.max_tokens)
        return problem

    async def problem_in_prompt(self, found: Sequence[common_pb2.PositionLogprobs], vocab_size: int) -> str:
        """Returns the problem with a prefill pod's log probabilities of the prompt, if they are wanted; empty: there is
        none."""
        num_prompt_tokens = len(self._request.prompt_token_ids)
        if not self.lacks_prompt:
            return ""
        if len(found) != self._num_prompt_logprobs:
            return f"{len(found)} log probabilities of a prompt of {num_prompt_tokens} tokens"
        for start in range(0, len(found), _AT_ONCE):
            await others_turn(self._request.terms.tenant)
            part = found[start : start + _AT_ONCE]
            problem = invalid_prompt_logprobs(start + 1, part, num_prompt_tokens, self._request.sampling, vocab_size)
            if problem:
                return problem
        return ""

    def accept(self, start: int, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs]) -> str:
        """See TokenLog."""
        return self._log.accept(start, token_ids, logprobs)

    def take_prompt_logprobs(self, start: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        """Take those of prompt tokens from index `start` on, each once."""
        if self.lacks_prompt:
            self.prompt_logprobs.extend(logprobs[len(self.prompt_logprobs) + 1 - start :])
            self.lacks_prompt = len(self.prompt_logprobs) < self._num_prompt_logprobs

    def end(self, reason: FinishReason) -> bool:
        """It has ended on its pods. False: the end is held until the log probabilities of the prompt have come."""
        if self.lacks_prompt and reason is not FinishReason.ABORT:
            self.held_end = reason
            return False
        self.finish_reason = reason
        return True

    # --- for the front ---

    async def next(self) -> OutputDelta:
        """Waits for the next output. Raises the error if the request failed, and StopAsyncIteration after the end."""
        while True:
            if self._log.has_new_tokens and not self.lacks_prompt:
                if self._was_cut:
                    await others_turn(self._request.terms.tenant)
                return self._take()
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                if self._ended:
                    raise StopAsyncIteration
                return self._take()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> OutputDelta:
        delta = self._log.take(self.finish_reason)
        self._was_cut = self._log.has_new_tokens
        self._ended = delta.finish_reason is not None
        return delta
