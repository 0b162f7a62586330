"""The pieces of an incremental detokenizer, joined, are the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.tokenization import Tokenizer
from common.tokenization.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, create_detokenizer
from tests.unit.common.tokenization.tiny_tokenizers import KINDS, byte_level, sentencepiece


def stream(tokenizer, ids, create=create_detokenizer, **kwargs):
    detokenizer = create(tokenizer, **kwargs)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def window(tokenizer, *, context=(), skip_special_tokens=True, spelled_ids=frozenset()):
    return WindowDetokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens, spelled_ids=spelled_ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=80), skips=st.booleans())
def test_any_ids_of_a_byte_level_tokenizer(ids, skips):
    tokenizer = byte_level()
    assert isinstance(create_detokenizer(tokenizer), ByteLevelDetokenizer)
    expected = tokenizer.decode(ids, skip_special_tokens=skips)
    for create in (create_detokenizer, window):
        assert "".join(stream(tokenizer, ids, create, skip_special_tokens=skips)) == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("hello world 日本😀é\u200d\n  "), min_size=1, max_size=20),
    num_left=st.integers(0, 8),
    answer=st.lists(st.integers(0, 330), max_size=20),
)
def test_any_ids_continue_the_prompt(text, num_left, answer):
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    prompt = ids[: max(1, len(ids) - num_left)]
    begun = b"".join(map(tokenizer.token_bytes, prompt)).decode("utf-8", "ignore")
    assert begun + "".join(stream(tokenizer, answer, context=prompt)) == tokenizer.decode(prompt + answer)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("hello world 日本😀é\u200d\n  "), max_size=60),
    kind=st.sampled_from([*KINDS]),
)
@example(text="dddddddd😀\n\n", kind="sentencepiece")  # a window that would be cut within a character
def test_any_text(text, kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    ids[len(ids) // 2 : len(ids) // 2] = [2 if kind == "sentencepiece" else 1]  # a special token changes nothing
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_split_character_is_held_back_until_complete():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("he😀")
    assert stream(tokenizer, ids) == ["he", "", "", "", "😀", ""]


def test_an_incomplete_character_at_the_end_is_flushed():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a"), *(i for i in range(2, 258) if tokenizer.token_bytes(i) == b"\xe4")]
    assert stream(tokenizer, ids) == ["a", "", "\ufffd"]


def test_a_wrong_byte_does_not_disturb_what_is_out():
    tokenizer = sentencepiece()
    ids = [*tokenizer.encode("日本"), 3 + 0xFF, *tokenizer.encode(" he")]
    assert "".join(stream(tokenizer, ids)) == " 日本\ufffd he".lstrip()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("num_left", range(1, 12))
def test_an_answer_completes_the_character_that_the_prompt_began(kind, num_left):
    tokenizer, text = KINDS[kind](), "hello 日本😀é日"
    ids = tokenizer.encode(text)
    prompt, answer = ids[:-num_left], ids[-num_left:]
    begun = b"".join(map(tokenizer.token_bytes, prompt)).decode("utf-8", "ignore").lstrip()
    assert "".join(stream(tokenizer, answer, context=prompt)) == text.removeprefix(begun)


def test_context_keeps_the_space_between_prompt_and_answer():
    tokenizer = sentencepiece()
    prompt, answer = tokenizer.encode("hello"), tokenizer.encode("world")
    assert "".join(stream(tokenizer, answer)) == "world"
    assert "".join(stream(tokenizer, answer, context=prompt)) == " world"


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_stays_short(kind, monkeypatch):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("hello world 日本 " * 20 + "日本é語😀" * 10)
    text = tokenizer.decode(ids)
    longest = 0
    decode = tokenizer.decode

    def counting(ids, **kwargs):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", counting)
    assert "".join(stream(tokenizer, ids, window)) == text
    assert longest <= 12


PARTS_OF_TWO = next(i for i in range(320) if byte_level().token_bytes(i) == b"\x9c\xac\xe8")  # end and start of one
ODD_TOKENS = {
    "parts of two characters": (byte_level, [PARTS_OF_TWO]),
    "no text": (byte_level, [330]),
    "no text, then some": (byte_level, [330, PARTS_OF_TWO, 330]),
    "wrong bytes": (byte_level, [2 + 0xA1 - 1, 2]),
    "wrong bytes, sentencepiece": (sentencepiece, [3 + 0xFF]),
    "bytes of characters, sentencepiece": (sentencepiece, sentencepiece().encode("日")),
}


@pytest.mark.parametrize("name", ODD_TOKENS)
def test_the_work_per_token_does_not_grow(name, monkeypatch):
    kind, repeated = ODD_TOKENS[name]
    tokenizer, num_decoded = kind(), 0
    ids = repeated * (300 // len(repeated))
    expected = tokenizer.decode(ids, skip_special_tokens=False)

    def decode(token_ids, **options):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return Tokenizer.decode(tokenizer, token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", decode)
    assert "".join(stream(tokenizer, ids, window, skip_special_tokens=False)) == expected
    assert num_decoded < 40 * len(ids)
