"""`baton doctor`: what this machine has of what Baton needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cli.exit_codes import EXIT_FAILED
from common.config import ArgumentParser, add_arguments, build, epilog_of
from deploy.doctor import DoctorConfig, as_json, describe, examine
from deploy.doctor_checks import CHECKS
from kv_store.registry import joining_kind

_EXIT_CODES = {
    0: "nothing that is needed is broken",
    EXIT_FAILED: "something that is needed is broken",
    2: "a wrong option or setting",
}


def main(argv: Sequence[str]) -> int:
    """Prints the findings. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton doctor",
        description="Checks what this machine has of what Baton needs, and says what to fix. Changes nothing.",
        epilog=epilog_of(
            examples=("baton doctor", "baton doctor --connector nixl --device cuda --json"), exit_codes=_EXIT_CODES
        ),
    )
    parser.add_argument("--json", action="store_true", help="As JSON.")
    add_arguments(parser, DoctorConfig)
    args = parser.parse_args(argv)
    config = build(DoctorConfig, args)
    joining_kind(config.connector)
    report = examine(config, CHECKS)
    print(as_json(report) if args.json else describe(report))
    sys.stdout.flush()
    code = EXIT_FAILED if report.has_failed else 0
    if any(finding.detail.startswith("not finished") for finding in report.findings.values()):
        os._exit(code)  # a library may keep the interpreter from ending
    return code
