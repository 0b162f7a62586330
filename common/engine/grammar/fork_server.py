"""The process from which the processes of grammars are forked.

The libraries that constrain output bound neither the time nor the memory that a grammar takes, when it is compiled
and with each token later, and a thread cannot be ended. So each grammar lives in a process of its own, under limits
that the kernel keeps (`common.engine.grammar.serving`). This one reads the vocabulary and loads the libraries, once, so
that another grammar costs a fork. Its messages are in `common.engine.grammar.protocol`; end of file on stdin, a socket,
ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.engine.grammar.base import GrammarBackend, Vocabulary
from common.engine.grammar.protocol import Ended, Fork, Forked, Frames, Reap, Settings, Started, ToServer, frame
from common.engine.grammar.registry import create_backend
from common.engine.grammar.serving import serve
from common.engine.grammar.vocabulary import load_vocabulary
from common.errors import InvalidRequestError
from common.types import Constraint

_CHUNK = 65536
_FRAME = 2**20  # more than the settings take
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


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


def _create_backend(settings: Settings, vocabulary: Vocabulary) -> GrammarBackend:
    backend = create_backend(settings.backend, vocabulary, settings.max_whitespace)
    for constraint in (Constraint.json_object(), Constraint.json_schema({"type": "string", "minLength": 1})):
        backend.compile(constraint)  # loads what is loaded lazily, of both libraries
    return backend


class ForkServer:
    """Answers the engine."""

    def __init__(self, engine: socket.socket) -> None:
        self._engine = engine
        self._frames: Frames[ToServer] = Frames(ToServer)

    def run(self) -> None:
        """Serves until the engine closes the socket."""
        [settings] = Frames[Settings](Settings).feed(self._engine.recv(_FRAME))
        eos_token_ids = frozenset(settings.eos_token_ids)
        try:
            vocabulary = load_vocabulary(Path(settings.directory), settings.vocab_size, eos_token_ids)
        except InvalidRequestError as error:
            self._engine.sendall(frame(Started(error.message)))
            return
        backend = _create_backend(settings, vocabulary)
        gc.collect()
        gc.freeze()  # pages that the collector does not touch stay shared with the processes to be
        self._engine.sendall(frame(Started()))
        run = partial(serve, backend=backend, vocabulary=vocabulary, settings=settings)
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._engine, _CHUNK, 1)
            if not data:
                return
            for message in self._frames.feed(data):
                match message:
                    case Fork():
                        self._engine.sendall(frame(self._fork(descriptors[0], run)))
                    case Reap(pid):
                        _, status = os.waitpid(pid, 0)
                        self._engine.sendall(frame(Ended(os.waitstatus_to_exitcode(status))))

    def _fork(self, descriptor: int, run: Callable[[socket.socket], None]) -> Forked:
        try:
            pid = os.fork()
        except OSError as error:  # too little memory, or too many processes
            os.close(descriptor)
            return Forked(0, str(error))
        if pid:
            os.close(descriptor)
            return Forked(pid)
        code = 1
        try:
            _die_with_parent()
            self._engine.close()
            os.close(0)
            with socket.socket(fileno=descriptor) as peer, contextlib.suppress(ConnectionError):  # the engine left
                run(peer)
            code = 0
        except Exception:  # noqa: BLE001  ends this process, which the engine notices
            traceback.print_exc()
        finally:
            os._exit(code)


def _die_with_parent() -> None:
    """Has the kernel end this process when its parent ends, where it can: one that computes, or that is stopped, does
    not notice that a socket is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Entry point of the process."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when to stop
    _leave_out_torch()
    with socket.socket(fileno=os.dup(0)) as engine, contextlib.suppress(ConnectionError):  # the engine is gone
        ForkServer(engine).run()


if __name__ == "__main__":
    main()
    os._exit(0)
