"""Exit codes of the commands, as their help explains them."""

from __future__ import annotations

import sys

from common.errors import BatonError, UnreachableError

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

OF_CLIENTS = {
    0: "success",
    EXIT_FAILED: "the router refused the API key or the request, or failed",
    2: "a wrong option or setting",
    EXIT_UNREACHABLE: "no router answers",
    EXIT_INTERRUPTED: "interrupted",
}
OF_TOOLS = {0: "success", 2: "a wrong option or setting"}


def report_error(error: BatonError) -> int:
    """Prints the error on one line of stderr. Returns the exit code."""
    sys.stderr.write(f"baton: error: {' '.join(error.message.split())}\n")
    return EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_FAILED
