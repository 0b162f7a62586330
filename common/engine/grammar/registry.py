"""The backends by name, and which of them compiles what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from common.engine.config import GrammarBackendName
from common.engine.grammar.base import CompiledGrammar, GrammarBackend, Vocabulary
from common.types import Constraint, ConstraintKind

# Keywords of JSON schemas that xgrammar takes for comments, or honours in a way that lets strings hold what JSON does
# not: its answers might not be valid. llguidance honours them or refuses the schema.
_MISREAD_BY_XGRAMMAR = frozenset(
    {
        "allOf",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "maxLength",
        "minContains",
        "minLength",
        "multipleOf",
        "not",
        "pattern",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
# Of these the values are schemas by name, not keywords.
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples", "required"})


def create_backend(name: GrammarBackendName, vocabulary: Vocabulary, max_whitespace: int) -> GrammarBackend:
    """Returns the backend of that name; libraries are imported as they are needed. `max_whitespace`: most characters
    of whitespace in a row between the tokens of JSON, where a constraint has no pattern of its own."""
    match name:
        case "auto":
            return AutoBackend(vocabulary, max_whitespace)
        case "xgrammar":
            from common.engine.grammar.xgrammar_backend import XgrammarBackend

            return XgrammarBackend(vocabulary, max_whitespace)
        case "llguidance":
            from common.engine.grammar.llguidance_backend import LlguidanceBackend

            return LlguidanceBackend(vocabulary, max_whitespace)


class AutoBackend:
    """xgrammar, and llguidance for what xgrammar does not honour. The same on every pod."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int) -> None:
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._backends: dict[GrammarBackendName, GrammarBackend] = {}

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See GrammarBackend."""
        name = backend_for(constraint)
        if name not in self._backends:
            self._backends[name] = create_backend(name, self._vocabulary, self._max_whitespace)
        return self._backends[name].compile(constraint)


def backend_for(constraint: Constraint) -> GrammarBackendName:
    """The one that honours all of the constraint."""
    if constraint.whitespace_pattern:
        return "llguidance"
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema = json.loads(constraint.text)
        if any(keyword in _MISREAD_BY_XGRAMMAR for keyword in _keywords(schema)):
            return "llguidance"
    return "xgrammar"


def _keywords(schema: Any) -> Iterator[str]:
    """All keywords of a schema and those within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _keywords(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            yield name
            if name in _NAMED_SCHEMAS and isinstance(value, dict):
                yield from _keywords(list(value.values()))
            elif name not in _NO_SCHEMAS:
                yield from _keywords(value)
