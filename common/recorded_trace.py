"""Recorded requests in the format of Mooncake's traces: JSON lines with lengths, times and shared beginnings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import ConfigError

RECORDED_BLOCK = 512  # tokens of a prompt that one of its hash_ids stands for
MAX_RECORDED_TOKENS = 2**24

Length = Annotated[int, Meta(ge=1, le=MAX_RECORDED_TOKENS)]


class RecordedRequest(msgspec.Struct):
    """A line of a trace; other fields are ignored. Prompts with the same leading hash ids begin with the same text."""

    timestamp: Annotated[float, Meta(ge=0)]  # milliseconds
    input_length: Length
    output_length: Length
    hash_ids: list[int] = []


def read_recorded(path: Path, max_requests: int, *, option: str) -> list[RecordedRequest]:
    """Returns the first `max_requests` requests of a file, in the order of their times.

    `option` names the file in errors. Raises ConfigError, which names the line that is wrong.
    """
    try:
        with path.open("rb") as lines:
            read = _read(lines, path, max_requests, option)
    except OSError as error:
        raise ConfigError(f"--{option}: cannot read {path}: {error.strerror}", param=option) from error
    read.sort(key=lambda request: request.timestamp)
    return read


def _read(lines: Iterable[bytes], path: Path, max_requests: int, option: str) -> list[RecordedRequest]:
    decoder = msgspec.json.Decoder(RecordedRequest)
    read: list[RecordedRequest] = []
    for number, line in enumerate(lines, start=1):
        if len(read) == max_requests:
            break
        if not line.strip():
            continue
        try:
            read.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"--{option}: {path}, line {number}: {problem_of(error)}", param=option) from error
    return read


def problem_of(error: Exception) -> str:
    """Returns what is wrong with a line, for a person."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error).replace("`", "").replace(" - at $.", ": ")
