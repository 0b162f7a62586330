"""From tokens to text: however the tokens are cut into pieces, and whatever ends the answer."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tokenization import OutputProcessor, Tokenizer
from common.types import FinishReason
from tests.unit.common.tokenization.tiny_tokenizers import byte_level, sentencepiece

ANSWER = "hello there STOP naïve 😀 STOP Paris"


def spell(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], reason: FinishReason = FinishReason.LENGTH, **options
) -> tuple[str, list[int], bool]:
    """Text, offsets and whether a stop string ended it, of tokens that come in pieces."""
    processor = OutputProcessor(tokenizer, **options)
    bounds = sorted({0, *(cut for cut in cuts if 0 < cut < len(token_ids)), len(token_ids)})
    text, offsets = "", []
    for start, stop in itertools.pairwise(bounds):
        piece = processor.push(token_ids[start:stop], reason if stop == len(token_ids) else None)
        text += piece.text
        offsets += piece.offsets
        if piece.is_stopped:
            return text, offsets, True
    return text, offsets, False


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40)),
    st.lists(st.sampled_from(["STOP", "ve 😀 S", "there", "nowhere"]), max_size=2),
    st.integers(0, 20),
    st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_pieces_change_nothing(cuts: list[int], stops: list[str], min_tokens: int, reason: FinishReason) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        token_ids = tokenizer.encode(ANSWER, add_special_tokens=False)
        options = {"stops": stops, "min_tokens": min_tokens}
        whole = spell(tokenizer, token_ids, [], reason, **options)
        assert spell(tokenizer, token_ids, cuts, reason, **options) == whole
        assert spell(tokenizer, token_ids, list(range(len(token_ids))), reason, **options) == whole


def test_a_stop_string_ends_the_text_before_it() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(ANSWER)
    text, offsets, is_stopped = spell(tokenizer, token_ids, [], stops=["STOP"])
    assert (text, is_stopped) == ("hello there ", True)
    assert tokenizer.decode(token_ids[: len(offsets)]).endswith("STOP"), "the tokens up to its end count"


def test_a_stop_string_may_be_part_of_the_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(ANSWER)
    whole, _, _ = spell(tokenizer, token_ids, [], stops=["STOP"], include_stop=True)
    assert whole == "hello there STOP"
    assert spell(tokenizer, token_ids, list(range(99)), stops=["STOP"], include_stop=True)[0] == whole
    last, _, _ = spell(tokenizer, token_ids[:2], [], FinishReason.STOP, include_stop=True)
    assert last == tokenizer.decode(token_ids[:2])


def test_special_tokens_in_a_row_may_be_joined() -> None:
    """As by vLLM: the first keeps what the tokenizer puts before it."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend)  # whose decoder puts spaces between tokens
    token_ids = [0, 2, 3, 1, 2]
    shown = {"skip_special_tokens": False}
    assert spell(tokenizer, token_ids, [], **shown)[0] == "a <x> <y> b <x>"
    assert spell(tokenizer, token_ids, [], **shown, spaces_between_special_tokens=False)[0] == "a <x><y> b <x>"


@pytest.mark.parametrize("more", [0, 1])
def test_a_stop_string_within_the_least_tokens_does_not_count(more: int) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(ANSWER)
    num_tokens = len(spell(tokenizer, token_ids, [], stops=["STOP"])[1])  # up to the first one's end
    text, _, _ = spell(tokenizer, token_ids, [3], stops=["STOP"], min_tokens=num_tokens - 1 + more)
    second = ANSWER[: ANSWER.rindex("STOP")]
    assert text == second, "one that began within them does not count either"


def test_the_token_that_ends_the_answer_is_not_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("hello world")
    end = tokenizer.encode("Paris")[0]
    text, offsets, _ = spell(tokenizer, [*token_ids, end], [], FinishReason.STOP)
    assert text == "hello world"
    assert len(offsets) == len(token_ids) + 1, "but it counts"
    assert spell(tokenizer, [*token_ids, end], [], FinishReason.LENGTH)[0].startswith("hello worldP")


def test_hidden_text_is_found_by_stop_strings_all_the_same() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("hello there STOP")
    processor = OutputProcessor(tokenizer, stops=["lo there ST"])
    piece = processor.push(token_ids, FinishReason.LENGTH, num_hidden=2)
    assert piece.is_stopped
    assert "hel".endswith(piece.text) or piece.text == ""


def test_offsets_count_the_characters_of_the_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("hello world")
    text, offsets, _ = spell(tokenizer, token_ids, [])
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    assert [text[offset : offset + len(piece)] for offset, piece in zip(offsets, pieces, strict=True)] == pieces


def test_an_answer_that_continues_a_text_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    answer = tokenizer.encode("hello world", add_special_tokens=False)[len(prompt) :]
    assert spell(tokenizer, answer, [], continued=prompt)[0] == " world"
    assert spell(tokenizer, answer, [])[0] == "world"
