"""Range checks at the edge. What passes here is not checked again inside.

Used where parameters enter: in the router's HTTP and gRPC fronts and the offline `LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.errors import InvalidRequestError, PromptTooLongError, UnprocessableError, quoted
from common.types.constraint import check_constraint
from common.types.generation import SamplingParams
from common.types.parameters import parameters_of

MAX_STOP_TOKEN_IDS = 256
SEED_LIMIT = 2**64  # seeds are unsigned 64-bit integers, [0, SEED_LIMIT)
_TOKEN_ID_LIMIT = 2**32  # whatever the vocabulary, see common.types.block_hash
_NO_NAMES: Mapping[str, str] = {}

RANGES = {
    field.name: field.parameter.allowed
    for field in parameters_of(SamplingParams).values()
    if field.parameter.allowed is not None
}
_OPTIONAL = frozenset(field.name for field in parameters_of(SamplingParams).values() if field.is_optional)


def validate_sampling(
    params: SamplingParams, *, vocab_size: int | None = None, names: Mapping[str, str] = _NO_NAMES
) -> None:
    """Checks every field of `params`; token ids must be in [0, vocab_size) if that is given.

    Raises InvalidRequestError, or UnprocessableError for a token id outside the vocabulary. `param` is the field's name
    in SamplingParams unless `names` maps it to the one that the caller's protocol uses.
    """
    for field, allowed in RANGES.items():
        value = getattr(params, field)
        if value not in allowed and not (value is None and field in _OPTIONAL):
            raise _out_of_range(field, value, str(allowed), names)
    if params.min_tokens > params.max_tokens:
        limit = f"at most {names.get('max_tokens', 'max_tokens')} ({params.max_tokens})"
        raise _out_of_range("min_tokens", params.min_tokens, limit, names)
    stop_name = names.get("stop_token_ids", "stop_token_ids")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        problem = f"{stop_name} must have at most {MAX_STOP_TOKEN_IDS} token ids, got {len(params.stop_token_ids)}"
        raise InvalidRequestError(problem, param=stop_name)
    validate_token_ids(params.stop_token_ids, vocab_size=vocab_size, param=stop_name)
    if params.structured_outputs is not None:
        check_constraint(params.structured_outputs, names.get("structured_outputs", "structured_outputs"))


def validate_prompt(
    token_ids: Sequence[int], *, vocab_size: int | None, max_model_len: int, max_tokens: int, param: str = "prompt"
) -> None:
    """Checks a tokenised prompt against the model.

    Raises InvalidRequestError if it is empty, UnprocessableError for a token id outside [0, vocab_size), and
    PromptTooLongError if it and `max_tokens` answer tokens exceed `max_model_len`. `param` names the field.
    """
    if not token_ids:
        raise InvalidRequestError(f"{param} is empty", param=param)
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(
            f"{param} has {len(token_ids)} tokens, which leaves no room for an answer in the model's context of "
            f"{max_model_len} tokens",
            param=param,
        )
    if len(token_ids) + max_tokens > max_model_len:
        raise PromptTooLongError(
            f"{param} has {len(token_ids)} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's context of {max_model_len} tokens",
            param=param,
        )
    validate_token_ids(token_ids, vocab_size=vocab_size, param=param)


def validate_token_ids(token_ids: Sequence[int], *, vocab_size: int | None, param: str) -> None:
    """Raises InvalidRequestError for what is no integer, and UnprocessableError for an id outside [0, vocab_size).
    `param` names the field."""
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidRequestError(f"{param} must hold integers only", param=param)
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    limit = _TOKEN_ID_LIMIT if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        culprit = low if low < 0 else high
        raise UnprocessableError(
            f"{param} has token id {quoted(culprit)}, outside the vocabulary [0, {limit})", param=param
        )


def _out_of_range(field: str, value: object, expected: str, names: Mapping[str, str]) -> InvalidRequestError:
    name = names.get(field, field)
    return InvalidRequestError(f"{name} must be {expected}, got {quoted(value)}", param=name)
