"""A local cluster in the background: `baton up --detach`.

1. The command claims the cluster's name and starts the launcher, in a session of its own, to which it hands the claim.
2. The launcher writes to the terminal of the command, and to the log, until the cluster is ready. Then it lets go of
   the terminal and says so, through a pipe; the command returns.
3. If the launcher ends before that, the command returns its exit code.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from common.config import report_config_error
from common.errors import ConfigError
from deploy.cluster_config import ClusterCommand, parse_cluster
from deploy.cluster_log import ClusterLog
from deploy.cluster_record import ClusterRecord, initial_state
from deploy.cluster_state import DEFAULT_NAME, LOG_FILE, Claim, StateError, claim
from deploy.local_cluster import run_cluster
from deploy.own_code import importable
from deploy.terminal import Terminal

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_READY = b"1"


def start_detached(command: ClusterCommand) -> int:
    """Starts the cluster and waits until it is ready. Returns the exit code; raises ConfigError for a taken name."""
    claimed = claim(command.name)
    news, ready = os.pipe()
    launcher = subprocess.Popen(  # noqa: S603  (this program, with its own arguments)
        [sys.executable, "-m", "deploy.detached", str(claimed.lock), str(ready), *command.arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(claimed.lock, ready),
        env=importable(os.environ),
        start_new_session=True,
    )
    os.close(ready)
    try:
        claimed.save(initial_state(command.name, launcher.pid))  # until the launcher has its own
        os.close(claimed.lock)
        if os.read(news, len(_READY)) == _READY:
            launcher.returncode = 0  # not to be waited for
            return 0
        return max(launcher.wait(), EXIT_FAILED)
    except KeyboardInterrupt:
        launcher.terminate()
        _wait_or_kill(launcher)
        return EXIT_INTERRUPTED


def _wait_or_kill(launcher: subprocess.Popen[bytes]) -> None:
    """The launcher ends its processes within its grace period, or at once if the person at the terminal insists."""
    try:
        launcher.wait()
    except KeyboardInterrupt:
        launcher.kill()  # its processes die with it
        launcher.wait()


def main(argv: Sequence[str]) -> int:
    """The launcher. Returns the exit code."""
    lock, ready, *arguments = argv
    for descriptor in (int(lock), int(ready)):
        os.set_inheritable(descriptor, False)  # for the processes it starts
    try:
        command = parse_cluster(arguments)
        claimed = Claim(command.name, int(lock))
        log = _open_log(claimed)
        terminal = Terminal(log=log)

        def let_go() -> None:
            stop = "" if command.name == DEFAULT_NAME else f" --name {command.name}"
            terminal.say(terminal.dim(f"Runs in the background. Stop with `baton down{stop}`."))
            terminal.detach()
            _leave_terminal(log)
            with contextlib.suppress(BrokenPipeError):  # the command was killed; the cluster goes on
                os.write(int(ready), _READY)
            os.close(int(ready))

        try:
            return run_cluster(command, terminal, ClusterRecord(claimed), let_go)
        except ConfigError as error:
            log.write_own(f"error: {error.message}")
            raise
        finally:
            claimed.clear()
    except ConfigError as error:
        return report_config_error(error)


def _open_log(claimed: Claim) -> ClusterLog:
    file = claimed.directory / LOG_FILE
    try:
        return ClusterLog(file)
    except OSError as error:
        raise StateError(f"{file} cannot be opened: {error.strerror}") from error


def _leave_terminal(log: ClusterLog) -> None:
    """Readers of stdout see its end, although this process goes on; its errors go to the log."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    log.take_stderr()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
