"""The backends by name, and which of them compiles what."""

from __future__ import annotations

import json
import re
from typing import Any

from common.engine.config import GrammarBackendName
from common.engine.grammar.base import CompiledGrammar, GrammarBackend, Vocabulary
from common.types import Constraint, ConstraintKind
from common.types.schemas import schemas_within

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
_IGNORED_BESIDE_REFERENCES = frozenset(  # by xgrammar, which honours them elsewhere
    {
        "additionalProperties",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxProperties",
        "maximum",
        "minItems",
        "minProperties",
        "minimum",
        "oneOf",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
_NOT_FOLLOWED_BY_XGRAMMAR = re.compile(r"[%~]|/[0-9]+(/|$)")  # in a reference: what is escaped, and indexes of lists


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
        schemas = schemas_within(json.loads(constraint.text))
        if any(not _MISREAD_BY_XGRAMMAR.isdisjoint(schema) or _is_hard_to_follow(schema) for schema in schemas):
            return "llguidance"
    return "xgrammar"


def _is_hard_to_follow(schema: dict[str, Any]) -> bool:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return False
    is_qualified = not _IGNORED_BESIDE_REFERENCES.isdisjoint(schema)
    return is_qualified or _NOT_FOLLOWED_BY_XGRAMMAR.search(reference) is not None
