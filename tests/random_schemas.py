"""Random JSON schemas whose texts are short, whatever a model makes of them."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("a", "bc", "name", "size", "x y", 'quo"te', "back\\slash", "ünï", "")
_PATTERNS = ("^[a-c]{1,4}$", "^(ab|cd){1,2}x?$", "^[0-9]{2}-[0-9]{2}$", "^.{0,3}$", "^[^a]{1,3}$")


def random_schema(seed: int) -> dict[str, Any]:
    """The same for the same seed; an object at the top in most cases."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.7 else _any(rng, 2)
    if rng.random() < 0.3:
        schema["$defs"] = {"shared": _any(rng, 0)}
        if schema.get("type") == "object" and schema["properties"]:
            schema["properties"][rng.choice(list(schema["properties"]))] = {"$ref": "#/$defs/shared"}
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _constant, _enum, lambda *_: {"type": rng.choice(["boolean", "null"])}]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return dict(rng.choice(kinds)(rng, depth))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["description"] = "pattern"
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "exclusiveMinimum": 0, "maximum": rng.randint(1, 99), "multipleOf": 1}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([1, -2.5, True, None, "one", {"a": [1, 2]}, []])}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([1, 22, "x", "longer text", None, False, 'q"'], rng.randint(1, 4))}
