"""`baton status`: clusters in the background, and how their processes are."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from cli.exit_codes import EXIT_FAILED, EXIT_UNREACHABLE
from common.config import ArgumentParser, epilog_of
from deploy.cluster_state import ClusterState, PodState, running_clusters, the_cluster

EXIT_CODES = {
    0: "every cluster shown serves, and all its processes are ready",
    EXIT_FAILED: "a process is not ready, or the router serves nothing",
    2: "a wrong option, or no cluster of that name",
    EXIT_UNREACHABLE: "no cluster is running",
}
_PROBE_TIMEOUT_S = 2.0
_HEADER = ("NAME", "ROLE", "ADDRESS", "STATE", "SINCE", "PID", "RESTARTS", "METRICS")
_PUBLIC = ("name", "version", "phase", "pid", "started_at", "model", "url", "grpc_address", "pods")  # no secrets


def main(argv: Sequence[str]) -> int:
    """Prints the clusters. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton status",
        description="Shows the clusters that `baton up --detach` started, and their processes.",
        epilog=epilog_of(
            examples=("baton status", "baton status --name test --json | jq -r '.[0].url'"), exit_codes=EXIT_CODES
        ),
    )
    parser.add_argument("--name", help="Only this cluster. (default: all)")
    parser.add_argument("--json", action="store_true", help="As JSON, a list of clusters.")
    args = parser.parse_args(argv)
    named = the_cluster(args.name) if args.name is not None else None
    clusters = [named] if named is not None else running_clusters()
    statuses = {cluster.name: _router_status(cluster) for cluster in clusters}
    if args.json:
        public = [
            {field: getattr(cluster, field) for field in _PUBLIC} | {"router_status": statuses[cluster.name]}
            for cluster in clusters
        ]
        print(msgspec.json.format(msgspec.json.encode(public)).decode())
    elif not clusters:
        print("No cluster is running in the background.")
    else:
        print("\n\n".join(_describe(cluster, statuses[cluster.name]) for cluster in clusters))
    if not clusters:
        return EXIT_UNREACHABLE
    return 0 if all(_is_ready(cluster, statuses[cluster.name]) for cluster in clusters) else EXIT_FAILED


def _is_ready(cluster: ClusterState, router_status: int) -> bool:
    has_all = cluster.phase == "ready" and all(pod.phase == "ready" for pod in cluster.pods)
    return has_all and router_status == http.client.OK


def _router_status(cluster: ClusterState) -> int:
    """Asks the router whether it can serve. Returns its HTTP status; 0: it does not answer."""
    address = urlsplit(cluster.url)
    if not address.hostname:
        return 0
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _describe(cluster: ClusterState, router_status: int) -> str:
    now = time.time()
    has_several = any(pod.model for pod in cluster.pods)
    title = f"{cluster.name}: {cluster.phase}, up {format_duration(now - cluster.started_at)}"
    if cluster.url:
        title += f", {cluster.url}, grpc {cluster.grpc_address}"
    if cluster.model:
        title += f", model{'s' if has_several else ''} {cluster.model}"
    if cluster.phase == "ready" and router_status != http.client.OK:
        said = f"answers {router_status}" if router_status else f"does not answer within {_PROBE_TIMEOUT_S:g} s"
        title += f"\n  It serves nothing: the router {said}."
    rows = [_HEADER, *(_row(pod, now) for pod in cluster.pods)]
    if has_several:
        models = ["MODEL", *(pod.model for pod in cluster.pods)]
        rows = [(*row, model) for row, model in zip(rows, models, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)] if cluster.pods else [title])


def _row(pod: PodState, now: float) -> tuple[str, ...]:
    since = format_duration(now - pod.since)
    pid = "" if pod.pid is None else str(pod.pid)
    metrics = "" if pod.metrics_port is None else f":{pod.metrics_port}"
    return pod.name, pod.role, pod.address, pod.phase, since, pid, str(pod.restarts), metrics


def format_duration(seconds: float) -> str:
    """ "12 s", "3 min", "2 h", "5 d"."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
