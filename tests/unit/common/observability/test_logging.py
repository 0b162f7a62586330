"""Log lines."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from common.observability.logging import LineFormatter, setup_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, LineFormatter):
            root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_lines_carry_pod_level_and_origin() -> None:
    stream = io.StringIO()
    setup_logging("info", "prefill-0", stream=stream)
    logging.getLogger("some.module").info("took %d blocks", 3)
    logging.getLogger("some.module").debug("not shown")
    logging.getLogger("httpx").info("not shown either")
    assert re.fullmatch(
        r"\[prefill-0\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO some\.module: took 3 blocks\n", stream.getvalue()
    )


def test_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("info", stream=first)
    setup_logging("warning", stream=second)
    logging.getLogger("x").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_line_break_cannot_fake_a_record() -> None:
    stream = io.StringIO()
    setup_logging("info", "decode-0", stream=stream)
    logging.getLogger("x").info("prompt: %s", "a\n[decode-1] forged")
    assert "\n    [decode-1] forged" in stream.getvalue()
