"""A generation as text: detokenised piece by piece, ended by stop strings, begun where the client has it."""

from __future__ import annotations

from typing import NamedTuple, Self

from common.pb import common_pb2
from common.tokenization import IncrementalDetokenizer, StopChecker, StopResult, Tokenizer
from common.types import FinishReason
from router.dispatching.generation import Generation
from router.dispatching.replay import Replay
from router.dispatching.token_log import OutputDelta

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
        resumption = request.resumption
        self.generation = generation
        self._replay = Replay(resumption)
        self.num_tokens = self._replay.num_tokens  # delivered so far
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            context=request.prompt_token_ids[-_CONTEXT_TOKENS:] if request.continues_prompt else (),
            skip_special_tokens=request.skip_special_tokens,
        )
        self._stop = StopChecker(request.stops)
        self._min_tokens = request.sampling.min_tokens  # stop strings do not count before
        self._num_chars = 0  # detokenised so far
        self._ended = resumption is not None and resumption.ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._ended:
            output = await anext(self.generation)
            num_replayed = self._replay.take(output.token_ids)
            delta = self._to_text(output, num_replayed)
            self.num_tokens += len(delta.token_ids)
            self._ended = delta.finish_reason is not None
            if self._ended or not num_replayed or delta.token_ids:
                return delta
        raise StopAsyncIteration

    def _to_text(self, delta: OutputDelta, num_replayed: int) -> TextDelta:
        """The leading `num_replayed` tokens are with the client already."""
        text, offsets = "", []
        # The token that ended the generation (end-of-sequence, stop token) is counted, but is not text.
        num_spelled = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        for position, token_id in enumerate(delta.token_ids):
            offsets.append(self._num_chars)
            if position == num_spelled:
                break
            result = self._check(self._detokenizer.push((token_id,)), delta.start_index + position)
            if position >= num_replayed:
                text += result.text
            if result.stopped:
                return self._stopped(delta, text, offsets, num_replayed)
        if delta.finish_reason is not None:
            result = self._check(self._detokenizer.finish(), delta.start_index + len(delta.token_ids) - 1)
            text += result.text
            if result.stopped:
                return self._stopped(delta, text, offsets, num_replayed)
            text += self._stop.finish()
        return _cut(delta, text, offsets, num_replayed, delta.finish_reason)

    def _check(self, piece: str, index: int) -> StopResult:
        """Look for stop strings in the text of the token at output index `index`."""
        self._num_chars += len(piece)
        if index < self._min_tokens:
            return StopResult(piece, stopped=False)
        return self._stop.push(piece)

    def _stopped(self, delta: OutputDelta, text: str, offsets: list[int], num_replayed: int) -> TextDelta:
        """The delta cut after the token that completed the stop string; pods have no more to do."""
        self.generation.finish(FinishReason.STOP)
        return _cut(delta, text, offsets, num_replayed, FinishReason.STOP)


def _cut(
    delta: OutputDelta, text: str, offsets: list[int], num_replayed: int, finish_reason: FinishReason | None
) -> TextDelta:
    """The tokens of `delta` from `num_replayed` on, as far as there are offsets."""
    if not num_replayed and len(offsets) == len(delta.token_ids):  # nearly always
        return TextDelta(text, delta.start_index, delta.token_ids, delta.logprobs, offsets, finish_reason)
    if not num_replayed and len(offsets) == len(delta.token_ids):  # nearly always: all of it
        return TextDelta(text, delta.start_index, delta.token_ids, delta.logprobs, offsets, finish_reason)
    tokens = slice(num_replayed, len(offsets))
    # Of tokens that were known before there are none, and they are all among the replayed ones.
    num_without = len(delta.token_ids) - len(delta.logprobs) if delta.logprobs else 0
    logprobs = delta.logprobs[max(0, num_replayed - num_without) : max(0, len(offsets) - num_without)]
    return TextDelta(
        text, delta.start_index + num_replayed, delta.token_ids[tokens], logprobs, offsets[tokens], finish_reason
    )
