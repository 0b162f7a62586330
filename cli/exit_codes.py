"""Exit codes of the commands, as their help explains them."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

OF_CLIENTS = {
    0: "success",
    EXIT_FAILED: "the router refused the request, or failed",
    2: "a wrong option or setting",
    EXIT_UNREACHABLE: "nothing answers at the URL",
    EXIT_INTERRUPTED: "interrupted",
}
OF_TOOLS = {0: "success", 2: "a wrong option or setting"}
