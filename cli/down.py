"""`baton down`: ends a cluster in the background."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from common.config import ArgumentParser, epilog_of
from deploy.cluster_state import ClusterState, is_running, running_clusters, signal_launcher, the_cluster

EXIT_CODES = {
    0: "ended, or none was running",
    EXIT_FAILED: "a cluster did not end",
    2: "a wrong option, no cluster of that name, or several to choose from",
    EXIT_INTERRUPTED: "interrupted; the processes were killed",
}
_MARGIN_S = 10.0  # waited for the launcher beyond the grace period of its processes
_KILL_S = 10.0
_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Ends a cluster, or all. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton down",
        description="Ends a cluster that `baton up --detach` started: the router lets running requests finish for the "
        "cluster's --stop-grace-s, then the pods end. Ctrl-C kills what is left.",
        epilog=epilog_of(examples=("baton down", "baton down --name test", "baton down --all"), exit_codes=EXIT_CODES),
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--name", help="Which one. (default: the only one, else that named default)")
    which.add_argument("--all", action="store_true", help="Every cluster of this user.")
    args = parser.parse_args(argv)
    only = None if args.all else the_cluster(args.name)
    clusters = running_clusters() if args.all else [only] if only is not None else []
    if not clusters:
        print("No cluster is running in the background.")
    return max(map(_end, clusters), default=0)


def _end(cluster: ClusterState) -> int:
    try:
        signal_launcher(cluster, signal.SIGTERM)
        if _ends_within(cluster, cluster.stop_s + _MARGIN_S):
            print(f"Stopped {cluster.name}.")
            return 0
        return _kill(cluster)
    except KeyboardInterrupt:
        return max(_kill(cluster), EXIT_INTERRUPTED)


def _kill(cluster: ClusterState) -> int:
    signal_launcher(cluster, signal.SIGKILL)  # its processes die with it
    if not _ends_within(cluster, _KILL_S):
        print(f"{cluster.name} does not end: process {cluster.pid} is still there.")
        return EXIT_FAILED
    print(f"Killed {cluster.name}.")
    return 0


def _ends_within(cluster: ClusterState, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(cluster):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
