"""Log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from common.observability.logging import LineFormatter, LogFormat, fields, log_format_in_use, setup_logging


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
        r"\[prefill-0\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO some\.module: took 3 blocks\n", stream.getvalue()
    )


def test_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("info", stream=first)
    setup_logging("warning", stream=second)
    logging.getLogger("x").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_record_is_printable_and_one_line(monkeypatch: pytest.MonkeyPatch, log_format: LogFormat) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as below
    stream = io.StringIO()
    setup_logging("info", "decode-0", log_format, stream=stream)
    planted = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA1), 0x2028, 0x202E, 0xD800])) + "[decode-1] forged"
    logging.getLogger("x").info("prompt: %s", planted, extra=fields(request_id=planted))
    line = stream.getvalue().removesuffix("\n")
    assert line.isprintable()
    assert "[decode-1] forged" in line


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_cannot_fake_a_record(log_format: LogFormat) -> None:
    stream = io.StringIO()
    setup_logging("info", "decode-0", log_format, stream=stream)
    try:
        raise ValueError("a\n[decode-1] forged \x1b[31m\r[decode-1] forged")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *others = stream.getvalue().split("\n")
    assert first.isprintable()
    assert all(line.isprintable() and line.startswith("    ") for line in others[:-1])
    assert "forged" in stream.getvalue()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_record_has_a_bounded_length(log_format: LogFormat) -> None:
    stream = io.StringIO()
    setup_logging("info", "decode-0", log_format, stream=stream)
    long = "\n" * 10**6
    try:
        raise ValueError(long)
    except ValueError:
        logging.getLogger("x").exception("failed: %s", long, extra=fields(path=long))
    assert len(stream.getvalue()) < 200_000


def test_times_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
    record.created, record.msecs = 1_800_000_000.25, 250.0
    try:
        assert LineFormatter().format(record) == "2027-01-15T08:00:00.250Z INFO x: hello"
    finally:
        monkeypatch.undo()
        time.tzset()


HOSTILE = 'a"b\n{"level":"error"}\r\x7f\x85\u2028\ud800 \x1b[31m'


def test_a_json_record_is_one_line_with_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not pytest's own handlers: what they keep is sent between processes as UTF-8, which has no lone surrogates.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream = io.StringIO()
    setup_logging("info", "router", "json", stream=stream)
    assert log_format_in_use() == "json"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("failed: %s", HOSTILE, extra=fields(request_id=HOSTILE, total_ms=1.5))
    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    assert line.isprintable()
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert "Traceback" in record.pop("exception")
    assert record == {
        "level": "error",
        "process": "router",
        "logger": "x",
        "message": f"failed: {HOSTILE}",
        "request_id": HOSTILE,
        "total_ms": 1.5,
    }
