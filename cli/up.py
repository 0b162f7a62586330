"""`baton up`: a cluster on this machine."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the cluster in the foreground."""
    from deploy.local_cluster import main as run_cluster

    return run_cluster(argv)
