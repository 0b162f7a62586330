"""Property tests draw the same examples in each run, so that a failure comes from the change under test; the long
suites draw new ones."""

import importlib.util
import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "slow":
        settings.load_profile("repeatable")
    if config.getoption("markexpr") != "gpu" and importlib.util.find_spec("triton"):
        # The interpreter must be chosen before the first import, which is torch's or transformers'. Without the
        # variable, engines do not use it.
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("triton")
        del os.environ["TRITON_INTERPRET"]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell, and so in every child
        signal.signal(signal.SIGINT, signal.default_int_handler)
