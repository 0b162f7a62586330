"""The engine in this thread: for the offline `LLM` and for tests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from common.engine.config import EngineConfig
from common.engine.contract.adapters import AdapterFacts
from common.engine.core import EngineCore
from common.engine.executor.base import Executor
from common.engine.executor.registry import EXECUTORS
from common.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    RequestOutput,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.errors import ConfigError, EngineDeadError
from common.types import RequestId

_TRANSFER_TIMEOUT_S = 10.0  # for a step that only waits for the connector


class InprocClient:
    """A synchronous client that owns an EngineCore: commands take effect at once, `step` computes.

    Raises ConfigError, ModelLoadError included, from its constructor. After a step has failed, everything but `close`
    raises EngineDeadError. A context manager; not thread-safe.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        """`executor`: runs the model; by default, in this process."""
        if (num_engines := config.parallel.data_parallel_size) > 1:
            raise ConfigError.of("data_parallel_size", f"{num_engines}, but there is one engine in this process")
        if executor is None:
            executor = EXECUTORS.find(config.parallel.executor_name)(config)
        self._wakeup = threading.Event()
        self._outputs: deque[RequestOutput] = deque()  # of transfers, between steps
        self._dead = ""
        self._core = EngineCore(
            config, executor, on_wakeup=self._wakeup.set, on_outputs=self._take_outputs, on_failure=self._fail
        )

    @property
    def spec(self) -> EngineSpec:
        """Facts of the started engine."""
        return self._core.spec

    @property
    def has_work(self) -> bool:
        """True if a step would do something now."""
        return bool(self._outputs) or self._core.has_work

    @property
    def has_unfinished(self) -> bool:
        """True while any request lives, any KV is in transfer, or there are outputs that no step has returned."""
        return bool(self._outputs) or self._core.has_unfinished

    def add_request(self, request: AddRequest) -> None:
        """Starts a generation. A request that cannot be admitted ends with FinishReason.ERROR in the next outputs."""
        self._check_alive()
        self._core.receive(request)
        self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """Ends generations; each live one still answers, with FinishReason.ABORT."""
        self._check_alive()
        self._core.receive(AbortRequests(list(request_ids)))
        self._core.abort_requests(request_ids)

    def update_transfer(self, command: TransferUpdate) -> None:
        """Passes on an update of a consumer's handoff."""
        self._check_alive()
        self._core.receive(command)

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Gives a producer the blocks to which a direct connector writes."""
        self._check_alive()
        self._core.receive(target)

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        """Reports that a producer no longer writes to a consumer's blocks."""
        self._check_alive()
        self._core.receive(command)

    def step(self, *, timeout_s: float = _TRANSFER_TIMEOUT_S) -> EngineCoreOutputs:
        """Computes one step. If it only waits for KV in transfer, returns after a change or `timeout_s` seconds.
        Outputs are empty if nothing happened."""
        self._check_alive()
        if not self.has_work and self._core.has_unfinished:
            self._wakeup.wait(timeout_s)
        self._wakeup.clear()
        self._check_alive()
        try:
            is_idle = not self._core.has_work
            outputs = EngineCoreOutputs(outputs=[], stats=self._core.stats()) if is_idle else self._core.step()
        except BaseException as error:
            self._dead = f"the engine died in a step: {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise EngineDeadError(self._dead) from error
            raise
        earlier = [self._outputs.popleft() for _ in range(len(self._outputs))]
        return msgspec.structs.replace(outputs, outputs=earlier + outputs.outputs) if earlier else outputs

    def stats(self) -> EngineStats:
        """Returns the current statistics."""
        self._check_alive()
        return self._core.stats()

    def check_integrity(self) -> IntegrityReport:
        """Checks the engine's invariants."""
        self._check_alive()
        return self._core.check_integrity()

    def load_adapter(self, directory: str) -> AdapterFacts:
        """Loads a LoRA adapter from a local directory, for requests with its digest. Raises InvalidRequestError if it
        cannot be used, OverloadedError if there are too many."""
        self._check_alive()
        return self._core.load_adapter(directory)

    def unload_adapter(self, digest: bytes) -> None:
        """Forgets an adapter; requests that it has go on. Raises UnknownModelError if it is not loaded."""
        self._check_alive()
        self._core.unload_adapter(digest)

    def reset_prefix_cache(self) -> None:
        """Removes all cached blocks that no request owns."""
        self._check_alive()
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """Releases the engine. Idempotent."""
        self._dead = self._dead or "the engine is closed"
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._outputs.extend(outputs.outputs)
        self._wakeup.set()

    def _fail(self, error: Exception) -> None:
        self._dead = f"the engine's transfer thread died: {type(error).__name__}: {error}"
        self._wakeup.set()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError(self._dead)
