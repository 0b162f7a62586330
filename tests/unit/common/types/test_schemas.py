"""What references of JSON schemas lead to."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.types import Constraint
from common.types.constraint import check_constraint
from common.types.schemas import schemas_within

INTEGER = {"type": "integer"}
LEADING = [
    "#",
    "#/$defs/a",
    "#/$defs/a%20b",
    "#/$defs/a b",
    "#/$defs/c~1d",
    "#/$defs/e~0f",
    "#/$defs/g/items",
    "#/$defs/any",
    "#/properties/$ref",
    "#/components/deep/er",
    "#/anyOf/1",
]
ASTRAY = [
    "http://example.org/schema",
    "https://json-schema.org/draft/2020-12/schema",
    "file:///etc/passwd",
    "//example.org/schema",
    "other.json",
    "",
    "#/",
    "#/$defs",  # leads to names of schemas, which xgrammar takes for one
    "#/$defs/",
    "#/$defs/missing",
    "#/$defs/a%2Fb",
    "#/$defs/number",
    "#/$defs//a",
    "#/anyOf/2",
    "#/anyOf/-1",
    "#/anyOf/" + "9" * 5000,
    "#/anyOf/\u0661",
    "#anchor",
    "#/type/object",
    "http://example.org/\n[decode-0] forged",
]
DEFINITIONS = {
    "a": INTEGER,
    "a b": INTEGER,
    "c/d": INTEGER,
    "e~f": INTEGER,
    "g": {"type": "array", "items": INTEGER},
    "any": True,
    "number": 3,
    "anchored": {"$anchor": "anchor"},
}


def schema(reference: object) -> dict[str, Any]:
    return {
        "type": "object",
        "$defs": DEFINITIONS,
        "components": {"deep": {"er": INTEGER}},
        "properties": {"x": {"items": [{"$ref": reference}]}, "$ref": INTEGER},
        "anyOf": [INTEGER, INTEGER],
    }


def constraints(reference: object) -> list[Constraint]:
    """Wherever a schema may be."""
    part = {"type": "json_schema", "json_schema": schema(reference)}
    tag = {"type": "tag", "begin": "<", "content": part, "end": ">"}
    old = {"structures": [{"begin": "<", "schema": schema(reference), "end": ">"}], "triggers": ["<"]}
    return [
        Constraint.json_schema(schema(reference)),
        Constraint.structural_tag({"format": {"type": "sequence", "elements": [tag]}}),
        Constraint.structural_tag(old),
    ]


@pytest.mark.parametrize("reference", LEADING)
def test_a_reference_within_the_schema(reference: str) -> None:
    for constraint in constraints(reference):
        check_constraint(constraint, "response_format")


@pytest.mark.parametrize("reference", ASTRAY, ids=lambda reference: reference[:30])
def test_a_reference_that_leads_nowhere_is_named(reference: str) -> None:
    for constraint in constraints(reference):
        with pytest.raises(InvalidRequestError) as caught:
            check_constraint(constraint, "response_format")
        assert caught.value.param == "response_format"
        assert caught.value.message.startswith("response_format")
        assert reference[:50].partition("\n")[0] in caught.value.message
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["$dynamicRef", "$recursiveRef"])
def test_other_references_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"the \{name} '#'"):
        check_constraint(Constraint.json_schema({"items": {"$ref": "#", name: "#"}}), "structured_outputs")


@pytest.mark.parametrize(
    "harmless",
    [
        {"const": {"$ref": "http://example.org"}},
        {"enum": [{"$ref": "http://example.org"}]},
        {"default": {"$ref": "http://example.org"}},
        {"properties": {"$ref": {"type": "string"}, "$dynamicRef": {"type": "string"}}},
        {"description": "$ref: http://example.org"},
    ],
)
def test_what_only_looks_like_a_reference(harmless: dict[str, Any]) -> None:
    check_constraint(Constraint.json_schema(harmless), "response_format")


def test_references_are_followed_to_where_nothing_else_looks() -> None:
    hidden = {"$ref": "#/default/x", "default": {"x": {"$ref": "http://example.org"}}}
    with pytest.raises(InvalidRequestError, match=r"http://example\.org"):
        check_constraint(Constraint.json_schema(hidden), "response_format")


def test_references_in_a_circle_and_in_a_long_chain() -> None:
    links = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(4000)}
    for end in ({"$ref": "#/$defs/a0"}, INTEGER):
        chain = {"$ref": "#", "$defs": {**links, "a4000": end}}
        assert len(list(schemas_within(chain))) == 4002
        check_constraint(Constraint.json_schema(chain), "response_format")
