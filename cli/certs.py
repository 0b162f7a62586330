"""`baton certs`: an authority for development, and certificates for router and pods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, epilog_of
from deploy.certificates import AUTHORITY, LOCAL_HOSTS, VALID_DAYS, make_certificates, paths_of


def main(argv: Sequence[str]) -> int:
    """Writes the files and says how to use them. Returns 0; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton certs",
        description="Makes a certificate authority for development, and certificates for router, prefill and decode, "
        f"valid for {VALID_DAYS} days. Keep ca.key private: every process that has it can join the cluster.",
        epilog=epilog_of(examples=("baton certs --dir certs --host 10.0.0.1",), exit_codes=OF_TOOLS),
    )
    parser.add_argument("--dir", required=True, metavar="DIR", help="Where to put them.")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help=f"Address or name of a machine, beside {', '.join(LOCAL_HOSTS)}; may be repeated.",
    )
    parser.add_argument("--force", action="store_true", help="Replace what is there.")
    args = parser.parse_args(argv)
    directory = Path(args.dir)
    for file in make_certificates(directory, args.host, force=args.force):
        print(file)
    authority, decode = paths_of(directory, AUTHORITY), paths_of(directory, "decode")
    files = f"--cluster-ca {authority.certificate} --cluster-cert {decode.certificate} --cluster-key {decode.key}"
    print(f"\nFor example: baton serve decode {files}")
    return 0
