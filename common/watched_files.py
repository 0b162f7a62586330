"""Reloads files when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None  # None: not there


class WatchedFiles:
    """Files that belong together. An invalid change is logged once, and the previous version stays in use."""

    def __init__(self, files: Sequence[str], reload: Callable[[], None]) -> None:
        """`reload` raises ConfigError if the files are invalid. It is not called for their present version."""
        self._files = [Path(file) for file in files]
        self._reload = reload
        self._stamps = self._look()

    def check(self, *, force: bool = False) -> None:
        """Reloads if a file has changed since the last check, or if forced."""
        stamps = self._look()
        if stamps == self._stamps and not force:
            return
        self._stamps = stamps
        names = ", ".join(map(str, self._files))
        try:
            self._reload()
        except ConfigError as error:
            logger.error("cannot reload, keeping the previous version: %s", error.message)
        else:
            logger.info("reloaded: %s", names)

    def _look(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
