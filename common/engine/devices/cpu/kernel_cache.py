"""Bounds on the kernel caches of the CPU's libraries.

oneDNN compiles a kernel for each number of rows that each shape of weight is multiplied with: half a megabyte and half
a millisecond. It keeps the last 1024, and so does ideep, which stands between it and torch. As steps have any number
of rows, that is about a gigabyte. A smaller capacity keeps the sizes of decode steps, which come again and again; the
sizes of prompts are nearly all new either way.
"""

from __future__ import annotations

import os

KERNEL_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, of ideep
_CAPACITY = 256  # some 50 sizes of step, as a model has about five shapes of weight


def bound_kernel_caches() -> None:
    """Sets the bounds; must be called before the process runs its first kernel. The environment takes precedence."""
    for name in KERNEL_CACHE_VARIABLES:
        os.environ.setdefault(name, str(_CAPACITY))
