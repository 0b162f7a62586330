"""A generation as text: detokenised piece by piece, ended by stop strings, begun where the client has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Self

from common.pb import common_pb2
from common.tokenization import OutputPiece, OutputProcessor, Tokenizer
from common.types import FinishReason
from router.dispatching.generation import Generation
from router.dispatching.replay import Replay
from router.dispatching.token_log import OutputDelta


class TextDelta(NamedTuple):
    """The client's gain: text, and the tokens behind it (text may lag behind them)."""

    text: str
    start_index: int  # output index of token_ids[0]
    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs]  # one per token if asked for, else empty
    text_offsets: list[int]  # where in the whole answer each token's text begins
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop text, or the one of stop_token_ids, that ended the answer


class TextGeneration:
    """Iterate over it for TextDelta. Its generation's context must be entered."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        request = generation.request
        resumption = request.resumption
        self.generation = generation
        self._replay = Replay(resumption)
        self.num_tokens = self._replay.num_tokens  # delivered so far
        sampling = request.sampling
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._processor = OutputProcessor(
            tokenizer,
            continued=request.prompt_token_ids if request.continues_prompt else (),
            stops=request.stops,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            include_stop=sampling.include_stop_str_in_output,
            spelled_ids=request.spelled_ids,
        )
        self.replayed_text = ""  # what the client had, as far as it is spelled again
        self.replayed_offsets: list[int] = []  # of the tokens behind it, see TextDelta
        self._ended = resumption is not None and resumption.ended
        self._push = self._processor.push if request.trace is None else self._timed_push

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._ended:
            output = await anext(self.generation)
            if self.generation.request.has_no_output:
                self._ended = True
                return TextDelta("", 0, [], [], [], FinishReason.LENGTH)
            num_replayed = self._replay.take(output.token_ids)
            delta = self._to_text(output, num_replayed)
            self.num_tokens += len(delta.token_ids)
            self._ended = delta.finish_reason is not None
            if self._ended or not num_replayed or delta.token_ids:
                return delta
        raise StopAsyncIteration

    def _to_text(self, delta: OutputDelta, num_replayed: int) -> TextDelta:
        """The leading `num_replayed` tokens are with the client already."""
        piece = self._push(delta.token_ids, delta.finish_reason, num_hidden=num_replayed)
        if num_replayed:
            self.replayed_text += piece.hidden_text
            self.replayed_offsets += piece.offsets[:num_replayed]
        if piece.is_stopped:  # pods have no more to do
            self.generation.finish(FinishReason.STOP)
            delta = delta._replace(finish_reason=FinishReason.STOP)
        if delta.finish_reason is FinishReason.COMPLETE:  # the grammar allows no further token
            return _cut(delta._replace(finish_reason=FinishReason.STOP), piece, num_replayed)
        text_delta = _cut(delta, piece, num_replayed)
        if delta.finish_reason is not FinishReason.STOP:
            return text_delta
        return text_delta._replace(stop_reason=piece.stop or self._stop_token(delta.token_ids))

    def _timed_push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, *, num_hidden: int
    ) -> OutputPiece:
        """The processor's `push`, of a request that is traced."""
        began = time.monotonic()
        piece = self._processor.push(token_ids, finish_reason, num_hidden=num_hidden)
        self.generation.timeline.detokenized(began, time.monotonic())
        return piece

    def _stop_token(self, token_ids: Sequence[int]) -> int | None:
        """The last of these tokens if the client asked for a stop there. None: the model ended the answer."""
        return token_ids[-1] if token_ids and token_ids[-1] in self._stop_token_ids else None


def _cut(delta: OutputDelta, piece: OutputPiece, num_replayed: int) -> TextDelta:
    """The tokens of `delta` from `num_replayed` on, as far as there are offsets."""
    text, offsets = piece.text, piece.offsets
    if not num_replayed and len(offsets) == len(delta.token_ids):  # nearly always: all of it
        return TextDelta(text, delta.start_index, delta.token_ids, delta.logprobs, offsets, delta.finish_reason)
    tokens = slice(num_replayed, len(offsets))
    # Of tokens that were known before there are none. They are all among the replayed ones, none of which is a stop.
    num_without = len(delta.token_ids) - len(delta.logprobs) if delta.logprobs else 0
    logprobs = delta.logprobs[num_replayed - num_without : len(offsets) - num_without]
    return TextDelta(
        text, delta.start_index + num_replayed, delta.token_ids[tokens], logprobs, offsets[tokens], delta.finish_reason
    )
