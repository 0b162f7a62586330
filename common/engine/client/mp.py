"""The engine in a process of its own: what pods use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence

import msgspec
import zmq

from common.engine.client.async_base import AsyncClientBase
from common.engine.config import MAX_SOCKET_PATH, EngineConfig
from common.engine.launch import (
    EXIT_FAILED,
    EngineProcReply,
    EngineReady,
    Launch,
    frame_launch,
)
from common.engine.messages import EngineCommand
from common.errors import ConfigError, EngineDeadError
from common.observability.logging import log_descriptor_in_use, log_format_in_use

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # loading a large model from a slow disk
_STOP_TIMEOUT_S = 5.0  # for the step in flight and the connector; then the process is killed
_LAST_REPLY_TIMEOUT_S = 2.0  # from a process's end to the arrival of its last reply
_MAX_BACKLOG = 256  # items that the consumer of outputs may be behind before the engine waits


class AsyncMPClient(AsyncClientBase):
    """EngineClient of an `EngineCoreProc`. The process ends with this one, however that ends.

    Sending a command never fails or waits: the requests that the pod admits bound the queue. Replies are bounded: while
    the consumer of `outputs` does not read, the engine waits.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "",
        start_timeout_s: float = _START_TIMEOUT_S,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        """`name` of the pod marks process and log lines. Takes ownership of `sockets`, which the process inherits."""
        super().__init__(start_timeout_s=start_timeout_s)
        self._sockets = sockets
        self._config = config
        self._name = name
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineProcReply] = msgspec.msgpack.Decoder(EngineProcReply)
        self._resources = contextlib.ExitStack()  # directory and sockets
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._held_up = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it was started."""
        return None if self._process is None else self._process.pid

    # -- start ------------------------------------------------------------------------------------------------------

    async def _start_engine(self) -> None:
        directory = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="baton-"))  # mode 0700
        self._directory = directory
        launch = Launch(
            config=self._config,
            commands_path=f"ipc://{directory}/commands",
            replies_path=f"ipc://{directory}/replies",
            name=self._name,
            log_level=logging.getLogger().getEffectiveLevel(),
            log_format=log_format_in_use(),
            log_descriptor=log_descriptor_in_use(),
        )
        if len(launch.commands_path.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH:
            raise ConfigError(f"TMPDIR: {directory} is too long for a socket path", param="TMPDIR")
        self._open_sockets(launch)
        arguments = [self._name] if self._name else []  # for the process list
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "common.engine.core_proc", *arguments),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(launch.log_descriptor, *(each.fileno() for each in self._sockets)),
            env=self._environment(),
            start_new_session=True,  # so that the terminal's Ctrl-C goes to this process only
        )
        self._close_inherited()
        assert self._process.stdin is not None
        self._process.stdin.write(frame_launch(launch))  # and stays open: end of file means that the parent is gone
        self._watcher = asyncio.create_task(self._watch(self._process), name="engine-watch")

    def _close_inherited(self) -> None:
        for each in self._sockets:
            each.close()

    def _environment(self) -> dict[str, str] | None:
        """Engines share the cores, unless that is set. None: this process's own."""
        parallel = self._config.parallel
        if parallel.data_parallel_size == 1:
            return None
        num_threads = max(1, len(os.sched_getaffinity(0)) // parallel.world_size)
        return {"OMP_NUM_THREADS": str(num_threads), **os.environ}

    def _open_sockets(self, launch: Launch) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = self._resources.enter_context(zmq.Context())
        self._commands = self._resources.enter_context(context.socket(zmq.PUSH))
        self._commands.sndhwm = 0  # see the class
        self._commands.linger = 0
        self._commands_path = launch.commands_path
        self._replies = self._resources.enter_context(context.socket(zmq.PULL))
        self._replies.bind(launch.replies_path)
        self._resources.callback(self._pause_reading)
        self._resume_reading()

    # -- while it lives ---------------------------------------------------------------------------------------------

    def _send(self, command: EngineCommand) -> None:
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK, copy=False)

    def _resume_reading(self) -> None:
        self._held_up = False
        asyncio.get_running_loop().add_reader(self._replies.fileno(), self._read_replies)
        self._read_replies()

    def _pause_reading(self) -> None:
        self._held_up = True
        asyncio.get_running_loop().remove_reader(self._replies.fileno())

    def _read_replies(self) -> None:
        """Takes what has arrived. The descriptor signals changes only, so this reads until nothing is left."""
        try:
            while len(self._outputs) < _MAX_BACKLOG:
                self._take_reply(self._decoder.decode(self._replies.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            self._die(EngineDeadError(f"invalid message from the engine: {error}"))
        self._pause_reading()

    def _on_outputs_taken(self) -> None:
        if self._held_up and len(self._outputs) < _MAX_BACKLOG // 2 and self._cause_of_death is None:
            self._resume_reading()

    def _take_reply(self, reply: EngineProcReply) -> None:
        if isinstance(reply, EngineReady):
            self._commands.connect(self._commands_path)  # the child has bound it, so this succeeds at once
        super()._take_reply(reply)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        exit_code = await process.wait()
        if exit_code == EXIT_FAILED and self._closing is None:  # it has sent the reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_REPLY_TIMEOUT_S):
                    await self._died.wait()
        self._die(EngineDeadError(f"the engine process {_describe(exit_code)}"))

    # -- stop -------------------------------------------------------------------------------------------------------

    async def _stop_engine(self) -> None:
        if self._held_up:
            self._resume_reading()  # and drop what arrives, so that the engine can finish its step
        if self._process is not None:
            await self._end_process(self._process)
        if self._watcher is not None:
            await self._watcher
        self._close_inherited()
        self._resources.close()

    async def _end_process(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        _send_signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning("the engine process did not stop within %s s and is killed", _STOP_TIMEOUT_S)
            _send_signal(process, signal.SIGKILL)
            await process.wait()


def _send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal without `process.send_signal`, which polls first: if the process has just ended, that takes the
    exit code from asyncio, which logs a warning and reports 255 instead."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"
