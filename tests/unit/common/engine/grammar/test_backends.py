"""What distinguishes the backends, and what must not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.demo_model import demo_model_path
from common.engine.config import GrammarBackendName
from common.engine.grammar.registry import backend_for, create_backend
from common.engine.grammar.vocabulary import load_vocabulary
from common.errors import InvalidRequestError
from common.tokenization import Tokenizer
from common.types import Constraint
from common.types.constraint import MAX_CONSTRAINT_DEPTH, check_constraint

TOKENIZER = Tokenizer.from_directory(demo_model_path())
VOCABULARY = load_vocabulary(demo_model_path(), 2048, frozenset({0, 2}))
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}


def accepts(name: GrammarBackendName, constraint: Constraint, text: str, max_whitespace: int = 3) -> bool:
    """Whether the backend takes the whole text and lets it end there."""
    matcher = create_backend(name, VOCABULARY, max_whitespace).compile(constraint).matcher()
    return all(matcher.accept(token_id) for token_id in [*TOKENIZER.encode(text, add_special_tokens=False), 2])


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_tokens_are_given_up_in_any_number(name: GrammarBackendName) -> None:
    matcher = create_backend(name, VOCABULARY, 0).compile(Constraint.regex("ab?")).matcher()
    a, b = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "ab")

    def allowed() -> set[int]:
        mask = np.zeros(VOCABULARY.num_words, dtype=np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    steps = [allowed()]
    for token_id in (a, b, 2):
        assert matcher.accept(token_id)
        steps.append(allowed())
    assert steps[1:] == [{b, 0, 2}, {0, 2}, set()]
    assert not matcher.accept(a)
    for num_tokens in (1, 2):
        matcher.rollback(num_tokens)
        assert allowed() == (steps[2] if num_tokens == 1 else steps[0])
    assert matcher.accept(a)
    assert matcher.accept(2)
    assert not matcher.accept(b)
    matcher.rollback(0)
    assert allowed() == set()
    matcher.rollback(2)
    assert allowed() == steps[0]


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(
    ("schema", "text", "is_accepted"),
    [
        (NAMED, '{"a":1}', True),
        (NAMED, '{"a":1,"b":2}', False),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, '{"a":1,"b":2}', True),
        ({"type": "array", "items": NAMED}, '[{"b":2}]', False),
        ({"$defs": {"x": NAMED}, "$ref": "#/$defs/x"}, '{"b":2}', False),
        ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, "3", True),
    ],
)
def test_backends_agree_on_schemas(
    name: GrammarBackendName, schema: dict[str, Any], text: str, is_accepted: bool
) -> None:
    assert accepts(name, Constraint.json_schema(schema, any_whitespace=False), text) is is_accepted


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(("max_whitespace", "length"), [(3, 0), (3, 3), (3, 4), (0, 0), (0, 1)])
def test_whitespace_in_json_is_bounded(name: GrammarBackendName, max_whitespace: int, length: int) -> None:
    space = "\n  \t"[:length]
    text = f'{{{space}"a"{space}:{space}1{space}}}'
    for constraint in (Constraint.json_object(), Constraint.json_schema(NAMED)):
        assert accepts(name, constraint, text, max_whitespace) is (length <= max_whitespace)


@pytest.mark.parametrize(("own", "most"), [({}, 3), ({"max_whitespace_cnt": 1}, 1)])
def test_whitespace_in_structural_tags_is_bounded(own: dict[str, int], most: int) -> None:
    content = {"type": "json_schema", "json_schema": NAMED, **own}
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "or", "elements": [content]}, "end": "</a>"}
    new = Constraint.structural_tag({"type": "structural_tag", "format": tag})
    old = Constraint.structural_tag(
        {"structures": [{"begin": "<a>", "schema": NAMED, "end": "</a>"}], "triggers": ["<a>"]}
    )
    for constraint, bound in ((new, most), (old, 3)):
        assert accepts("xgrammar", constraint, f'<a>{{{" " * bound}"a":1}}</a>')
        assert not accepts("xgrammar", constraint, f'<a>{{{" " * (bound + 1)}"a":1}}</a>')


def test_objects_in_parts_stay_open() -> None:
    parts = {"allOf": [NAMED, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert accepts("llguidance", Constraint.json_schema(parts, any_whitespace=False), '{"a":1,"b":2}')


@pytest.mark.parametrize(
    "reference", ["#/$defs/a", "#/$defs/a~1b", "#/$defs/a%20b", "#/prefixItems/0", "#/$defs/list/items"]
)
def test_references_within_a_schema_are_followed(reference: str) -> None:
    named = {"a": NAMED, "a/b": NAMED, "a b": NAMED, "list": {"type": "array", "items": NAMED}}
    constraint = Constraint.json_schema({"$ref": reference, "$defs": named, "prefixItems": [NAMED]})
    check_constraint(constraint, "response_format")
    assert accepts("auto", constraint, '{"a":1}')
    assert not accepts("auto", constraint, '{"b":1}')


def test_keywords_beside_a_reference_hold() -> None:
    def qualified(**keywords: object) -> Constraint:
        return Constraint.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, **keywords})

    assert accepts("auto", qualified(enum=[1, "ZZZ"]), "1")
    assert not accepts("auto", qualified(enum=[1, "ZZZ"]), "2")
    assert not accepts("auto", qualified(maximum=5), "7")
    with pytest.raises(InvalidRequestError, match="Unsatisfiable"):
        accepts("auto", qualified(enum=["ZZZ"]), "1")


def test_a_grammar_that_is_too_deep_for_llguidance() -> None:
    def nested(depth: int) -> Constraint:
        return Constraint.grammar(f'root ::= {"(" * depth}"a"{")" * depth}')

    assert accepts("llguidance", nested(MAX_CONSTRAINT_DEPTH), "a")
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_CONSTRAINT_DEPTH} levels"):
        accepts("llguidance", nested(5000), "a")


@pytest.mark.parametrize(
    ("constraint", "name"),
    [
        (Constraint.json_schema(NAMED), "xgrammar"),
        (Constraint.json_schema({"type": "object", "properties": {"pattern": {"type": "string"}}}), "xgrammar"),
        (Constraint.json_schema({"enum": [{"pattern": 1}]}), "xgrammar"),
        (Constraint.json_schema({"type": "array", "items": {"type": "string", "maxLength": 3}}), "llguidance"),
        (Constraint.json_object(whitespace_pattern=" ?"), "llguidance"),
        (Constraint.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"minLength": 3}}}), "llguidance"),
        (Constraint.json_schema({"$ref": "#/default", "default": {"minLength": 3}}), "llguidance"),
        (Constraint.json_schema({"$ref": "#/$defs/a", "description": "x", "$defs": {"a": NAMED}}), "xgrammar"),
        (Constraint.json_schema({"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {}}}), "llguidance"),
        (Constraint.json_schema({"properties": {"$ref": {"type": "string"}, "type": {}}}), "xgrammar"),
        (Constraint.regex("maxLength"), "xgrammar"),
    ],
)
def test_auto_takes_the_backend_that_honours_all(constraint: Constraint, name: str) -> None:
    assert backend_for(constraint) == name
