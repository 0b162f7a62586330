"""The protocol between a parent and its engine process beside commands and replies, and the framing of both.

1. The parent starts `python -m common.engine.core_proc` and writes a length-prefixed `Launch` to its stdin, which it
   then keeps open: end of file there means that the parent is gone, and the child exits at once.
2. The child answers on the reply socket with `EngineReady`, or with `EngineFailed` and exit code `EXIT_FAILED`.
3. While it serves, commands and replies travel as msgpack over two ZeroMQ push/pull pairs on `ipc://` paths in a
   directory that only this user can enter.
4. SIGTERM ends the child after the step in flight. An engine that dies sends `EngineFailed` if it still can.
"""

from __future__ import annotations

import logging
import struct
from typing import BinaryIO

import msgspec

from common.engine.config import EngineConfig
from common.engine.messages import CallResult, EngineCoreOutputs, EngineSpec
from common.errors import BatonError, ConfigError, EngineDeadError, ModelLoadError
from common.observability.logging import LogFormat

EXIT_FAILED = 70  # an EngineFailed was sent
EXIT_ORPHANED = 71  # the parent is gone

_LENGTH = struct.Struct("!I")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine process."""

    config: EngineConfig
    commands_path: str  # the child binds here and pulls EngineCommands
    replies_path: str  # the parent binds here and pulls EngineProcReplies
    name: str = ""  # of the pod; starts each log line
    log_level: int = logging.INFO
    log_format: LogFormat = "console"
    log_descriptor: int = 2  # inherited; what goes to descriptors 1 and 2 is the parent's to log


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and commands are taken."""

    spec: EngineSpec


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or died. `kind` is the name of the error's class."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> EngineFailed:
        """Describes `error` for the other side."""
        if isinstance(error, BatonError):
            return cls(type(error).__name__, error.message, error.param)
        return cls(type(error).__name__, f"{type(error).__name__}: {error}")

    def to_error(self) -> BatonError:
        """Restores a ConfigError or ModelLoadError; returns EngineDeadError for everything else."""
        kinds: dict[str, type[BatonError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}
        return kinds.get(self.kind, EngineDeadError)(self.message, param=self.param)


EngineProcReply = EngineCoreOutputs | CallResult | EngineReady | EngineFailed


def frame_launch(launch: Launch) -> bytes:
    """The bytes to write to the child's stdin."""
    payload = msgspec.msgpack.encode(launch)
    return _LENGTH.pack(len(payload)) + payload


def read_launch(stream: BinaryIO) -> Launch:
    """Reads a framed Launch from an unbuffered stream. Raises EOFError if it ends before."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(stream, length), type=Launch)


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = stream.read(length - len(parts))
        if not part:
            raise EOFError(f"the stream ended after {len(parts)} of {length} bytes")
        parts += part
    return bytes(parts)
