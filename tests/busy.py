"""Runs pytest beside processes that spin, which no test may notice: python -m tests.busy --runs 3 tests/unit -x

Every argument but `--runs` and `--spinners` is pytest's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SPIN = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(10**6):\n        pass"


@contextmanager
def spinning(number: int) -> Iterator[None]:
    """Keeps `number` processes at full speed; they end with this one, however it ends."""
    spin = [sys.executable, "-c", SPIN.format(parent=os.getpid())]
    spinners = [subprocess.Popen(spin) for _ in range(number)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Shows a failure at once: a run takes more than half an hour, and may be ended before its summary."""
    if report.failed:
        sys.stderr.write(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n")


def main() -> int:
    """Returns the exit status of the first run that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="ends with the first that fails (default: %(default)s)")
    parser.add_argument("--spinners", type=int, default=2 * (os.cpu_count() or 1), help="default: two per core")
    options, of_pytest = parser.parse_known_args()
    with spinning(options.spinners):
        for run in range(1, options.runs + 1):
            sys.stderr.write(f"run {run} of {options.runs} beside {options.spinners} spinning processes\n")
            if status := subprocess.call([sys.executable, "-m", "pytest", "-p", "tests.busy", *of_pytest]):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
