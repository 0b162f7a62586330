"""Imports of large packages in processes of our own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept_imports() -> Iterator[None]:
    """Exempts what is imported within from garbage collection, and collects nothing meanwhile.

    What modules define lives as long as the process. Collections that go through all of it again and again, during
    imports and after them, take a fifth of the processor time in which an engine starts.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
