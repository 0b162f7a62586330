"""The router process: `python -m router` or `baton serve router`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from common.config import parse, report_config_error
from common.errors import ConfigError
from common.observability.captured_output import captured_output
from common.observability.logging import setup_logging
from common.rpc.event_loop import UvLoop
from router.config import RouterConfig
from router.runtime import Router, settle_garbage_collection
from router.workers.supervisor import Supervisor, WorkersFailedError

logger = logging.getLogger(__name__)

_EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0; 1 if workers do not start; 2 if a setting is wrong."""
    try:
        config = parse(
            RouterConfig,
            argv,
            prog="baton serve router",
            section="router",
            description="Runs the router.",
            examples=("baton serve router --host 0.0.0.0 --prefill 10.0.0.1:7001 --decode 10.0.0.2:7002",),
        )
        with captured_output() as log:
            setup_logging(config.log_level, "router", config.log_format, stream=log)
            with asyncio.Runner(loop_factory=UvLoop) as runner:
                runner.run(_serve(config) if config.workers == 1 else _supervise(config))
    except ConfigError as error:
        return report_config_error(error)
    except WorkersFailedError as error:
        logger.error("%s", error.message)
        return _EXIT_FAILED
    return 0


async def _supervise(config: RouterConfig) -> None:
    await Supervisor(config).run()


async def _serve(config: RouterConfig) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with Router(config).running() as router:
        loop.add_signal_handler(signal.SIGHUP, router.reload)
        settle_garbage_collection()
        sys.stdout.write(f"ready role=router http={router.http_url} grpc={router.grpc_address}\n")
        sys.stdout.flush()
        await stopping.wait()
        logger.info("stopping: running requests get %g s", config.shutdown_grace_s)


if __name__ == "__main__":
    sys.exit(main())
