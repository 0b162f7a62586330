"""An executor as someone outside the project would add it: a worker on a thread of its own, to which bytes go.
Use: --executor tests.extensions.executor:ThreadExecutor"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from common.engine.config import EngineConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import ModelRunnerOutput, SchedulerOutput
from common.engine.kv_connector import OpenConnector
from common.engine.phases import PhaseClock
from common.engine.worker.worker import Worker

num_bytes = 0  # of all steps and answers


class ThreadExecutor:
    """See Executor."""

    runs_ahead = False
    rank_figures = ()
    max_concurrent_batches = 1
    adapters = None

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)
        self._thread = ThreadPoolExecutor(1)

    @property
    def num_failed_recordings(self) -> int:
        return self._worker.num_failed_recordings

    def share_phases(self, phases: PhaseClock) -> None:
        """The caller's thread computes nothing."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """The worker fails in its calls only."""

    def load_model(self) -> ModelFacts:
        return self._thread.submit(self._worker.load_model).result()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._thread.submit(self._worker.initialize_kv_cache, num_blocks).result()

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        return self._thread.submit(self._worker.open_connector, on_settled).result()

    def measure_steps(self) -> list[tuple[int, float]]:
        return self._thread.submit(self._worker.measure_steps).result()

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> Answer:
        return Answer(self._thread.submit(self._run, msgspec.msgpack.encode(step), masks))

    def _run(self, encoded: bytes, masks: MaskSource) -> bytes:
        global num_bytes
        step = msgspec.msgpack.decode(encoded, type=SchedulerOutput)
        answer = msgspec.msgpack.encode(self._worker.submit(step, masks).result())
        num_bytes += len(encoded) + len(answer)
        return answer

    def check(self, known: KnownRequests) -> list[str]:
        return self._thread.submit(self._worker.check, known).result()

    def close(self) -> None:
        self._thread.shutdown()
        self._worker.close()


class Answer(NamedTuple):
    encoded: Future[bytes]

    def result(self) -> ModelRunnerOutput:
        return msgspec.msgpack.decode(self.encoded.result(), type=ModelRunnerOutput)
