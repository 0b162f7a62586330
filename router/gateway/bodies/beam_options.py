"""The options of a request for a beam search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Raw

from common.beam_search import EarlyStopping
from common.errors import InvalidRequestError, quoted
from common.types.parameters import Range
from router.requests.bounds import MAX_BEAMS

NOT_WITH_BEAMS = (
    "stream",
    "echo",
    "logprobs",
    "num_logprobs",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "vllm_xargs",
    "thinking_token_budget",
    "structured_outputs",
    "tools",
)
_NO_BOUND = -1  # value of thinking_token_budget that sets no bound
_LENGTH_PENALTIES = Range(-10, 10)


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping


def beam_options(n: int, width: int, length_penalty: float, early_stopping: EarlyStopping) -> BeamOptions:
    """Options to find the `n` best of `width` beams. Raises InvalidRequestError."""
    if not n <= width <= MAX_BEAMS:
        raise InvalidRequestError(f"best_of must be in [n, {MAX_BEAMS}], got {width}", param="best_of")
    if length_penalty not in _LENGTH_PENALTIES:
        problem = f"length_penalty must be {_LENGTH_PENALTIES}, got {quoted(length_penalty)}"
        raise InvalidRequestError(problem, param="length_penalty")
    return BeamOptions(width, length_penalty, early_stopping)


def check_no_rivals(fields: Mapping[str, object]) -> None:
    """Raises InvalidRequestError for a field that asks for something that a search does not do."""
    for name, value in fields.items():
        if name in NOT_WITH_BEAMS and _asks(name, value):
            raise not_with_beams(name)


def not_with_beams(name: str) -> InvalidRequestError:
    """The refusal of a field."""
    return InvalidRequestError(f"{name} cannot be used with use_beam_search", param=name)


def _asks(name: str, value: object) -> bool:
    """Whether the value of a field asks for something."""
    if value is None or value is False:
        return False
    if isinstance(value, Raw):
        return bytes(value) not in (b"", b"null", b"[]")
    if name in {"logprobs", "num_logprobs", "prompt_logprobs"}:
        return True
    if name == "thinking_token_budget":
        return value != _NO_BOUND
    return value != 1.0 if name == "repetition_penalty" else bool(value)
