"""A pod whose engine notes when its forwards begin and end: `python -m benchmarks.kv.traced ROLE SETTINGS...`.

The notes are lines of two monotonic times in seconds, in the file that the environment names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from common.config import parse
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig, ParallelConfig
from common.engine.contract.step import RunningStep
from common.engine.executor.inproc import InprocExecutor
from common.pod.config import PodConfig
from common.pod.runtime import PodRuntime, run_pod
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront

TRACE_VARIABLE = "BATON_BENCHMARK_TRACE"
_EXECUTOR = "benchmarks.kv.traced:TracedExecutor"


class TracedExecutor(InprocExecutor):
    """The engine's own, with a watch on its model runner."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._trace = os.open(os.environ[TRACE_VARIABLE], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Executor."""
        super().initialize_kv_cache(num_blocks)
        runner = self._worker._runner  # noqa: SLF001 - nobody else needs to know when a forward ends
        assert runner is not None
        submit = runner.submit

        def traced(*arguments: Any) -> RunningStep:
            started = time.monotonic()
            running = submit(*arguments)
            os.write(self._trace, f"{started} {time.monotonic()}\n".encode())
            return running

        runner.submit = traced  # type: ignore[method-assign]


def _engine_config(settings: PodConfig) -> EngineConfig:
    return msgspec.structs.replace(settings.engine_config(), parallel=ParallelConfig(executor=_EXECUTOR))


def build(role: str, settings: Sequence[str]) -> PodRuntime:
    """The pod that these settings describe, as its own program builds it."""
    if role == "prefill":
        prefill = parse(PrefillConfig, settings, prog=role, section=role).named("prefill")
        engine = AsyncMPClient(_engine_config(prefill), name=prefill.pod_id)
        return PodRuntime("prefill", prefill, engine, lambda pod: PrefillFront(pod, prefill))
    decode = parse(DecodeConfig, settings, prog=role, section=role).named("decode")
    engine = AsyncMPClient(_engine_config(decode), name=decode.pod_id)
    return PodRuntime("decode", decode, engine, lambda pod: DecodeFront(pod, decode))


if __name__ == "__main__":
    sys.exit(run_pod(build(sys.argv[1], sys.argv[2:])))
