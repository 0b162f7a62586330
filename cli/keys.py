"""`baton keys`: API keys of the router."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, epilog_of
from common.errors import ConfigError
from router.security.keys import NAME_PATTERN, digest_of, generate_key

_EPILOG = epilog_of(examples=("baton keys new --name team-a --operator",), exit_codes=OF_TOOLS)


def main(argv: Sequence[str]) -> int:
    """Prints a key, once. Returns 0; raises ConfigError."""
    parser = ArgumentParser(prog="baton keys", description="Makes API keys of the router.", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    new = commands.add_parser(
        "new",
        help="Print a fresh key, and the entry for the file of --api-keys-file, which has its hash only.",
        description="Prints a fresh key, and the entry for the file of --api-keys-file, which has its hash only.",
        epilog=_EPILOG,
    )
    new.add_argument("--name", required=True, help="Whose key it is, for logs and metrics.")
    new.add_argument(
        "--operator", action="store_true", help="It may also read /metrics, the state of pods, and routes of requests."
    )
    args = parser.parse_args(argv)
    if not re.fullmatch(NAME_PATTERN, args.name):
        raise ConfigError("--name: expected up to 63 letters, digits, dots, dashes or underscores", param="name")
    key = generate_key()
    print(f"key, shown once: {key}")
    more = ", operator: true" if args.operator else ""
    print(f"- {{name: '{args.name}', hash: 'sha256:{digest_of(key).hex()}'{more}}}")
    return 0
