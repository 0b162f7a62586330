"""A block's hash names its content: whatever decides the KV of its tokens."""

from __future__ import annotations

import pytest

from common.types import BlockHash, ExtraKey, PromptPositions, hash_partial_block, hash_prompt, root_hash

TOKENS = list(range(40))
KEYS = [ExtraKey(3, 9, b"one"), ExtraKey(9, 14, b"other")]
BLOCK_SIZE = 8


def hashes(tokens: list[int] = TOKENS, keys: list[ExtraKey] = KEYS, salt: str = "salt") -> list[BlockHash]:
    root = root_hash(salt)
    full = hash_prompt(tokens, BLOCK_SIZE, root, keys)
    return [*full, hash_partial_block(tokens[:-1], BLOCK_SIZE, full[:-1], root, keys)]


@pytest.mark.parametrize(
    "changed",
    [
        {"salt": "other"},
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


# After three tokens of text an image of 12.
IMAGE = [[0, 1, 2, *[3] * 12, *range(7, 32)], [0, 1, 2, *[3, 4, 5] * 4, *range(7, 32)]]


def positioned(values: list[list[int]], tokens: list[int] = TOKENS) -> list[BlockHash]:
    root, positions = root_hash(), PromptPositions.of(values)
    full = hash_prompt(tokens, BLOCK_SIZE, root, positions=positions)
    return [*full, hash_partial_block(tokens[:-1], BLOCK_SIZE, full[:-1], root, positions=positions)]


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("token", [8, 15])
def test_another_position_changes_the_block_and_all_after_it(dimension: int, token: int) -> None:
    values = [list(each) for each in IMAGE]
    values[dimension][token] += 1
    first, *others = positioned(values)
    assert first == positioned(IMAGE)[0]
    assert not set(others) & set(positioned(IMAGE))


def test_positions_are_told_from_places_only_where_they_differ() -> None:
    places = list(range(40))
    plain = hash_prompt(TOKENS, BLOCK_SIZE, root_hash())
    assert positioned([places, places])[:-1] == plain
    later = [*range(20), *range(30, 50)]
    assert positioned([later, later])[:2] == plain[:2]
    assert not set(positioned([later, later])[2:]) & set(plain)


def test_what_was_generated_has_the_blocks_of_a_prompt_with_those_positions() -> None:
    """So the next turn of a chat finds them."""
    root, positions = root_hash(), PromptPositions.of(IMAGE)
    first_turn = PromptPositions.of([each[:21] for each in IMAGE])
    assert first_turn.of_tokens(0, 40) == IMAGE
    assert hash_prompt(TOKENS, BLOCK_SIZE, root, positions=first_turn) == hash_prompt(
        TOKENS, BLOCK_SIZE, root, positions=positions
    )


def test_later_blocks_with_positions_can_be_hashed_by_themselves() -> None:
    root, positions = root_hash(), PromptPositions.of(IMAGE)
    whole = hash_prompt(TOKENS, BLOCK_SIZE, root, KEYS, 0, positions)
    parts = hash_prompt(TOKENS[:16], BLOCK_SIZE, root, KEYS, 0, positions)
    parts += hash_prompt(TOKENS[16:], BLOCK_SIZE, parts[-1], KEYS, 16, positions)
    assert parts == whole
