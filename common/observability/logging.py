"""Log lines on stderr, for people or for programs. Times are UTC.

    [prefill-0] 2026-01-31T12:00:00.123Z INFO prefill_service.servicer: ready
    {"time":"2026-01-31T12:00:00.123Z","level":"info","process":"prefill-0","logger":"...","message":"ready"}

Each record is one line of printable characters, others are escaped; the lines of a traceback are indented below it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

from common.errors import shortened
from common.observability.repeats import RepeatFilter

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

_CHATTY = ("asyncio", "httpcore", "httpx", "filelock", "huggingface_hub", "urllib3")  # INFO lines at level debug only
_NO_DESCRIPTORS = "socket.accept() out of system resource"  # logged by asyncio, up to thousands of times a second
_FIELDS = "baton_fields"  # attribute of a record
_MAX_CHARS = 4000  # of a line or a field, which may quote clients and peers
_MAX_TRACEBACK_CHARS = 20_000


def fields(**values: object) -> dict[str, Any]:
    """Returns the fields of a record beside its message, as `extra` of a logger's methods: members of its JSON object.
    A `message` replaces its own there."""
    return {_FIELDS: values}


class LineFormatter(logging.Formatter):
    """One line per record, tracebacks indented below it; starts with the name of the pod in brackets if it has one.
    Nothing in it can pass for another record, or for a command to a terminal."""

    def __init__(self, pod_id: str = "") -> None:
        prefix = f"[{pod_id}] ".replace("%", "%%") if pod_id else ""
        super().__init__(f"{prefix}%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._second = (-1, "")  # the last one, and its text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  (logging's name)
        """The record's time in UTC."""
        seconds = int(record.created)
        if seconds != self._second[0]:
            self._second = seconds, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        return f"{self._second[1]}.{int(record.msecs):03d}Z"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """The record's line."""
        return _escaped(shortened(super().formatMessage(record), _MAX_CHARS))

    def formatException(self, ei: Any) -> str:  # noqa: N802  (logging's name)
        """The traceback, which may quote a client."""
        return shortened(super().formatException(ei), _MAX_TRACEBACK_CHARS)

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        line, *traceback = super().format(record).rstrip().split("\n")
        return "\n    ".join([line, *map(_escaped, traceback)])


class JsonFormatter(LineFormatter):
    """One JSON object per record, with the members that `fields` gave it."""

    def __init__(self, pod_id: str = "") -> None:
        super().__init__(pod_id)
        self._pod_id = pod_id

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON in ASCII, which has no line break."""
        members: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._pod_id,
            "logger": record.name,
        }
        given: dict[str, object] = getattr(record, _FIELDS, {})
        if "message" not in given:
            members["message"] = shortened(record.getMessage(), _MAX_CHARS)
        for name, value in given.items():
            members[name] = shortened(value, _MAX_CHARS) if isinstance(value, str) else value
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")


def setup_logging(
    level: LogLevel | int = "info", pod_id: str = "", log_format: LogFormat = "console", *, stream: TextIO | None = None
) -> None:
    """Sends the process's logs to `stream` (stderr), each line with `pod_id`. A later call replaces an earlier one.

    `level` is a name, or a number of the `logging` module.
    """
    threshold = level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]
    output = logging.StreamHandler(stream if stream is not None else sys.stderr)
    output.setFormatter(LineFormatter(pod_id) if log_format == "console" else JsonFormatter(pod_id))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, LineFormatter):
            root.removeHandler(old)
    root.addHandler(output)
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(threshold if threshold <= logging.DEBUG else logging.WARNING)
    _sum_up(logging.getLogger("asyncio"), _NO_DESCRIPTORS)
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)  # its DEBUG is a line per loop turn
    logging.captureWarnings(capture=True)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no format has them


def log_format_in_use() -> LogFormat:
    """The format of this process's log, for processes that it starts."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return "json" if any(isinstance(each, JsonFormatter) for each in formatters) else "console"


def log_descriptor_in_use() -> int:
    """The descriptor of this process's log, for processes that it starts."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter) and isinstance(handler, logging.StreamHandler):
            with contextlib.suppress(OSError, ValueError):  # a stream without one
                descriptor: int = handler.stream.fileno()
                return descriptor
    return 2


def _escaped(text: str) -> str:
    """Everything that is not printable, line breaks among it, as escape sequences."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _sum_up(logger: logging.Logger, start: str) -> None:
    for old in logger.filters[:]:
        if isinstance(old, RepeatFilter):
            logger.removeFilter(old)
    logger.addFilter(RepeatFilter(logger, start))
