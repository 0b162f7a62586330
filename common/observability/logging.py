"""Plain log lines on stderr: "[prefill-0] 2026-01-31 12:00:00.123 INFO prefill_service.servicer: ready"."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal, TextIO

from common.observability.repeats import RepeatFilter

LogLevel = Literal["debug", "info", "warning", "error"]

_CHATTY = ("asyncio", "httpcore", "httpx", "filelock", "huggingface_hub", "urllib3")  # INFO lines at level debug only
_NO_DESCRIPTORS = "socket.accept() out of system resource"  # logged by asyncio, up to thousands of times a second


class LineFormatter(logging.Formatter):
    """One line per record, tracebacks indented below it; starts with the name of the pod in brackets if it has one."""

    default_msec_format = "%s.%03d"

    def __init__(self, pod_id: str = "") -> None:
        prefix = f"[{pod_id}] ".replace("%", "%%") if pod_id else ""
        super().__init__(f"{prefix}%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; a line break in it cannot fake another record."""
        return super().format(record).rstrip("\n").replace("\n", "\n    ")


def setup_logging(level: LogLevel | int = "info", pod_id: str = "", *, stream: TextIO | None = None) -> None:
    """Sends the process's logs to `stream` (stderr), each line with `pod_id`. A later call replaces an earlier one.

    `level` is a name, or a number of the `logging` module.
    """
    threshold = level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]
    output = logging.StreamHandler(stream if stream is not None else sys.stderr)
    output.setFormatter(LineFormatter(pod_id))
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


def _sum_up(logger: logging.Logger, start: str) -> None:
    for old in logger.filters[:]:
        if isinstance(old, RepeatFilter):
            logger.removeFilter(old)
    logger.addFilter(RepeatFilter(logger, start))
