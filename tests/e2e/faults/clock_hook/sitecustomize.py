"""Imported by every Python process of a fleet at its start: SIGUSR1 makes its wall clock jump.

One jump is six hours ahead, the next twelve back, and so on. Monotonic clocks are left alone, as by a real jump.
"""

from __future__ import annotations

import itertools
import signal
import time

_HOUR_S = 3600
_offsets_s = itertools.cycle([6 * _HOUR_S, -6 * _HOUR_S])
_offset_s = 0
_true_time, _true_time_ns = time.time, time.time_ns


def _jump(*_: object) -> None:
    global _offset_s
    _offset_s = next(_offsets_s)


def _time() -> float:
    return _true_time() + _offset_s


def _time_ns() -> int:
    return _true_time_ns() + _offset_s * 10**9


time.time, time.time_ns = _time, _time_ns
signal.signal(signal.SIGUSR1, _jump)
