"""A generation as text: detokenised piece by piece, ended by stop strings."""

from __future__ import annotations

from typing import NamedTuple, Self

from common.pb import common_pb2
from common.tokenization import IncrementalDetokenizer, StopChecker, StopResult, Tokenizer
from common.types import FinishReason
from router.generation import Generation, OutputDelta

_CONTEXT_TOKENS = 16  # of the prompt's end, enough to know how the answer's first token is spelled there


class TextDelta(NamedTuple):
    """What the client gains: text, and the tokens behind it (text may lag behind them)."""

    text: str
    start_index: int  # output index of token_ids[0]
    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs]  # one per token if asked for, else empty
    text_offsets: list[int]  # where in the whole answer each token's text begins
    finish_reason: FinishReason | None


class TextGeneration:
    """Iterate over it for TextDelta. Its generation's context must be entered."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        request = generation.request
        self.generation = generation
        self.num_tokens = 0  # delivered so far
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            context=request.prompt_token_ids[-_CONTEXT_TOKENS:] if request.continues_prompt else (),
            skip_special_tokens=request.skip_special_tokens,
        )
        self._stop = StopChecker(request.stops)
        self._min_tokens = request.sampling.min_tokens  # stop strings do not count before
        self._num_chars = 0  # detokenised so far
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if self._ended:
            raise StopAsyncIteration
        delta = self._to_text(await anext(self.generation))
        self.num_tokens += len(delta.token_ids)
        self._ended = delta.finish_reason is not None
        return delta

    def _to_text(self, delta: OutputDelta) -> TextDelta:
        text, offsets = "", []
        # The token that ended the generation (end-of-sequence, stop token) is counted, but is not text.
        num_spelled = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        for position, token_id in enumerate(delta.token_ids):
            offsets.append(self._num_chars)
            if position == num_spelled:
                break
            result = self._check(self._detokenizer.push((token_id,)), delta.start_index + position)
            text += result.text
            if result.stopped:
                return self._stopped(delta, text, offsets)
        if delta.finish_reason is not None:
            result = self._check(self._detokenizer.finish(), delta.start_index + len(delta.token_ids) - 1)
            text += result.text
            if result.stopped:
                return self._stopped(delta, text, offsets)
            text += self._stop.finish()
        return TextDelta(text, delta.start_index, delta.token_ids, delta.logprobs, offsets, delta.finish_reason)

    def _check(self, piece: str, index: int) -> StopResult:
        """Look for stop strings in the text of the token at output index `index`."""
        self._num_chars += len(piece)
        if index < self._min_tokens:
            return StopResult(piece, stopped=False)
        return self._stop.push(piece)

    def _stopped(self, delta: OutputDelta, text: str, offsets: list[int]) -> TextDelta:
        """The delta cut after the token that completed the stop string; pods have no more to do."""
        self.generation.finish(FinishReason.STOP)
        num_tokens = len(offsets)
        return TextDelta(
            text,
            delta.start_index,
            delta.token_ids[:num_tokens],
            delta.logprobs[:num_tokens],
            offsets,
            FinishReason.STOP,
        )
