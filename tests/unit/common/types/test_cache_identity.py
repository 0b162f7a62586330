"""Each thing that decides the KV of a block is part of its key or of the model's fingerprint.

Two that differ in one of them have different keys, and the same once the code that takes it in is removed: so no other
part of the key stands in for it, and removing it makes a test fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from common.engine.model import fingerprint
from common.types import block_hash
from common.types.positions import PromptPositions

BLOCK = 4
PROMPT = list(range(1, 13))
DIGESTS = [bytes([number]) * 32 for number in (1, 2)]

Key = tuple[bytes, ...]


class Ingredient(NamedTuple):
    """Something that decides KV."""

    module: ModuleType
    code: str  # that takes it in,
    without: str  # and what it is without it
    keys: Callable[[Any], tuple[Key, Key]]  # of two blocks that differ in nothing else, by the module's functions


def hashes(tokens: list[int] = PROMPT, **request: Any) -> Callable[[Any], Key]:
    """The keys of a prompt's blocks, the last of which is partial."""

    def key(module: Any) -> Key:
        root = module.root_hash(request.get("salt", ""), request.get("adapter", b""))
        images = [block_hash.ExtraKey(*each) for each in request.get("images", ())]
        of_blocks = images, request.get("positions")
        full = module.hash_prompt(tokens[: len(tokens) - 2], BLOCK, root, of_blocks[0], 0, of_blocks[1])
        return (*full, module.hash_partial_block(tokens, BLOCK, full, root, *of_blocks))

    return key


def pair(
    first: Callable[[Any], Key], second: Callable[[Any], Key], block: int = -1
) -> Callable[[Any], tuple[Key, Key]]:
    """The keys of one block of each of two prompts; the last by default."""
    return lambda module: ((first(module)[block],), (second(module)[block],))


def models(**other: Any) -> Callable[[Any], tuple[Key, Key]]:
    """The fingerprints of two models, of which the second has `other` settings."""

    def key(module: Any, settings: dict[str, Any]) -> Key:
        given = {"weights": b"some", "config": {}, "dtype": "float32", "kv_dtype": "float32", **settings}
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(8) + given.pop("weights"))
            file.flush()
            files, config = [Path(file.name)], given.pop("config")
            return (module.fingerprint_model(files, config, **given),)

    return lambda module: (key(module, {}), key(module, other))


def at(*places: int) -> PromptPositions:
    return PromptPositions.of([list(places)])


INGREDIENTS = {
    "a token": Ingredient(
        block_hash, "packed[start : start + stride]", "bytes(stride)", pair(hashes(), hashes([9, *PROMPT[1:]]), 0)
    ),
    "a token of a partial block": Ingredient(
        block_hash,
        'array("I", token_ids[first:]).tobytes()',
        "bytes(4 * (len(token_ids) - first))",
        pair(hashes(), hashes([*PROMPT[:-1], 99])),
    ),
    "a token of a block before": Ingredient(
        block_hash, "content = parent + packed", "content = packed", pair(hashes(), hashes([9, *PROMPT[1:]]), 1)
    ),
    "a tenant's salt": Ingredient(
        block_hash, "_ROOT + cache_salt.encode()", "_ROOT", pair(hashes(salt="a"), hashes(salt="b"))
    ),
    "a tenant's salt beside an adapter": Ingredient(
        block_hash,
        "adapter + cache_salt.encode()",
        "adapter",
        pair(hashes(salt="a", adapter=DIGESTS[0]), hashes(salt="b", adapter=DIGESTS[0])),
    ),
    "an adapter": Ingredient(
        block_hash,
        "_ADAPTED_ROOT + adapter +",
        "_ADAPTED_ROOT +",
        pair(hashes(adapter=DIGESTS[0]), hashes(adapter=DIGESTS[1])),
    ),
    "an image": Ingredient(
        block_hash,
        "+ key.digest for key in keys",
        "for key in keys",
        pair(hashes(images=[(1, 3, b"a")]), hashes(images=[(1, 3, b"b")])),
    ),
    "an image's place": Ingredient(
        block_hash,
        "key.start - first, key.end - first,",
        "0, 0,",
        pair(hashes(images=[(1, 3, b"a")]), hashes(images=[(0, 2, b"a")])),
    ),
    "positions": Ingredient(
        block_hash,
        'array("q", each).tobytes() for each in of_tokens',
        "b'' for each in of_tokens",
        pair(hashes(positions=at(*range(1, 13))), hashes(positions=at(*range(2, 14)))),
    ),
    "weights": Ingredient(
        fingerprint, "digest.update(_digest_weights(path))", "digest.update(b'')", models(weights=b"same")
    ),
    "the configuration": Ingredient(
        fingerprint, "json.dumps(relevant, sort_keys=True)", "''", models(config={"rope_theta": 2})
    ),
    "the type of numbers": Ingredient(fingerprint, "dtype {dtype};", "", models(dtype="bfloat16")),
    "the type of KV": Ingredient(fingerprint, "KV {kv_dtype};", "", models(kv_dtype="int8")),
    "how weights are quantised": Ingredient(
        fingerprint, 'f"quantization {quantization};"', '""', models(quantization="int8")
    ),
    "how kernels round": Ingredient(
        fingerprint, "digest.update(rounding.encode())", "pass", models(rounding="16 lanes")
    ),
}


def mutated(ingredient: Ingredient) -> ModuleType:
    """The module without the ingredient."""
    assert ingredient.module.__file__ is not None
    source = Path(ingredient.module.__file__).read_text()
    assert source.count(ingredient.code) == 1, ingredient.code
    module = ModuleType(f"{ingredient.module.__name__}_mutated")
    exec(source.replace(ingredient.code, ingredient.without), module.__dict__)
    return module


@pytest.mark.parametrize("name", INGREDIENTS)
def test_what_decides_kv_is_in_its_key(name: str) -> None:
    ingredient = INGREDIENTS[name]
    one, another = ingredient.keys(ingredient.module)
    assert one != another
    one, another = ingredient.keys(mutated(ingredient))
    assert one == another
