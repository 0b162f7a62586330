"""Range checks at the edge. What passes here is not checked again inside.

Used where parameters enter: `settle_sampling` by the router and the offline `LLM`, `validate_sampling` by pods.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import msgspec

from common.errors import InvalidRequestError, PromptTooLongError, quoted
from common.types.block_hash import ExtraKey
from common.types.constraint import check_constraint
from common.types.generation import SamplingParams
from common.types.parameters import ARGUMENTS, BIASES, TEXTS, TOKEN_IDS, TOKEN_SEQUENCES, ParameterField, parameters_of

SEED_LIMIT = 2**64  # the generator's key is an unsigned 64-bit integer, [0, SEED_LIMIT)
MAX_EXTRA_KEYS = 1024  # of a prompt
MAX_DIGEST_BYTES = 64
MAX_POSITION = (1 << 31) - 1
_TOKEN_ID_LIMIT = 2**32  # whatever the vocabulary, see common.types.block_hash
_NO_NAMES: Mapping[str, str] = {}

_FIELDS = parameters_of(SamplingParams)
RANGES = {
    field.name: field.parameter.allowed
    for field in _FIELDS.values()
    if field.parameter.allowed is not None and field.kind != BIASES
}
_OPTIONAL = frozenset(field.name for field in _FIELDS.values() if field.is_optional)
_COLLECTIONS = [field for field in _FIELDS.values() if field.kind in (ARGUMENTS, BIASES, TOKEN_IDS, TOKEN_SEQUENCES)]
_ENTRIES: Mapping[object, str] = {
    ARGUMENTS: "entries",
    BIASES: "entries",
    TEXTS: "texts",
    TOKEN_IDS: "token ids",
    TOKEN_SEQUENCES: "sequences",
}


def settle_sampling(
    params: SamplingParams,
    spellings: Callable[[str], Iterable[tuple[int, ...]]],
    *,
    vocab_size: int,
    names: Mapping[str, str] = _NO_NAMES,
) -> SamplingParams:
    """Returns `params` as engines take them: with the token ids of `bad_words`, each as `spellings` has them, and with
    a random seed if there is none. Checks them and raises as `validate_sampling` does.
    """
    if params.bad_words:
        name = names.get("bad_words", "bad_words")
        _validate_collection(_FIELDS["bad_words"], params.bad_words, vocab_size, name)
        spelled = tuple(token_ids for word in params.bad_words for token_ids in spellings(word))
        params = msgspec.structs.replace(params, bad_word_token_ids=spelled)
        names = {**names, "bad_word_token_ids": name}
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=secrets.randbelow(SEED_LIMIT))
    validate_sampling(params, vocab_size=vocab_size, names=names)
    return params


def validate_sampling(
    params: SamplingParams, *, vocab_size: int | None = None, names: Mapping[str, str] = _NO_NAMES
) -> None:
    """Checks every field but `bad_words`; token ids must be in [0, vocab_size) if that is given.

    Raises InvalidRequestError. `param` is the field's name in SamplingParams unless `names` maps it to the one that the
    caller's protocol uses.
    """
    for field, allowed in RANGES.items():
        value = getattr(params, field)
        if value not in allowed and not (value is None and field in _OPTIONAL):
            raise _out_of_range(field, value, str(allowed), names)
    if params.min_tokens > params.max_tokens:
        limit = f"at most {names.get('max_tokens', 'max_tokens')} ({params.max_tokens})"
        raise _out_of_range("min_tokens", params.min_tokens, limit, names)
    if params.truncate_prompt_tokens == 0:
        raise _out_of_range("truncate_prompt_tokens", 0, "-1 or an integer of at least 1", names)
    for collection in _COLLECTIONS:
        value = getattr(params, collection.name)
        if value:
            _validate_collection(collection, value, vocab_size, names.get(collection.name, collection.name))
    _validate_choice(params, names)
    if params.structured_outputs is not None:
        check_constraint(params.structured_outputs, names.get("structured_outputs", "structured_outputs"))
        if params.thinking_end_token_ids:
            problem = "thinking_token_budget cannot be used with a constraint, which leaves no reasoning"
            raise InvalidRequestError(problem, param="thinking_token_budget")


def _validate_collection(field: ParameterField, value: Any, vocab_size: int | None, name: str) -> None:
    check_num_entries(field, value, name)
    match field.kind:
        case kind if kind == TEXTS:
            longest = field.parameter.max_chars or 0
            if not all(isinstance(text, str) and text.strip() and len(text) <= longest for text in value):
                problem = f"{name} must hold texts of 1 to {longest} characters that are not blank"
                raise InvalidRequestError(problem, param=name)
        case kind if kind == ARGUMENTS:
            longest = field.parameter.max_chars or 0
            if any(len(text) > longest for pair in value.items() for text in map(str, pair)):
                raise InvalidRequestError(
                    f"{name} must hold names and values of at most {longest} characters", param=name
                )
        case kind if kind == TOKEN_SEQUENCES:
            num_token_ids, limit = sum(map(len, value)), field.parameter.max_token_ids
            if limit is not None and num_token_ids > limit:
                problem = f"{name} must have at most {limit} token ids in all, got {num_token_ids}"
                raise InvalidRequestError(problem, param=name)
            for token_ids in value:
                if not token_ids:
                    raise InvalidRequestError(f"{name} must not hold an empty sequence", param=name)
                validate_token_ids(token_ids, vocab_size=vocab_size, param=name)
        case kind if kind == BIASES:
            validate_token_ids(list(value), vocab_size=vocab_size, param=name)
            allowed = field.parameter.allowed
            wrong = [bias for bias in value.values() if allowed is not None and bias not in allowed]
            if allowed is not None and wrong:
                raise InvalidRequestError(
                    f"{name} must hold biases in {allowed.interval}, got {quoted(wrong[0])}", param=name
                )
        case _:
            validate_token_ids(value, vocab_size=vocab_size, param=name)


def check_num_entries(field: ParameterField, value: Sized, name: str) -> None:
    """Raises InvalidRequestError if the list or mapping is too long to be looked at."""
    limit = field.parameter.max_entries
    if limit is not None and len(value) > limit:
        raise InvalidRequestError(
            f"{name} must have at most {limit} {_ENTRIES[field.kind]}, got {len(value)}", param=name
        )


def _validate_choice(params: SamplingParams, names: Mapping[str, str]) -> None:
    """Raises InvalidRequestError if allowed_token_ids leaves no token that could be chosen first."""
    if not params.allowed_token_ids:
        return
    never = {token_ids[0] for token_ids in params.bad_word_token_ids if len(token_ids) == 1}
    if params.min_tokens:
        never.update(params.stop_token_ids)
    if never.issuperset(params.allowed_token_ids):
        name = names.get("allowed_token_ids", "allowed_token_ids")
        raise InvalidRequestError(f"{name} names only tokens that bad_words or min_tokens mask", param=name)


def validate_extra_keys(extra_keys: Sequence[ExtraKey], num_prompt_tokens: int) -> None:
    """Raises InvalidRequestError unless the keys are of tokens of the prompt, in order, each of its own."""
    if len(extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidRequestError(f"extra_keys has {len(extra_keys)}, more than {MAX_EXTRA_KEYS}", param="extra_keys")
    end = 0
    for number, key in enumerate(extra_keys):
        if not end <= key.start < key.end <= num_prompt_tokens:
            problem = f"is of tokens [{key.start}, {key.end}), after {end} of {num_prompt_tokens}"
            raise InvalidRequestError(f"extra_keys[{number}] {problem}", param="extra_keys")
        if not 0 < len(key.digest) <= MAX_DIGEST_BYTES:
            problem = f"has a digest of {len(key.digest)} bytes, not 1 to {MAX_DIGEST_BYTES}"
            raise InvalidRequestError(f"extra_keys[{number}] {problem}", param="extra_keys")
        end = key.end


def validate_positions(positions: Sequence[Sequence[int]], num_prompt_tokens: int, num_dimensions: int) -> None:
    """Raises InvalidRequestError unless these are positions of the prompt's tokens in as many dimensions as the model
    has."""
    if num_dimensions == 1:
        raise InvalidRequestError("positions: the model's are the tokens' places in the prompt", param="positions")
    if len(positions) != num_dimensions:
        problem = f"have {len(positions)} dimensions, those of the model {num_dimensions}"
        raise InvalidRequestError(f"positions {problem}", param="positions")
    for each in positions:
        if len(each) != num_prompt_tokens:
            problem = f"of {len(each)} tokens in a prompt of {num_prompt_tokens}"
            raise InvalidRequestError(f"positions {problem}", param="positions")
        if not 0 <= min(each) <= max(each) <= MAX_POSITION:
            raise InvalidRequestError(f"positions must be from 0 to {MAX_POSITION}", param="positions")


def validate_prompt(
    token_ids: Sequence[int], *, vocab_size: int | None, max_model_len: int, max_tokens: int, param: str = "prompt"
) -> None:
    """Checks a tokenised prompt against the model.

    Raises InvalidRequestError if it is empty or has a token id outside [0, vocab_size), and PromptTooLongError if it
    and `max_tokens` answer tokens, 0 for a prompt that is pooled, exceed `max_model_len`. `param` names the field.
    """
    if not token_ids:
        raise InvalidRequestError(f"{param} is empty", param=param)
    if not max_tokens and len(token_ids) > max_model_len:
        raise PromptTooLongError(
            f"{param} has {len(token_ids)} tokens, more than the model's context of {max_model_len} tokens", param=param
        )
    if max_tokens and len(token_ids) >= max_model_len:
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
    """Raises InvalidRequestError for what is no integer, and for an id outside [0, vocab_size). `param` names the
    field."""
    if set(map(type, token_ids)) - {int}:
        raise InvalidRequestError(f"{param} must hold integers only", param=param)
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    limit = _TOKEN_ID_LIMIT if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        culprit = low if low < 0 else high
        raise InvalidRequestError(
            f"{param} has token id {quoted(culprit)}, outside the vocabulary [0, {limit})", param=param
        )


def _out_of_range(field: str, value: object, expected: str, names: Mapping[str, str]) -> InvalidRequestError:
    name = names.get(field, field)
    return InvalidRequestError(f"{name} must be {expected}, got {quoted(value)}", param=name)
