"""Each test runs in a process of its own: what is imported here stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
PRELUDE = """\
import sys

from common.engine.model.without_compiler import without_compiler
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_is_loaded_without_the_compiler_which_is_there_afterwards():
    run("""
with without_compiler():
    from common.demo_model import demo_model_path
    from common.engine.config import ModelConfig
    from common.engine.model.loader import load_model

    assert load_model(ModelConfig(model=str(demo_model_path()), device="cpu")).kernels == "fused"
unwanted = ("torch._dynamo", "torch.distributed.tensor", "torch._decomp", "triton", "sympy")
assert not any(name.startswith(unwanted) for name in sys.modules)

import torch
import torch._dynamo.config
from transformers import masking_utils

assert torch.distributed.is_available()
assert torch._dynamo.config.recompile_limit
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
with masking_utils.TransformGetItemToIndex():
    pass
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config; assert torch._dynamo.config.recompile_limit",
        "assert torch.compile(torch.nn.Identity(), backend='eager')(torch.ones(1)) == 1",
    ],
)
def test_whoever_needs_the_compiler_gets_it(use):
    run(f"""
import torch
with without_compiler():
    @torch.compiler.disable
    def one():
        return 1

    @torch.compiler.disable(recursive=False)
    def two():
        return 2

    assert (one(), two()) == (1, 2)
    assert "torch._dynamo.exc" not in sys.modules
    {use}
    assert "torch._dynamo.exc" in sys.modules
""")


def test_an_operator_without_a_kernel_in_c_finds_the_one_in_python():
    run("""
with without_compiler():
    import torch
    from common.engine.model.meta_weights import on_meta

    with on_meta():
        layer = torch.nn.Linear(2, 3)
        assert layer(torch.ones(1, 2)).shape == (1, 3)
        assert "torch._decomp" not in sys.modules
        assert torch.randn(2, generator=torch.Generator(), device="cpu").shape == (2,)
        assert torch.nn.Embedding(4, 2)(torch.zeros(3, dtype=torch.long)).shape == (3, 2)
        assert "torch._decomp" in sys.modules
        try:
            torch.zeros(1).item()
        except RuntimeError as error:
            assert "meta" in str(error)
        else:
            raise AssertionError
""")


@pytest.mark.parametrize(
    "use",
    [
        "assert torch.broadcast_shapes((2, 1), (1, 3)) == (2, 3); import torch._decomp",
        *(
            pytest.param(f"import {name}", marks=pytest.mark.slow)
            for name in ("torch._decomp", "torch._refs", "torch._prims", "torch._dynamo", "torch.distributed.tensor")
        ),
    ],
)
def test_what_builds_on_kernels_in_python_finds_them(use):
    run(f"""
with without_compiler():
    import torch
assert "torch._refs" not in sys.modules
{use}
assert len(torch._decomp.decomposition_table) > 100
assert sys.modules["torch._decomp"].__spec__.origin
assert torch.vmap(torch.nn.functional.silu)(torch.ones(2, 3)).shape == (2, 3)
assert torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), torch.ones(2, 3, device="meta")).is_meta
""")


@pytest.mark.slow
def test_threads_that_need_a_kernel_at_once_find_it():
    run("""
with without_compiler():
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from common.engine.model.meta_weights import on_meta

    def embed(_):
        with on_meta():
            return torch.nn.Embedding(4, 2)(torch.zeros(3, dtype=torch.long)).shape

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(embed, range(8))) == {(3, 2)}
""")


def test_a_weight_without_data_is_named_by_operators_without_a_kernel_in_c():
    run("""
with without_compiler():
    import torch
    from common.engine.quantization.absent_weight import AbsentWeight, WeightReadError

    weight = AbsentWeight.of(torch.Size([3, 4]), torch.float32)
    try:
        torch.ones(1, 3) @ torch.nn.functional.relu(weight.abs())
    except WeightReadError:
        pass
    else:
        raise AssertionError
""")


@pytest.mark.slow
def test_a_compiler_that_is_imported_stays():
    run("""
import torch._dynamo
compiler = torch._dynamo
with without_compiler():
    assert torch._dynamo is sys.modules["torch._dynamo"] is compiler
assert torch._dynamo is compiler
""")
