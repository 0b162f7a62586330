"""Command lines of benchmarks: the options that several of them have."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.checkouts import checkout_of


def make_parser(
    module: str,
    description: str | None,
    *,
    repeats: int | None = None,
    has_quick: bool = False,
    has_before: bool = False,
) -> argparse.ArgumentParser:
    """Returns a parser for `python -m module` with --markdown, and with the others that are asked for."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"default: {repeats}")
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="little, once, to see that it runs")
    if has_before:
        parser.add_argument("--before", type=checkout_of, metavar="DIR", help="an older checkout, to compare with")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    return parser
