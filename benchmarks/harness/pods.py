"""A pod whose engine has an executor of the benchmark's: `python -m benchmarks.harness.pods EXECUTOR ROLE OPTIONS...`.

EXECUTOR is a module and a class in it, with ":" between them.
"""

from __future__ import annotations

import sys

import msgspec

from common.config import parse
from common.engine.client.mp import AsyncMPClient
from common.engine.config import ParallelConfig
from common.pod.config import PodConfig
from common.pod.runtime import PodRuntime, run_pod
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront


def main() -> int:
    """Runs the pod until SIGTERM."""
    executor, role, *options = sys.argv[1:]

    def engine_of(settings: PodConfig) -> AsyncMPClient:
        config = msgspec.structs.replace(settings.engine_config(), parallel=ParallelConfig(executor=executor))
        return AsyncMPClient(config, name=settings.pod_id)

    if role == "prefill":
        prefill = parse(PrefillConfig, options, prog=role, section=role).named(role)
        return run_pod(PodRuntime("prefill", prefill, engine_of(prefill), lambda pod: PrefillFront(pod, prefill)))
    decode = parse(DecodeConfig, options, prog=role, section=role).named(role)
    return run_pod(PodRuntime("decode", decode, engine_of(decode), lambda pod: DecodeFront(pod, decode)))


if __name__ == "__main__":
    sys.exit(main())
