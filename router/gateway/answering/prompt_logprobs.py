"""JSON of the log probabilities of a prompt's tokens: null for the first token, of which there are none.

A prompt may have very many, so others have their turn in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from common.pb import common_pb2
from common.tokenization import OutputProcessor, Tokenizer
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.gateway.answering.encoded import EncodedList

NO_LOGPROB = -9999.0  # JSON has no minus infinity; the number that OpenAI uses
_AT_ONCE = 64  # tokens; those of 20 alternatives each take some 10 ms


async def echoed(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs], tenant: Tenant
) -> dict[str, EncodedList]:
    """Returns OpenAI's form of an echo's log probabilities: values of four parallel lists."""
    text_of = tokenizer.token_text
    processor = OutputProcessor(tokenizer)
    values: dict[str, EncodedList] = {}
    for part in _slices(token_ids):
        await others_turn(tenant)
        tops: list[dict[str, float] | None] = []
        for index in part:
            if index == 0:
                tops.append(None)
                continue
            position = logprobs[index - 1]
            top = {text_of(each.token_id): finite(each.logprob) for each in position.top}
            tops.append({text_of(token_ids[index]): finite(position.sampled), **top})
        of_tokens = [finite(logprobs[index - 1].sampled) if index else None for index in part]
        lists: dict[str, list[Any]] = {
            "tokens": [text_of(token_ids[index]) for index in part],
            "token_logprobs": of_tokens,
            "top_logprobs": tops,
            "text_offset": processor.push(token_ids[part.start : part.stop]).offsets,
        }
        for name, entries in lists.items():
            values.setdefault(name, EncodedList()).extend(entries)
    return values


async def by_token_id(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs], tenant: Tenant
) -> EncodedList:
    """Returns vLLM's form: a list of mappings from token id to log probability, rank and text."""
    values = EncodedList([None])
    for part in _slices(token_ids):
        await others_turn(tenant)
        values.extend([_by_token_id(tokenizer, token_ids[index], logprobs[index - 1]) for index in part if index])
    return values


def _by_token_id(tokenizer: Tokenizer, token_id: int, position: common_pb2.PositionLogprobs) -> dict[int, Any]:
    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    top = {each.token_id: entry(each.token_id, each.logprob, rank) for rank, each in enumerate(position.top, 1)}
    return {token_id: entry(token_id, position.sampled, position.rank), **top}


def finite(logprob: float) -> float:
    """The number that JSON gets."""
    return max(logprob, NO_LOGPROB)


def _slices(token_ids: Sequence[int]) -> Iterator[range]:
    for first in range(0, len(token_ids), _AT_ONCE):
        yield range(first, min(first + _AT_ONCE, len(token_ids)))
