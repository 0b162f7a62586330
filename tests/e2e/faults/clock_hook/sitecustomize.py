"""Imported by every Python process of a fleet at its start: its wall clock is ahead by what a file says, in seconds.

Monotonic clocks are left alone, as by a real jump. So is gRPC, which makes deadlines of Python's time and compares them
with the kernel's: a real jump moves both.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_FILE = Path(os.environ["BATON_TEST_CLOCK"])
_true_time_ns = time.time_ns


def _time_ns() -> int:
    return _true_time_ns() + int(_FILE.read_text()) * 10**9


def _time() -> float:
    caller = sys._getframe(1).f_globals["__name__"]
    return (_true_time_ns() if caller.partition(".")[0] == "grpc" else _time_ns()) / 1e9


time.time, time.time_ns = _time, _time_ns
