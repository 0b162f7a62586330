"""Child processes that run this code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def importable(base: Mapping[str, str]) -> dict[str, str]:
    """`base` as the environment of a process that runs this code, wherever it is started."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, base.get("PYTHONPATH", "")]))
    return {
        **base,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
    }  # a package `common` in the working directory is not ours
