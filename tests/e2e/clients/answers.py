"""Expected answers, the answers that clients got, and the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from common.tokenization import Tokenizer
from common.types import Logprobs
from tests.e2e.clients.specs import Api, RequestSpec

LOGPROB_TOLERANCE = 1e-4  # sums are ordered otherwise in other batches; a repetition penalty multiplies the difference

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Position(NamedTuple):
    """Log probabilities at one output position, as an API spells them."""

    token: Any  # id, text, or text and bytes
    logprob: float
    top: list[tuple[Any, float]]
    text_offset: int | None = None  # where the API tells


@dataclass
class Choice:
    """One choice as its client got it, perhaps in part."""

    text: str = ""
    token_ids: list[int] | None = None  # None: the API does not tell
    positions: list[Position] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Answer:
    """All that a client got."""

    choices: list[Choice]
    has_left: bool = False  # the client did not wait for the end
    num_prompt_tokens: int | None = None  # None: not told
    num_tokens: int | None = None  # of all choices
    error: str = ""  # why it ended otherwise than well
    is_unavailable: bool = False  # the error says that no pod could serve the request: 503, UNAVAILABLE
    is_overload: bool = False  # the error says that it is one too many: 429, RESOURCE_EXHAUSTED


class ExpectedChoice(NamedTuple):
    """One choice of the reference."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[Logprobs]  # one per token if asked for, else empty
    text_offsets: list[int]


class Expected(NamedTuple):
    """A whole answer of the reference."""

    num_prompt_tokens: int
    echo: str  # precedes the text of each choice
    choices: list[ExpectedChoice]


class Job(NamedTuple):
    """A request and its answer."""

    spec: RequestSpec
    expected: Expected

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.expected.choices)


class Checker:
    """Compares answers with those of the reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def difference(self, job: Job, answer: Answer) -> str:
        """What is wrong with the answer; empty: nothing. If it ended with an error, or its client left, it may end
        anywhere."""
        partial = bool(answer.error) or answer.has_left
        spec, expected = job
        for index, (wanted, choice) in enumerate(zip(expected.choices, answer.choices, strict=True)):
            positions = _WantedPositions(self._spell(spec, wanted), _tolerance(spec.params.repetition_penalty))
            if problem := _difference(expected.echo + wanted.text, wanted, positions, choice, partial=partial):
                return f"choice {index}: {problem}"
        if (answer.num_tokens is None and partial) or not spec.is_told_usage:
            return ""
        told, counted = (answer.num_prompt_tokens, answer.num_tokens), (expected.num_prompt_tokens, job.num_tokens)
        return "" if told == counted else f"usage of prompt and answer {told}, expected {counted}"

    def _spell(self, spec: RequestSpec, wanted: ExpectedChoice) -> list[Position]:
        """Log probabilities as the request's API has them."""
        spelled = []
        for token_id, logprobs, offset in zip(wanted.token_ids, wanted.logprobs, wanted.text_offsets, strict=False):
            top = [(self._token(spec, each), logprob) for each, logprob in logprobs.top]
            token = self._token(spec, token_id)
            if spec.api is Api.GRPC or spec.is_chat:
                spelled.append(Position(token, logprobs.sampled, top))
            else:
                top = list({token: logprobs.sampled, **dict(top)}.items())
                spelled.append(Position(token, logprobs.sampled, top, offset))
        return spelled

    def _token(self, spec: RequestSpec, token_id: int) -> Any:
        if spec.api is Api.GRPC:
            return token_id
        text = self._tokenizer.token_text(token_id)
        return (text, self._tokenizer.token_bytes(token_id)) if spec.is_chat else text


class _WantedPositions(NamedTuple):
    """Log probabilities as they should be, and how far they may be off."""

    expected: list[Position]
    tolerance: float

    def difference(self, positions: Sequence[Position], *, partial: bool) -> str:
        """What is wrong with `positions`; empty: nothing."""
        if len(positions) != len(self.expected) and not (partial and len(positions) < len(self.expected)):
            return f"log probabilities of {len(positions)} tokens, expected {len(self.expected)}"
        for index, (got, expected) in enumerate(zip(positions, self.expected, strict=False)):
            if not self._is_same(got, expected):
                return f"log probabilities at position {index}: {got}, expected {expected}"
        return ""

    def _is_same(self, got: Position, expected: Position) -> bool:
        if got.token != expected.token or got.text_offset != expected.text_offset:
            return False
        return self._is_near(got.logprob, expected.logprob) and self._is_same_top(got.top, expected.top)

    def _is_same_top(self, got: list[tuple[Any, float]], expected: list[tuple[Any, float]]) -> bool:
        """Equal rank by rank. Tokens whose log probabilities are as good as equal may have changed places, also with
        the first that is not among them."""
        if len(got) != len(expected):
            return False
        ranked, wanted = sorted(value for _, value in got), sorted(value for _, value in expected)
        values = dict(expected)
        return all(map(self._is_near, ranked, wanted)) and all(
            self._is_near(value, values.get(token, wanted[0])) for token, value in got
        )

    def _is_near(self, value: float, other: float) -> bool:
        return abs(value - other) <= self.tolerance


def _tolerance(repetition_penalty: float) -> float:
    return LOGPROB_TOLERANCE * max(repetition_penalty, 1 / repetition_penalty)


def _difference(
    text: str, wanted: ExpectedChoice, positions: _WantedPositions, choice: Choice, *, partial: bool
) -> str:
    token_ids = wanted.token_ids
    if partial:
        text, token_ids = text[: len(choice.text)], token_ids[: len(choice.token_ids or ())]
    if choice.token_ids not in (None, token_ids):
        return f"tokens {choice.token_ids}, expected {token_ids}"
    if choice.text != text:
        return f"text {choice.text!r}, expected {text!r}"
    if choice.finish_reason != wanted.finish_reason and not (partial and not choice.finish_reason):
        return f"finish reason {choice.finish_reason!r}, expected {wanted.finish_reason!r}"
    return positions.difference(choice.positions, partial=partial)
