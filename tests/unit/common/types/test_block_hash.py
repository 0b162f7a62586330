"""A block's hash names its content: whatever decides the KV of its tokens."""

from __future__ import annotations

import pytest

from common.types import BlockHash, ExtraKey, hash_partial_block, hash_prompt, root_hash

TOKENS = list(range(40))
KEYS = [ExtraKey(3, 9, b"one"), ExtraKey(9, 14, b"other")]
BLOCK_SIZE = 8


def hashes(
    tokens: list[int] = TOKENS, keys: list[ExtraKey] = KEYS, salt: str = "salt", adapter: str = "adapter"
) -> list[BlockHash]:
    root = root_hash(salt, adapter)
    full = hash_prompt(tokens, BLOCK_SIZE, root, keys)
    return [*full, hash_partial_block(tokens[:-1], BLOCK_SIZE, full[:-1], root, keys)]


@pytest.mark.parametrize(
    "changed",
    [
        {"salt": "other"},
        {"adapter": "other"},
        {"tokens": [1, *TOKENS[1:]]},
        {"keys": [ExtraKey(3, 9, b"three"), KEYS[1]]},
        {"keys": [ExtraKey(4, 9, b"one"), KEYS[1]]},
        {"keys": [ExtraKey(3, 8, b"one"), KEYS[1]]},
        {"keys": [KEYS[1]]},
        {"keys": []},
    ],
)
def test_every_ingredient_changes_the_block_and_all_after_it(changed: dict) -> None:
    assert not set(hashes(**changed)) & set(hashes())


def test_a_key_changes_no_block_before_its_tokens() -> None:
    first, second, *others = hashes(keys=[*KEYS[:1], ExtraKey(9, 14, b"another")])
    expected = hashes()
    assert first == expected[0]
    assert not {second, *others} & set(expected)
    assert hashes(keys=[ExtraKey(16, 17, b"x")])[:2] == hashes(keys=[])[:2]


def test_neighbours_of_equal_tokens_are_told_apart() -> None:
    """Two pictures of 10 and 22 placeholders begin with the same block as two of 12 and 20, but for where they lie."""
    prompt = [7] * 32
    one = hash_prompt(prompt, 16, root_hash(), [ExtraKey(0, 10, b"a"), ExtraKey(10, 32, b"b")])
    other = hash_prompt(prompt, 16, root_hash(), [ExtraKey(0, 12, b"a"), ExtraKey(12, 32, b"b")])
    assert not set(one) & set(other)


def test_later_blocks_can_be_hashed_by_themselves() -> None:
    root = root_hash()
    whole = hash_prompt(TOKENS, BLOCK_SIZE, root, KEYS)
    parts = hash_prompt(TOKENS[:8], BLOCK_SIZE, root, KEYS)
    parts += hash_prompt(TOKENS[8:], BLOCK_SIZE, parts[-1], KEYS, 8)
    assert parts == whole
