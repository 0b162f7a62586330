"""An executor comes from outside the package, in one short file."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from common.engine.llm import LLM
from common.engine.messages import AddRequest, PhaseSeconds
from common.errors import ConfigError
from common.types import RequestId, SamplingParams
from tests.extensions import executor
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_LINES = 90
PLACE = "tests.extensions.executor:ThreadExecutor"
PROMPTS = [prompt_of(9), prompt_of(30)]


def test_the_output_is_the_references() -> None:
    before = executor.num_bytes
    with LLM(tiny_model_dir("llama"), block_size=4, num_blocks=64, executor=PLACE) as llm:
        completions = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
        assert llm.check_integrity().violations == []
    expected = [reference_generate(tiny_model_dir("llama"), prompt, 12) for prompt in PROMPTS]
    assert [completion.token_ids for completion in completions] == expected
    assert executor.num_bytes > before


def test_the_driver_waits_for_a_device() -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir("llama"))),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(executor=PLACE),
    )
    with InprocClient(config) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        client.add_request(AddRequest(request_id=RequestId("a"), prompt_token_ids=PROMPTS[0], sampling=sampling))
        phases = client.step().phases
    assert isinstance(phases, PhaseSeconds)
    assert phases.device > phases.prepare
    assert phases.forward == phases.sample == 0.0


def test_one_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="executor"):
        LLM(tiny_model_dir("llama"), executor="tests.extensions.executor:Nothing")


def test_it_is_short() -> None:
    assert len(Path(executor.__file__).read_text(encoding="utf-8").splitlines()) < MAX_LINES
