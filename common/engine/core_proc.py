"""The engine as a process: input thread | busy loop | output thread, over ZeroMQ.

Run as `python -m common.engine.core_proc` by `AsyncMPClient`; `common.engine.launch` has their protocol.

    ipc -> input thread: decode -> queue -> busy loop: step -> queue -> output thread: encode -> ipc

The main thread runs the busy loop, as frameworks expect of a model, and signals arrive there.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from common.engine.executor.registry import EXECUTORS
from common.engine.launch import (
    EXIT_FAILED,
    EXIT_ORPHANED,
    EngineFailed,
    EngineProcReply,
    EngineReady,
    Launch,
    read_launch,
)
from common.engine.loop import EngineLoop
from common.engine.messages import EngineCommand
from common.errors import ConfigError
from common.imports import kept_imports
from common.observability.captured_output import log_stream
from common.observability.logging import setup_logging

logger = logging.getLogger(__name__)

_MAX_QUEUED_REPLIES = 256  # steps that the engine may be ahead of its client
_EMIT_TIMEOUT_S = 60.0  # after which a client that does not read counts as gone
_CLOSE_TIMEOUT_S = 2.0  # for sending the last replies


class OutputThread:
    """Encodes and sends replies on its own thread. Bounded: a client that does not read blocks the engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str) -> None:
        self._context = context
        self._path = path
        self._replies: queue.Queue[EngineProcReply | None] = queue.Queue(_MAX_QUEUED_REPLIES)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)
        self._thread.start()

    def emit(self, reply: EngineProcReply) -> None:
        """Queues a reply. Raises queue.Full if the client does not read for too long, or the error that ended the
        thread."""
        if self._error is not None:
            raise self._error
        self._replies.put(reply, timeout=_EMIT_TIMEOUT_S)

    def close(self) -> None:
        """Sends what is queued, then ends. Drops it if the client does not read."""
        try:
            self._replies.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            logger.error("the client does not read; dropping its last replies")
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._context.term()  # waits for the lingering replies

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = int(_CLOSE_TIMEOUT_S * 1000)
            socket.connect(self._path)
            while (reply := self._replies.get()) is not None:
                try:
                    socket.send(encoder.encode(reply), copy=False)  # pyzmq still copies what is small
                except (zmq.ZMQError, TypeError, ValueError, OverflowError) as error:
                    self._error = error
                    return


class InputThread:
    """Receives and decodes commands on its own thread, which ends when the context is terminated."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str, loop: EngineLoop) -> None:
        self._loop = loop
        self._socket = context.socket(zmq.PULL)
        try:
            self._socket.bind(path)
        except zmq.ZMQError:
            self._socket.close()
            raise
        threading.Thread(target=self._run, name="engine-input", daemon=True).start()

    def _run(self) -> None:
        decoder: msgspec.msgpack.Decoder[EngineCommand] = msgspec.msgpack.Decoder(EngineCommand)
        with self._socket:
            try:
                while True:
                    self._loop.put(decoder.decode(self._socket.recv()))
            except zmq.ContextTerminated:
                return
            except (zmq.ZMQError, msgspec.MsgspecError) as error:
                self._loop.fail(error)


class EngineCoreProc:
    """One engine for one client in another process."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output = OutputThread(self._context, launch.replies_path)

    def run(self) -> int:
        """Serves until SIGTERM or a failure. Returns the exit code."""
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._output.close)
            try:
                loop = self._start()
                cleanup.callback(loop.close)
                loop.run()
            except Exception as error:  # noqa: BLE001  whatever it is ends the engine, and the client must hear of it
                self._report(error)
                return EXIT_FAILED
        return 0

    def _start(self) -> EngineLoop:
        with self._without_compiler():
            with kept_imports():  # torch and transformers
                factory = EXECUTORS.find(self._launch.config.parallel.executor_name)
            executor = factory(self._launch.config)
            loop = EngineLoop(self._launch.config, executor, self._output.emit)
        try:
            InputThread(self._context, self._launch.commands_path, loop)  # bound before EngineReady is sent
            _stop_on_sigterm(loop)
            gc.collect()
            gc.freeze()  # the model lives as long as the process: no collection in a step need look at it
            self._output.emit(EngineReady(loop.spec))
        except BaseException:
            loop.close()
            raise
        return loop

    def _without_compiler(self) -> contextlib.AbstractContextManager[None]:
        executor = self._launch.config.parallel.executor_name
        if executor in ("multiproc", "ray") or executor.startswith(
            "fake"
        ):  # which need neither torch nor transformers here
            return contextlib.nullcontext()
        from common.engine.model.without_compiler import without_compiler

        return without_compiler()

    def _report(self, error: Exception) -> None:
        """Reports the error to the client first, as releasing resources may take time."""
        if not isinstance(error, ConfigError):  # which the client prints
            logger.critical("the engine died", exc_info=error)
        try:
            self._output.emit(EngineFailed.of(error))
        except (queue.Full, zmq.ZMQError) as failure:
            logger.error("cannot notify the client: %r", failure)


def _stop_on_sigterm(loop: EngineLoop) -> None:
    """Turns SIGTERM into a stop; until now, it killed the process, which had no state yet.

    A Python signal handler would not do: it runs on the main thread between two bytecodes, and a signal that arrives
    as that thread begins to wait for commands is noticed only when it has stopped waiting.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait_for_signal() -> None:
        os.read(reader, 1)  # SIGTERM is the only signal that Python handles here
        loop.stop()

    threading.Thread(target=wait_for_signal, name="engine-sigterm", daemon=True).start()
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)


def _exit_with_parent(directories: list[Path]) -> None:
    """Blocks until stdin ends because the parent is gone, and exits: no process uses this one any more."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def main() -> int:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    # Two lines for each window of a profile, otherwise. Read when torch is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        launch = read_launch(stdin)
    setup_logging(launch.log_level, launch.name, launch.log_format, stream=log_stream(launch.log_descriptor))
    directories = [Path(launch.replies_path.removeprefix("ipc://")).parent]
    if (member := launch.config.data_parallel) is not None:
        directories.append(Path(member.rendezvous).parent)
    threading.Thread(target=_exit_with_parent, args=(directories,), name="parent-watch", daemon=True).start()
    return EngineCoreProc(launch).run()


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Everything is closed. Taking an interpreter down that has loaded torch costs seconds of collecting garbage.
    os._exit(exit_code)
