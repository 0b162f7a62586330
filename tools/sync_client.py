"""Writes `baton/client.py` from `baton/async_client.py`: `python -m tools.sync_client`, or `make proto`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TARGET = ROOT / "baton" / "async_client.py", ROOT / "baton" / "client.py"

_TIMEOUT_S = 60.0
_NOTICE = " Written by `make proto` from `baton.async_client`."
# What it says with asyncio, and what it says without, in this order.
_WORDS = (
    ("client for asyncio.", "client." + _NOTICE),
    ("An async context manager; belongs to one event loop.", "A context manager; may be used by several threads."),
    ("import asyncio\n", "import time\n"),
    ("asyncio.sleep", "time.sleep"),
    ("open_async", "open"),
    ("close(None)", "close()"),
    ("async ", ""),
    ("await ", ""),
    ("__aenter__", "__enter__"),
    ("__aexit__", "__exit__"),
    ("Async", ""),
)


def sync_client() -> str:
    """Returns the text of the client without asyncio. Raises `subprocess.CalledProcessError` if it is no Python."""
    text = SOURCE.read_text()
    for word, other in _WORDS:
        text = text.replace(word, other)
    for ruff in (["check", "--select", "I", "--fix"], ["format"]):
        command = [sys.executable, "-m", "ruff", *ruff, "--quiet", "--stdin-filename", str(TARGET), "-"]
        done = subprocess.run(  # noqa: S603  # ruff, on our file
            command, input=text, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
        text = done.stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(sync_client())
