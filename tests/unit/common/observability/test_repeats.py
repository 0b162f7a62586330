"""Log lines that come in floods, by a clock that the test moves."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from common.observability.logging import setup_logging
from common.observability.repeats import RepeatedLine, RepeatFilter


class Timer:
    """A clock and the calls that are due on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._calls.append((self.now + delay_s, call))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [call for at, call in self._calls if at <= self.now]
        self._calls = [(at, call) for at, call in self._calls if at > self.now]
        for call in due:
            call()


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the logger `flooded` writes."""
    written: list[str] = []

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    logger, writer = logging.getLogger("flooded"), Writer()
    logger.addHandler(writer)
    yield written
    logger.removeHandler(writer)


@pytest.fixture
def line(timer: Timer, lines: list[str]) -> RepeatedLine:
    return RepeatedLine(logging.getLogger("flooded"), logging.WARNING, clock=timer.clock, later=timer.later)


def test_a_flood_is_one_line_per_interval_that_says_how_many(timer: Timer, line: RepeatedLine, lines: list[str]):
    for number in range(1533):
        line.log("bad request from %s: %d", "10.0.0.1", number)
    assert lines == ["bad request from 10.0.0.1: 0"]
    timer.advance(59)
    line.log("bad request from %s: %s", "10.0.0.2", "late")
    assert len(lines) == 1
    timer.advance(1)
    assert lines[1:] == ["bad request from 10.0.0.2: late (the last of 1,533 in 60 s)"]
    for _ in range(3):
        line.log("again")
        timer.advance(20)
    assert lines[2:] == ["again (the last of 3 in 60 s)"]


def test_what_is_rare_is_written_as_it_is(timer: Timer, line: RepeatedLine, lines: list[str]):
    for _ in range(3):
        line.log("rare")
        timer.advance(60)
        timer.advance(60)
    assert lines == ["rare"] * 3
    line.log("first")
    line.log("second")
    timer.advance(60)
    assert lines[3:] == ["first", "second"]


def test_without_an_event_loop_the_sum_comes_with_the_next_line(timer: Timer, lines: list[str]):
    line = RepeatedLine(logging.getLogger("flooded"), logging.WARNING, clock=timer.clock)
    for _ in range(5):
        line.log("flood")
    timer.advance(90)
    line.log("the next")
    assert lines == ["flood", "the next (the last of 5 in 90 s)"]


def test_lines_of_a_foreign_logger_are_summed_up_and_others_are_not(timer: Timer, lines: list[str]):
    logger = logging.getLogger("flooded")
    repeats = RepeatFilter(logger, "accept failed", clock=timer.clock, later=timer.later)
    logger.addFilter(repeats)
    try:
        for number in range(4):
            logger.error("accept failed\nsocket: %d", number, exc_info=OSError("too many files"))
            logger.error("another failure", exc_info=OSError("its traceback matters"))
        timer.advance(60)
    finally:
        logger.removeFilter(repeats)
    assert [text.partition("\n")[0] for text in lines] == [
        "accept failed: too many files",
        *["another failure"] * 4,
        "accept failed: too many files (the last of 3 in 60 s)",
    ]


def test_sockets_that_cannot_be_accepted_are_summed_up():
    stream = io.StringIO()
    setup_logging("info", stream=stream)
    setup_logging("info", stream=stream)
    for _ in range(100):
        logging.getLogger("asyncio").error(
            "socket.accept() out of system resource\nsocket: 6", exc_info=OSError(24, "Too many open files")
        )
    (text,) = stream.getvalue().splitlines()
    assert "ERROR asyncio" in text
    assert text.endswith("socket.accept() out of system resource: [Errno 24] Too many open files")
