"""docs/quantization.md names every format, and its commands work."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from common.demo_model import demo_model_path
from common.engine.config import ModelConfig
from common.engine.model.loader import load_model
from common.engine.quantization.checkpoints.gguf import GGUF
from common.engine.quantization.checkpoints.registry import _FORMATS
from common.engine.quantization.registry import QUANTIZATIONS
from tools.quantize_checkpoint import main

PAGE = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8")


def test_formats_are_named() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    for name in _FORMATS:
        assert any(row.startswith(f"| `{name}` |") for row in rows), name
    (gguf,) = (row for row in rows if row.startswith("| a `.gguf` file |"))
    assert all(name in gguf for name in GGUF.suffixes)
    assert all(f"`--quantization {name}`" in PAGE for name in QUANTIZATIONS._known)


def test_the_tool_writes_a_checkpoint_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^\.venv/bin/python -m (tools\.quantize_checkpoint .*)$", PAGE, re.MULTILINE)
    words = command.replace("DIR", str(demo_model_path())).replace("/tmp/quantized", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    assert load_model(ModelConfig(model=str(tmp_path), device="cpu")).kernels == "fused"
