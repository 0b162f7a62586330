"""Compiles grammars in a process that may be killed, to find out whether they can be compiled at all.

The libraries have no limit of their own on time or memory, and a thread cannot be ended. So a constraint is compiled
here first, under limits that the kernel keeps; what passes is compiled again in the engine's process, as handing over
the result takes longer than making it.

1. The parent starts this module, and writes a `Settings`. The answer is an empty `Verdict` once the vocabulary is read.
2. It writes a `Constraint`, and reads a `Verdict`, one at a time.
3. A process that exceeds a limit is ended by the kernel, or by the parent. The next constraint has another one.
4. End of file on stdin ends the process.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import types
from pathlib import Path
from typing import IO

import msgspec

from common.engine.config import GrammarBackendName
from common.engine.grammar.base import GrammarBackend
from common.engine.grammar.registry import create_backend
from common.engine.grammar.vocabulary import load_vocabulary
from common.errors import InvalidRequestError
from common.types import Constraint

NICENESS = 10  # of what compiles: steps come first
_LENGTH = struct.Struct("!I")
_BAD_ALLOC = "std::bad_alloc"  # as C++ says it
_TOO_LARGE = "it takes too much memory to compile"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process."""

    backend: GrammarBackendName
    directory: str  # of the model's tokenizer
    vocab_size: int
    eos_token_ids: list[int]
    max_whitespace: int  # characters in a row between the tokens of JSON
    cpu_s: float  # that one constraint may take
    max_bytes: int  # that the process may take beyond what it has when it is ready


class Verdict(msgspec.Struct, frozen=True):
    """On one constraint."""

    problem: str = ""  # empty: it can be compiled


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes a message with its length before it."""
    payload = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def frame_length(buffer: bytes) -> int | None:
    """Length of the first frame in `buffer`, its head included. None: not known yet."""
    return _LENGTH.size + _LENGTH.unpack_from(buffer)[0] if len(buffer) >= _LENGTH.size else None


def frame_payload(frame: bytes) -> bytes:
    """The message in a frame."""
    return frame[_LENGTH.size :]


def _read_frame(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def _verdict(backend: GrammarBackend, constraint: Constraint) -> Verdict:
    try:
        backend.compile(constraint)
    except InvalidRequestError as error:
        problem = error.message or "it is invalid"
        return Verdict(_TOO_LARGE if _BAD_ALLOC in problem else problem)
    except MemoryError:
        return Verdict(_TOO_LARGE)
    return Verdict()


def _serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    frame = _read_frame(stdin)
    if frame is None:
        return
    settings = msgspec.msgpack.decode(frame, type=Settings)
    vocabulary = load_vocabulary(Path(settings.directory), settings.vocab_size, frozenset(settings.eos_token_ids))
    backend = create_backend(settings.backend, vocabulary, settings.max_whitespace)
    backend.compile(Constraint.json_object())  # what is loaded lazily is loaded now
    _limit_memory(settings.max_bytes)
    write_frame(stdout, Verdict())
    while (frame := _read_frame(stdin)) is not None:
        constraint = msgspec.msgpack.decode(frame, type=Constraint)
        signal.setitimer(signal.ITIMER_PROF, settings.cpu_s)  # SIGPROF ends the process: CPython does not handle it
        verdict = _verdict(backend, constraint)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(stdout, verdict)


def _limit_memory(max_bytes: int) -> None:
    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return  # not Linux: the parent's limit on time remains
    limit = num_pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Absent(types.ModuleType):
    """Stands for a module of which nothing is used."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing:
    """Stands for a class or a function."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def _leave_out_torch() -> None:
    """Lets xgrammar be imported without torch and transformers, which it needs for applying masks and for reading
    tokenizers, not for compiling: the process starts in a third of a second instead of four, and takes 60 MB instead of
    400."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails, for which tvm_ffi is prepared
    import tvm_ffi  # noqa: F401

    for name in ("torch", "transformers"):
        sys.modules[name] = _Absent(name)


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    os.nice(NICENESS)
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the frames
    _leave_out_torch()
    with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
        _serve(stdin, stdout)


if __name__ == "__main__":
    main()
    os._exit(0)
