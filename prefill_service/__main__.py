"""A prefill pod as a process: `python -m prefill_service --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.config import parse, report_config_error
from common.engine.client import create_client
from common.errors import ConfigError
from common.pod.runtime import PodRuntime, run_pod
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill pod until SIGTERM or SIGINT. Returns the exit code."""
    try:
        config = parse(
            PrefillConfig,
            argv,
            prog="baton serve prefill",
            section="prefill",
            description="Runs a prefill pod.",
            examples=("baton serve prefill --host 10.0.0.1 --port 7001 --connector-path /mnt/kv",),
        ).named("prefill")
        if config.parallel.node_rank:
            from common.pod.node import run_pod_node  # numpy, which a pod need not wait for

            return run_pod_node(config)
        pod = build(config)
    except ConfigError as error:
        return report_config_error(error)
    return run_pod(pod)


def build(config: PrefillConfig) -> PodRuntime:
    """Builds the pod that these settings describe."""
    engine = create_client(config.engine_config(), name=config.pod_id)
    return PodRuntime("prefill", config, engine, lambda pod: PrefillFront(pod, config))


if __name__ == "__main__":
    sys.exit(main())
