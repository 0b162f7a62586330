"""`baton logs`: what the processes of a cluster in the background say."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import ArgumentParser, epilog_of
from common.errors import ConfigError
from deploy.cluster_log import LAUNCHER, read_log
from deploy.cluster_state import DEFAULT_NAME, is_claimed, log_file, the_cluster

EXIT_CODES = {0: "success", 2: "a wrong option, or no log", 130: "interrupted"}


def main(argv: Sequence[str]) -> int:
    """Prints the log, also of a cluster that has ended. Returns 0; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton logs",
        description="Shows the log of a cluster that `baton up --detach` started, also after its end. How much "
        "pods and router log is the cluster's --log-level.",
        epilog=epilog_of(examples=("baton logs -f", "baton logs -n 20 decode-0"), exit_codes=EXIT_CODES),
    )
    parser.add_argument("pod", nargs="?", metavar="POD", help=f"Only this process: prefill-0, router, {LAUNCHER}, ...")
    parser.add_argument("-f", "--follow", action="store_true", help="Go on until the cluster ends, or Ctrl-C.")
    parser.add_argument("-n", "--lines", type=int, default=1000, metavar="N", help="Most lines so far. (default: 1000)")
    parser.add_argument("--name", help="Of which cluster. (default: the only one, else that named default)")
    args = parser.parse_args(argv)
    if args.lines < 0:
        raise ConfigError(f"--lines: must be >= 0, got {args.lines}", param="lines")
    running = the_cluster() if args.name is None else None
    name = args.name or (running.name if running is not None else DEFAULT_NAME)
    file = log_file(name)
    if file is None:
        raise ConfigError(f"--name: there is no log of a cluster named {name}", param="name")
    _check_pod(name, args.pod)
    is_over = (lambda: not is_claimed(name)) if args.follow else None
    for line in read_log(file, args.lines, args.pod, is_over):
        print(line, flush=args.follow)
    return 0


def _check_pod(cluster: str, pod: str | None) -> None:
    """Raises ConfigError for a process that a running cluster does not have."""
    state = the_cluster(cluster) if pod is not None and is_claimed(cluster) else None
    known = [LAUNCHER, *(process.name for process in state.pods)] if state is not None else []
    if pod is not None and known and pod not in known:
        raise ConfigError(f"{pod}: no such process; there are {', '.join(known)}")
