"""Property tests draw the same examples in each run, so that a failure comes from the change under test; the long
suites draw new ones. No example has a deadline: a busy machine may take its time for one."""

import importlib.util
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from common import engine
from common.engine.worker import step_measurement

# Tests change what kernels are made of: here, earlier ones are found by their instructions, as if sources had changed.
# The import is before that of torch, whose threads it tells to sleep while they wait.
engine.IMPORTED_AT = 0.0

# More rounds take a tenth of the time of tests that make an engine each, and matter only to tests of the measurement.
step_measurement._MAX_ROUNDS = 1

# Triton's interpreter must be chosen before its first import, which may be that of another conftest.py, so not in
# `pytest_configure`. The processes of pytest-xdist inherit the choice. Without TRITON_INTERPRET, engines do not use it.
if os.environ.setdefault("BATON_TESTS_ON_GPU", str(int("gpu" in sys.argv))) == "0" and importlib.util.find_spec(
    "triton"
):
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton")
    del os.environ["TRITON_INTERPRET"]

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "repeatable", settings.get_profile("patient"), derandomize=True, database=None, max_examples=50
)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("patient" if config.getoption("markexpr") == "slow" else "repeatable")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell, and so in every child
        signal.signal(signal.SIGINT, signal.default_int_handler)
