"""Weights in huge pages: with pages of 4 KB, reading 400 MB of them takes 8 % longer."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

_HUGE = 2 << 20
_COLLAPSE = 25  # advice of Linux 6.1 and later: now, whatever the system does by itself


def use_huge_pages(address: int, num_bytes: int) -> int:
    """Moves memory that is in use to huge pages, as far as it fills whole ones and the system has them; returns how
    many bytes. The content stays."""
    first, end = -(-address // _HUGE) * _HUGE, (address + num_bytes) // _HUGE * _HUGE
    if sys.platform != "linux" or mmap.PAGESIZE >= _HUGE or first >= end:
        return 0
    return end - first if _madvise()(first, end - first, _COLLAPSE) == 0 else 0


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
