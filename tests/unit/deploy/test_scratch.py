"""The shared directory of a local cluster."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deploy import scratch
from deploy.scratch import scratch_directory, sweep

TraceFunction = Callable[[FrameType, str, Any], Any]


def test_private_while_used_and_gone_afterwards(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "blocks").mkdir()
        with scratch_directory(tmp_path) as other:  # sweeps, but not what is in use
            assert other != path
        assert (path / "blocks").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_directory(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_swept(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from deploy.scratch import scratch_directory\n"
        "with scratch_directory(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with scratch_directory(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]


def test_what_is_being_made_is_not_swept(tmp_path: Path) -> None:
    """Whichever line the one launcher has come to when another sweeps."""

    def sweep_before_line(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if frame.f_code.co_filename != scratch.__file__:
            return None
        if event == "line":
            sweep(tmp_path)
        return sweep_before_line

    previous = sys.gettrace()
    sys.settrace(sweep_before_line)
    try:
        with scratch_directory(tmp_path) as path:
            sys.settrace(previous)
            assert list(tmp_path.iterdir()) == [path]
            sweep(tmp_path)
            assert list(path.iterdir()) == [path / "owner.lock"]
    finally:
        sys.settrace(previous)
    assert list(tmp_path.iterdir()) == []
