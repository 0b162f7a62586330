"""Child processes that do not outlive their launcher, even one that is killed with SIGKILL.

The launcher puts its process id into the environment; each child asks the kernel, first thing, to be killed at its
parent's death. Done by the child and not between fork and exec, where running Python is unsafe. A program that is not
ours is started through `python -m deploy.parent_death PROGRAM ARGUMENTS`: what the kernel was asked outlives an exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID_VARIABLE = "BATON_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Does nothing if no launcher started this process. Linux only: elsewhere an orphan has to be ended by hand."""
    parent_pid = os.environ.pop(PARENT_PID_VARIABLE, None)  # not for this process's own children
    if parent_pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # it died before the kernel knew
        os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  (the launcher's own choice; no shell)
