"""JSON schemas as trees: the schemas within one, and what its references lead to. Nothing here recurses or fetches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from common.errors import InvalidRequestError, quoted

# Keywords whose values are schemas by name, and those whose values are no schemas.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples", "required"})
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})  # of which the first alone is followed
_MAX_INDEX_DIGITS = 5


def schemas_within(root: Any) -> Iterator[dict[str, Any]]:
    """Yields the schema, those within it and those that these refer to, each once. Booleans are left out."""
    return (schema for schema, _ in _with_targets(root))


def check_references(root: Any, param: str) -> None:
    """Raises InvalidRequestError for a reference to anything but a schema within this one. `param` names the field."""
    for schema, target in _with_targets(root):
        for keyword in _REFERENCES.intersection(schema):
            reference = schema[keyword]
            if isinstance(reference, str) and (keyword != "$ref" or target is None):
                problem = "cannot be followed: a $ref must lead to a schema within the same one; nothing is fetched"
                raise InvalidRequestError(f"{param}: the {keyword} {quoted(reference)} {problem}", param=param)


def _with_targets(root: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any] | bool | None]]:
    """Each schema, and what its `$ref` leads to."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            target = _target(root, value["$ref"]) if "$ref" in value else None
            yield value, target
            pending.append(target)
            for keyword, inner in value.items():
                if keyword in _NAMED_SCHEMAS and isinstance(inner, dict):
                    pending += inner.values()
                elif isinstance(inner, dict | list) and keyword not in _NO_SCHEMAS:
                    pending.append(inner)


def _target(root: Any, reference: object) -> dict[str, Any] | bool | None:
    """The schema to which a JSON pointer in a fragment leads (RFC 6901); None: to none. Empty names are none: xgrammar
    leaves them out."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    value, is_schema = root, True
    for token in unquote(reference).split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        is_schema = not (is_schema and name in _NAMED_SCHEMAS)
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value if is_schema and isinstance(value, dict | bool) else None


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= _MAX_INDEX_DIGITS


def schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yields the schemas in a structural tag, which each have references of their own."""
    pending = [tag]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in ("json_schema", "schema"):
                    yield value
                else:
                    pending.append(value)
