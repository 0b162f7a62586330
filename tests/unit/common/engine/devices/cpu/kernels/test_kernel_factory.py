"""Kernels are found by what makes them, without their instructions being made once more."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common import engine
from common.engine.devices.cpu.kernels import compiled, compiling
from common.engine.devices.cpu.kernels.language import ElementType
from common.engine.devices.cpu.kernels.sampling import best_kernel
from tests.tiny_models import prompt_of, tiny_model_dir

ROOT = Path(__file__).resolve().parents[7]
PROGRAM = """
import hashlib
import sys

import msgspec

from baton import LLM, SamplingParams
from common.engine.devices.cpu.kernels import compiling

made, texts, module_text = [], {}, compiling.module_text
compiling.module_text = lambda name, body: made.append(name) or module_text(name, body)
compile = compiling._compile


def noted(name, body, made_by):
    texts[made_by] = hashlib.sha256(module_text(name, body).encode()).hexdigest()
    return compile(name, body, made_by)


compiling._compile = noted
tokens = []
prompt = msgspec.json.decode(sys.argv[1])
for quantization in (None, "int8"):
    with LLM(sys.argv[2], num_blocks=16, max_model_len=200, quantization=quantization) as llm:
        outputs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
        tokens.append(outputs[0].token_ids)
print(msgspec.json.encode({"made": made, "texts": texts, "tokens": tokens}).decode())
"""


def run(cache: Path, threads: int):
    prompt = msgspec.json.encode(prompt_of(20)).decode()
    command = [sys.executable, "-c", PROGRAM, prompt, str(tiny_model_dir("mixtral"))]
    numbers = {"PYTHONHASHSEED": str(threads), "OMP_NUM_THREADS": str(threads)}
    environment = {**os.environ, **numbers, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_later_processes_find_the_same_without_making_it(tmp_path):
    first, second = run(tmp_path, 2), run(tmp_path, 3)
    assert len(first["made"]) > 8
    assert second["made"] == []
    assert first["tokens"] == second["tokens"]
    assert None not in first["texts"]
    assert not [made_by for made_by in first["texts"] if " at 0x" in made_by]
    common = first["texts"].keys() & second["texts"].keys()
    assert len(common) > 8
    assert {key: first["texts"][key] for key in common} == {key: second["texts"][key] for key in common}


@pytest.fixture
def now(monkeypatch):
    """The sources as they are now are those that were imported."""
    monkeypatch.setattr(engine, "IMPORTED_AT", float("inf"))
    sources = compiling._sources
    sources.cache_clear()
    yield
    sources.cache_clear()


@pytest.mark.usefixtures("now")
def test_the_sources_the_arguments_and_the_instructions_tell_kernels_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, module_text = [], compiling.module_text
    monkeypatch.setattr(compiling, "module_text", lambda name, body: made.append(name) or module_text(name, body))

    def make(element, num_tokens=100):
        best_kernel.__wrapped__(element, num_tokens)
        return len(made)

    assert [make(ElementType.FLOAT32) for _ in range(2)] == [1, 1]
    assert make(ElementType.BFLOAT16) == 2
    assert make(ElementType.FLOAT32, 101) == 3
    monkeypatch.setattr(compiling, "_sources", lambda: "others")
    assert make(ElementType.FLOAT32) == 4
    monkeypatch.setattr(compiling, "instructions", lambda: "others")
    assert make(ElementType.FLOAT32) == 5
    assert make(ElementType.FLOAT32) == 5


@pytest.mark.usefixtures("now")
def test_files_that_have_changed_since_they_were_imported_name_nothing(monkeypatch, tmp_path):
    file = tmp_path / "kernels" / "linear.py"
    file.parent.mkdir()
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "__init__.py"))

    def sources():
        compiling._sources.cache_clear()
        return compiling._sources()

    assert sources() is None
    found = []
    for content in ("a = 1", "a = 2"):
        file.write_text(content)
        found.append(sources())
    file.rename(file.with_name("other.py"))
    assert len({None, *found, sources()}) == 4
    (tmp_path / ".#linear.py").symlink_to("user@host.1")  # a lock file of Emacs, which leads nowhere
    assert sources() is None
    (tmp_path / ".#linear.py").unlink()
    assert sources() is not None
    monkeypatch.setattr(engine, "IMPORTED_AT", file.with_name("other.py").stat().st_ctime)
    assert sources() is None


def test_a_factory_makes_each_kernel_once():
    assert best_kernel(ElementType.FLOAT32, 7) is best_kernel(ElementType.FLOAT32, 7)
    assert isinstance(best_kernel(ElementType.FLOAT32, 7), compiled.Kernel)
