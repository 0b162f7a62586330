"""Stop strings are found as on the whole text, wherever the pieces are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tokenization import stop
from common.tokenization.stop import StopChecker
from tests.work import LineCounter


def whole(text, stops):
    """Reference: the text before the stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def pieces_of(text, cuts):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=0, max_size=3),
    cuts=st.lists(st.integers(0, 20)),
)
def test_equals_find_on_the_whole_text(text, stops, cuts):
    checker = StopChecker(stops)
    out, stopped = "", False
    for piece in pieces_of(text, cuts):
        result = checker.push(piece)
        out += result.text
        if stopped := result.stopped:
            break
    else:
        out += checker.finish()
    assert (out, stopped) == whole(text, stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=12), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_beginning_is_held_back(text, stops):
    checker = StopChecker(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        result = checker.push(char)
        if result.stopped:
            return
        out += result.text
        held = text[len(out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


def test_a_long_beginning_is_not_searched_again_with_each_piece():
    """The text ends with 1023 characters of the first stop string, and each of the others fails within them."""
    stops = ["a" * 1023 + "b", *("a" * length + "b" + "a" * 1000 for length in range(100, 115))]
    checker = StopChecker(stops)
    assert checker.push("a" * 1023).text == ""
    with LineCounter(stop) as work:
        assert [checker.push("a").text for _ in range(100)] == ["a"] * 100
    assert work.num_lines < 20 * 100 * len(stops)
