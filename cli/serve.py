"""`baton serve ROLE`: one process of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

from cli.extras import import_with_extra
from common.errors import ConfigError
from common.imports import kept_imports
from deploy.parent_death import die_with_parent

ROLES = {
    "router": "router.__main__",
    "prefill": "prefill_service.__main__",
    "decode": "decode_service.__main__",
}
_NEEDS = {"router": "router", "prefill": "engine", "decode": "engine"}  # extra of the distribution that each role needs
_HELP = """\
usage: baton serve {router,prefill,decode} [options]

Runs one process of a cluster in the foreground, until SIGTERM or Ctrl-C.

roles:
  router   Takes requests over HTTP and gRPC, and picks the pods of each.
  prefill  Computes the KV cache of prompts, and hands it over.
  decode   Generates the tokens.

`baton serve ROLE --help` describes a role's options and exit codes.

examples:
  baton serve prefill --host 10.0.0.1 --port 7001 --connector-path /mnt/kv
  baton serve decode --host 10.0.0.2 --port 7002 --connector-path /mnt/kv
  baton serve router --host 0.0.0.0 --prefill 10.0.0.1:7001 --decode 10.0.0.2:7002"""


def main(argv: Sequence[str]) -> int:
    """Hands the options over to the role's own main function."""
    die_with_parent()
    _end_at_sigterm()
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    role, *options = argv
    if role not in ROLES:
        raise ConfigError(f"{role}: unknown role; known: {', '.join(ROLES)}")
    with kept_imports():
        module = import_with_extra(ROLES[role], role, _NEEDS[role])
    return int(module.main(options))


def _end_at_sigterm() -> None:
    """Makes SIGTERM end the first process of a container, for which the kernel drops signals that have no handler.

    Until the role has a handler of its own: a pod may take minutes to download its model.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit_at_once)


def _exit_at_once(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
