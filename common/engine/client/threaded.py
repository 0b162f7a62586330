"""The engine on a thread of this process: for tests of pods, and where a process would cost too much."""

from __future__ import annotations

import asyncio
import logging
import threading

from common.engine.client.async_base import AsyncClientBase
from common.engine.config import EngineConfig
from common.engine.executor.registry import ExecutorFactory
from common.engine.launch import EngineFailed, EngineProcReply, EngineReady
from common.engine.loop import EngineLoop
from common.engine.messages import EngineCommand

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0  # for the step in flight; a thread cannot be killed


class AsyncInprocClient(AsyncClientBase):
    """EngineClient of an EngineLoop in this process. Model and event loop share the interpreter lock."""

    def __init__(self, config: EngineConfig, executor_factory: ExecutorFactory) -> None:
        super().__init__()
        self._config = config
        self._executor_factory = executor_factory
        self._engine: EngineLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def _start_engine(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    def _send(self, command: EngineCommand) -> None:
        assert self._engine is not None  # commands are taken only after EngineReady
        self._engine.put(command)

    async def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the engine thread did not stop within %s s", _STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            engine = EngineLoop(self._config, self._executor_factory(self._config), self._emit)
        except Exception as error:  # noqa: BLE001  whatever it is, the client must hear of it
            self._emit(EngineFailed.of(error))
            return
        try:
            self._engine = engine
            if self._closing is not None:  # closed while loading
                return
            self._emit(EngineReady(engine.spec))
            engine.run()
        except Exception as error:
            logger.exception("the engine died")
            self._emit(EngineFailed.of(error))
        finally:
            engine.close()

    def _emit(self, reply: EngineProcReply) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._take_reply, reply)
        except RuntimeError:
            if not self._event_loop.is_closed():  # else nobody waits; a profile may take longer than its client
                raise
