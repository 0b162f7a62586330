"""Constrained output by llguidance."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from common.engine.contract.masks import BITS
from common.engine.grammar.base import CompiledGrammar, Matcher, Vocabulary
from common.errors import InvalidRequestError
from common.types import Constraint, ConstraintKind
from common.types.constraint import MAX_CONSTRAINT_DEPTH

# Keywords of JSON schemas: of schemas by name, of schemas, of objects in parts, and of further properties.
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties"})
_WITHIN = frozenset({"items", "prefixItems", "additionalProperties"})
_COMPOSING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not"})
_OPENING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})


class LlguidanceBackend:
    """See GrammarBackend."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int) -> None:
        self._max_whitespace = max_whitespace
        # The library needs an end-of-sequence token. One past the vocabulary is never sampled.
        self._eos_token_ids = vocabulary.eos_token_ids or frozenset({vocabulary.size})
        num_tokens = max(vocabulary.size, max(self._eos_token_ids) + 1)
        self._num_words = -(-num_tokens // BITS)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary, num_tokens, min(self._eos_token_ids))),
            n_vocab=num_tokens,
            eos_token=sorted(self._eos_token_ids),
        )

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See GrammarBackend."""
        try:
            grammar = _grammar_of(constraint, self._max_whitespace)
        except ValueError as error:
            is_deep = isinstance(error.__context__, RecursionError)  # of the library's reader of grammars
            problem = f"it is nested more than {MAX_CONSTRAINT_DEPTH} levels deep" if is_deep else str(error)
            raise InvalidRequestError(problem) from error
        first = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if first.is_error():
            raise InvalidRequestError(first.get_error())
        return _Grammar(first, self._eos_token_ids, self._num_words)


class _Tokens:
    """The form in which the library takes a vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, num_tokens: int, eos_token_id: int) -> None:
        padded = vocabulary.token_bytes + (b"",) * (num_tokens - vocabulary.size)
        self.eos_token_id = eos_token_id
        self.tokens = [token or f"<special {token_id}>".encode() for token_id, token in enumerate(padded)]
        self.special_token_ids = [token_id for token_id, token in enumerate(padded) if not token]
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.token_bytes) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that a grammar forces, the longest first. Bytes that are no token are left out."""
        rest = text if isinstance(text, bytes) else text.encode()
        token_ids = []
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            token_id, length = next(((self._ids[rest[:n]], n) for n in lengths if rest[:n] in self._ids), (None, 1))
            if token_id is not None:
                token_ids.append(token_id)
            rest = rest[length:]
        return token_ids


class _Grammar:
    def __init__(self, first: llguidance.LLMatcher, eos_token_ids: frozenset[int], num_words: int) -> None:
        self._first = first
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids

    def matcher(self) -> Matcher:
        return _Matcher(self._first.deep_copy(), self._eos_token_ids, self._num_words)


class _Matcher:
    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], num_words: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(num_words, dtype=np.int32)  # that the library fills
        self._eos_token_ids = eos_token_ids
        self._has_ended = False  # an end-of-sequence token has come, after which the library allows another one

    def accept(self, token_id: int) -> bool:
        if self._has_ended:
            return False
        if token_id in self._eos_token_ids:
            self._has_ended = bool(self._matcher.is_accepting())
            return self._has_ended
        is_accepted: bool = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():  # it has bounds of its own
            raise RuntimeError(self._matcher.get_error())
        return is_accepted

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:  # the last one is not the library's
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if self._has_ended:
            mask[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            mask[:] = self._words[: len(mask)]


def _grammar_of(constraint: Constraint, max_whitespace: int) -> str:
    """The library's own form. Raises ValueError."""
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _grammar_of_schema(text, constraint, max_whitespace)
        case ConstraintKind.JSON_OBJECT:
            return _grammar_of_schema('{"type": "object"}', constraint, max_whitespace)
        case ConstraintKind.REGEX:
            return str(llguidance.grammar_from("regex", text))
        case ConstraintKind.CHOICE:
            return str(llguidance.grammar_from("choice", text))
        case ConstraintKind.GRAMMAR:
            return str(llguidance.grammar_from("grammar", text))
        case ConstraintKind.STRUCTURAL_TAG:
            raise ValueError("structural_tag is not supported by the grammar backend llguidance")


def _grammar_of_schema(schema: str, constraint: Constraint, max_whitespace: int) -> str:
    has_whitespace = constraint.any_whitespace and max_whitespace > 0
    options: llguidance.JsonCompileOptions = {"coerce_one_of": True, "whitespace_flexible": has_whitespace}
    if constraint.whitespace_pattern:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif has_whitespace:
        options["whitespace_pattern"] = rf"[ \n\r\t]{{1,{max_whitespace}}}"
    value = json.loads(schema)
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_closed(value)), overrides=options))


def _closed(schema: Any) -> Any:
    """The schema with objects that have no properties but those that it names, unless it says otherwise, as xgrammar
    has it. Objects that are put together from several schemas stay as they are: each part names only its own."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    is_composed = not _COMPOSING.isdisjoint(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            closed[name] = {each: _closed(inner) for each, inner in value.items()}
        elif name in _WITHIN or (name in ("anyOf", "oneOf") and "properties" not in schema):
            closed[name] = _closed(value)
    if "properties" in schema and not is_composed and _OPENING.isdisjoint(schema):
        closed["additionalProperties"] = False
    return closed
