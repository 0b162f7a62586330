"""Imports of large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector while packages are imported.

    What modules define stays, and collections go through all of it again and again: a sixth of the time that importing
    transformers takes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
