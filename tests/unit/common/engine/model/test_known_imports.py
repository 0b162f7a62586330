"""What transformers defines is looked up once for each version, and is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]
PROGRAM = """
import importlib
from pathlib import Path

from common.engine.model import known_imports

encode = known_imports._encoded
known_imports._encoded = lambda structure: print("looked up") or encode(structure)
known_imports.know_imports()
import transformers
from transformers.utils import import_utils

models = Path(transformers.__file__).parent / "models"
asked = [(models, "models"), (models / "__init__.py", None), (models / "llama" / "__init__.py", None)]
found = [import_utils.define_import_structure(*each) for each in asked]
importlib.reload(import_utils)
assert found == [import_utils.define_import_structure(*each) for each in asked]
assert transformers.AutoModelForCausalLM and transformers.Qwen3Config
"""


def output_of(cache: Path) -> str:
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_later_process_knows_what_an_earlier_one_has_looked_up(tmp_path: Path) -> None:
    assert [output_of(tmp_path) for _ in range(2)] == ["looked up\n", ""]
