"""Calls that the model must make: the constraint under which its answer can be nothing else.

The answer is a JSON array of calls, see `json_array`. Schemas of arguments that refer to parts of themselves become
definitions of the whole, and their references with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from common.types import Constraint
from common.types.constraint import MAX_CONSTRAINT_BYTES, check_json_shape
from common.types.schemas import check_references
from router.gateway.bodies.tools import Tool, ToolChoice, name_of

_ROOT = "#/$defs/"


def forced_calls(tools: Sequence[Tool], choice: ToolChoice, *, is_single: bool) -> Constraint:
    """Returns the constraint of an answer that calls tools by the choice: exactly one if that names it or `is_single`,
    else at least one. Raises InvalidRequestError if the schemas of the tools are more than a constraint may hold, or
    lead outside."""
    callable_tools = [tool for tool in tools if choice.name in ("", name_of(tool))]
    _check_size(callable_tools)
    for index, tool in enumerate(tools):
        if choice.name in ("", name_of(tool)):
            check_references(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, f"tool{index}", definitions) for index, tool in enumerate(callable_tools)]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if choice.name or is_single:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return Constraint.json_schema(schema, any_whitespace=False)  # else a model may write white space without end


def _check_size(tools: Sequence[Tool]) -> None:
    """Here already, as what follows takes longer."""
    encoded = msgspec.json.encode([tool["function"].get("parameters") for tool in tools])
    if len(encoded) > MAX_CONSTRAINT_BYTES:
        problem = f"have {len(encoded)} bytes, more than the limit of {MAX_CONSTRAINT_BYTES} where calls are forced"
        raise InvalidRequestError(f"tools: the schemas {problem}", param="tools")
    check_json_shape(encoded, "tools")


def _call_schema(tool: Tool, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of a call; what it refers to goes to `definitions`."""
    arguments: dict[str, Any] = {**(tool["function"].get("parameters") or {}), "type": "object"}
    if _has_references(arguments):
        definitions[key] = _moved(arguments, f"{_ROOT}{key}")
        arguments = {"$ref": f"{_ROOT}{key}"}
    return {
        "type": "object",
        "properties": {"name": {"const": name_of(tool)}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _has_references(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_references, schema))
    if not isinstance(schema, Mapping):
        return False
    return _is_reference(schema.get("$ref")) or any(map(_has_references, schema.values()))


def _moved(schema: Any, root: str) -> Any:
    """The same with references to `root` in place of the schema's own."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and _is_reference(value) else _moved(value, root)
        for key, value in schema.items()
    }


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("#")
