"""Constraints as clients write them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequestError
from common.types import Constraint, ConstraintKind
from router.gateway.openai.chat_bodies import parse_chat
from router.requests.terms import Terms

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def constraint_of(**fields: Any) -> Constraint | None:
    """What becomes of a body with these fields."""
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}], **fields})
    [draft] = parse_chat(body).drafts("a", 0.0, Terms())
    return draft.sampling.get("structured_outputs")


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "regex": None, "json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": msgspec.json.encode(SCHEMA).decode()}}, Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_object()),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " ?"}},
            Constraint.json_object(any_whitespace=False, whitespace_pattern=" ?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Constraint.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint.grammar('root ::= "a"')),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, Constraint.structural_tag({"format": {}})),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Constraint.regex("a")),
    ],
    ids=str,
)
def test_a_constraint_in_either_form(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert constraint_of(**fields) == constraint


def test_a_structural_tag_in_openais_form() -> None:
    value = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    constraint = constraint_of(response_format=value)
    assert constraint is not None
    assert (constraint.kind, msgspec.json.decode(constraint.text)) == (ConstraintKind.STRUCTURAL_TAG, value)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
        ({"response_format": {"type": "text", "shema": 1}}, "response_format.shema", "did you mean"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"nam": "x", "schema": {}}}},
            "response_format.json_schema.nam",
            "did you mean name",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "expected"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "object"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        constraint_of(**fields)
    assert (caught.value.param, problem in caught.value.message) == (param, True), caught.value.message
