"""What error messages repeat."""

from __future__ import annotations

import pytest

from common.errors import (
    MAX_MESSAGE_CHARS,
    MAX_QUOTED_CHARS,
    ConfigError,
    InvalidRequestError,
    quoted,
    shortened,
)


@pytest.mark.parametrize(("value", "shown"), [("a'b\n", '"a\'b\\n"'), (7, "7"), (None, "None")])
def test_a_value_is_quoted_as_it_is_written(value: object, shown: str) -> None:
    assert quoted(value) == shown


@pytest.mark.parametrize("value", ["x" * 1_000_000, int("9" * 1000), ["\n"] * 1000])
def test_of_a_long_value_little_is_quoted(value: object) -> None:
    shown = quoted(value)
    assert len(shown) == MAX_QUOTED_CHARS
    assert "..." in shown


def test_a_shortened_text_keeps_its_end() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    text = shortened("begin" + "x" * 1000 + "end", 50)
    assert len(text) == 50
    assert text.startswith("beginxx")
    assert text.endswith("xxend")


def test_the_message_of_an_error_is_short_and_that_of_a_wrong_setting_is_whole() -> None:
    error = InvalidRequestError("x" * 10_000, param="y" * 10_000)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARS
    assert error.param is not None
    assert len(error.param) == MAX_QUOTED_CHARS
    assert len(ConfigError("known: " + "x" * 10_000).message) == 10_007
