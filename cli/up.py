"""`baton up`: a cluster on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.cluster_config import parse_cluster
from deploy.detached import start_detached
from deploy.dry_run import print_plan
from deploy.local_cluster import run_cluster
from deploy.terminal import Terminal


def main(argv: Sequence[str]) -> int:
    """Runs a cluster until a signal, leaves one running, or says what would run. Returns the exit code; raises
    ConfigError."""
    command = parse_cluster(argv)
    if command.is_dry_run:
        return print_plan(command)
    if command.is_detached:
        return start_detached(command)
    return run_cluster(command, Terminal())
