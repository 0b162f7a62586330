"""Settings that cannot work: one line that names them, exit code 2, and nothing left running."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT


def up(*options: str) -> tuple[int, list[str]]:
    """Exit code and lines on stderr."""
    command = [sys.executable, "-m", "cli.main", "up", "--port", "0", "--grpc-port", "0", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    return result.returncode, result.stderr.splitlines()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--connector", "pigeon"], "pigeon"),
        (["--num-blocks", "1"], "--num-blocks"),
        (["--kv-cache-memory", "12 apples"], "--kv-cache-memory"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
def test_refused_in_one_line(options: list[str], named: str) -> None:
    code, lines = up(*options)
    assert code == 2, lines
    assert len(lines) == 1
    assert lines[0].startswith("baton: error: ")
    assert named in lines[0]


def test_a_model_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    code, lines = up("--model", str(tmp_path))
    assert code == 2, lines
    assert len(lines) == 1
    assert str(tmp_path) in lines[0]


def test_pods_that_do_not_fit_together(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("prefill: {block_size: 24}\n")
    code, lines = up("--config", str(config))
    assert code == 2, lines
    assert "prefill-0: its block_size is 24, the cluster's is 16" in lines[-1]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--grpc-port"):
            code, lines = up(option, str(port))
            assert code == 2
            assert len(lines) == 1
            assert option in lines[0]
            assert str(port) in lines[0]
