"""The output file of a batch, to which answers are appended, and from which a batch goes on.

A line is written with one call and is on disk a second later at most. A process that is killed loses no line; a machine
that fails loses those of its last second, whose requests are sent again. A last line that is not complete is cut off.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.errors import BatonError, ConfigError
from loadgen.batch.lines import ID_PREFIX, BatchAnswer

_OPTION = "--output-file"


class OutputFile:
    """An output file that this process alone writes. Close it."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, and reads which requests it answers. Raises ConfigError."""
        self.path = path
        self.done: set[str] = set()  # ids of its lines
        self.num_good = 0  # of them
        self.num_cut = 0  # bytes of a last line that was not complete
        self._has_new = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{_OPTION}: cannot open {path}: {error.strerror}", param="output_file") from error
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, answer: BatchAnswer) -> None:
        """Writes a line. Raises BatonError if the file system does not take it."""
        line = memoryview(msgspec.json.encode(answer) + b"\n")
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise BatonError(f"cannot write {self.path}: {error.strerror}; the same command continues") from error
        self._has_new = True
        self._note(answer)

    def sync(self) -> None:
        """Returns when all lines are on disk. Raises BatonError."""
        if not self._has_new:
            return
        self._has_new = False
        try:
            os.fsync(self._file)
        except OSError as error:
            raise BatonError(f"cannot write {self.path}: {error.strerror}; the same command continues") from error

    def close(self) -> None:
        """Syncs and closes the file."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def _take(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ConfigError(f"{_OPTION}: {self.path} is not a regular file", param="output_file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{_OPTION}: another process writes {self.path}", param="output_file") from error
        self._read()

    def _read(self) -> None:
        end, line = 0, b"\n"
        for number, line in enumerate(self._lines(), start=1):
            try:
                answer = msgspec.json.decode(line, type=BatchAnswer)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    self.num_cut = len(line)
                    os.ftruncate(self._file, end)
                    return
                raise self._foreign(number) from error
            if not answer.id.startswith(ID_PREFIX):
                raise self._foreign(number)
            self._note(answer)
            end += len(line)
        if not line.endswith(b"\n"):  # complete but for its end
            os.write(self._file, b"\n")

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as lines:
            yield from lines

    def _note(self, answer: BatchAnswer) -> None:
        self.done.add(answer.id)
        self.num_good += answer.is_good

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{_OPTION}: {self.path}, line {number}, is no answer of baton run-batch; name another file",
            param="output_file",
        )
