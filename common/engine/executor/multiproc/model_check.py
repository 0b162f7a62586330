"""Decides before any rank is started whether its model can be cut among all of them.

What decides is the model's configuration and the plan in its code: with torch and transformers, which the driver does
without. So a process of its own looks, once, and not each rank when all of them have imported these.
"""

from __future__ import annotations

import os
import subprocess
import sys

from common.engine.config import EngineConfig
from common.engine.executor.multiproc.protocol import Decoder, encode
from common.engine.executor.multiproc.rank_process import describe_exit
from common.engine.launch import EngineFailed
from common.errors import ConfigError, EngineDeadError
from common.imports import kept_imports

_TIMEOUT_S = 600.0  # imports take a minute on a machine that starts many pods, and config.json may come from afar


def check_model(config: EngineConfig) -> None:
    """Raises the ConfigError with which ranks would refuse the model, or EngineDeadError if it cannot be looked at."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=encode(config), stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=False)  # noqa: S603  # our own module
    except subprocess.TimeoutExpired as error:
        raise EngineDeadError(f"the check of the model has not ended within {_TIMEOUT_S:g} s") from error
    if done.stdout:
        raise Decoder[EngineFailed](EngineFailed)(done.stdout).to_error()
    if done.returncode:
        raise EngineDeadError(f"the check of the model {describe_exit(done.returncode)}")


def main() -> None:
    """Entry point of the process. Ends it."""
    config = Decoder[EngineConfig](EngineConfig)(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    try:
        from common.engine.model.without_compiler import without_compiler

        with without_compiler():
            with kept_imports():  # torch and transformers
                from common.engine.model.loader import check_ranks
            check_ranks(config.model, config.parallel, config.data_parallel_rank)
    except ConfigError as error:
        os.write(answer, encode(EngineFailed.of(error)))
    # Taking an interpreter down that has loaded torch costs seconds of collecting garbage.
    os._exit(0)


if __name__ == "__main__":
    main()
