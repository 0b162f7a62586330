"""Reads files anew when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None  # None: not there


class WatchedFiles:
    """Files that belong together. A change that cannot be used is logged once, and what was before stays in force."""

    def __init__(self, files: Sequence[str], reload: Callable[[], None]) -> None:
        """`reload` raises ConfigError if it cannot use the files as they are. They have just been read."""
        self._files = [Path(file) for file in files]
        self._reload = reload
        self._stamps = self._look()

    def check(self, *, force: bool = False) -> None:
        """Reload if a file has changed since the last look, or in any case."""
        stamps = self._look()
        if stamps == self._stamps and not force:
            return
        self._stamps = stamps
        names = ", ".join(map(str, self._files))
        try:
            self._reload()
        except ConfigError as error:
            logger.error("what was read before stays in force: %s", error.message)
        else:
            logger.info("read anew: %s", names)

    def _look(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
