"""A decode pod as a process: `python -m decode_service --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.config import parse, report_config_error
from common.engine.client import create_client
from common.errors import ConfigError
from common.pod.runtime import PodRuntime, run_pod
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode pod until SIGTERM or SIGINT. Returns the exit code."""
    try:
        config = parse(
            DecodeConfig,
            argv,
            prog="baton serve decode",
            section="decode",
            description="Runs a decode pod.",
            examples=("baton serve decode --host 10.0.0.2 --port 7002 --connector-path /mnt/kv",),
        ).named("decode")
        if config.parallel.node_rank:
            from common.pod.node import run_pod_node  # numpy, which a pod need not wait for

            return run_pod_node(config)
        pod = build(config)
    except ConfigError as error:
        return report_config_error(error)
    return run_pod(pod)


def build(config: DecodeConfig) -> PodRuntime:
    """Builds the pod that these settings describe."""
    engine = create_client(config.engine_config(), name=config.pod_id)
    return PodRuntime("decode", config, engine, lambda pod: DecodeFront(pod, config))


if __name__ == "__main__":
    sys.exit(main())
