"""The process of a machine that has ranks of a pod, and not the pod itself."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from common.config import report_config_error
from common.engine.executor.multiproc.node import run_node
from common.errors import ConfigError, EngineDeadError
from common.observability.logging import setup_logging
from common.pod.config import PodConfig
from common.pod.runtime import EXIT_ENGINE_DIED

logger = logging.getLogger(__name__)


def run_pod_node(config: PodConfig) -> int:
    """Runs the ranks of this machine until SIGTERM or SIGINT, or until the pod does not come back. Returns the exit
    code. Called on the main thread."""
    setup_logging(config.log_level, f"{config.pod_id} node {config.parallel.node_rank}", config.log_format)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        run_node(config.engine_config())
    except ConfigError as error:
        return report_config_error(error)
    except EngineDeadError as error:
        logger.error("%s", error)
    return EXIT_ENGINE_DIED


def _stop(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(0)  # by way of what ends the ranks
