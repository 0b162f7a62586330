"""Serves one architecture in each way, and compares its tokens with those of `transformers`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.llm import LLM
from common.engine.scheduler import scheduler
from common.errors import ConfigError, ModelLoadError
from common.types import SamplingParams
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import Handoffs, create_engine
from tests.integration.speculation_rig import AllDrafts
from tests.tiny_models import prompt_of, reference_generate

LENGTHS = (1, 11, 12, 13, 16, 33, 90)  # of prompts, around the ends of windows, steps and blocks
MAX_TOKENS = 16
_SETTINGS = {"dtype": "float32", "num_blocks": 2048, "block_size": 4, "max_model_len": 128, "num_threads": 1}
_CHUNK = 16  # tokens of a step
_GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


class Verdict(NamedTuple):
    """How an architecture is served. Where `refused` is not empty, the rest is not known."""

    class_name: str
    refused: str = ""  # why
    is_cut: bool = False  # tokens are the same on two ranks
    kernels: str = ""  # see EngineSpec
    groups: str = ""  # the kinds of its KV groups; latents by that name


def check(model_type: str) -> Verdict:
    """Raises AssertionError if a token is not that of `transformers`, however it is served."""
    directory = model_dir(model_type)
    prompts = [prompt_of(length) for length in LENGTHS]
    try:
        with _open(directory) as llm:
            expected = [reference_generate(directory, prompt, MAX_TOKENS) for prompt in prompts]
            assert _answers(llm, prompts) == expected
            assert _answers(llm, prompts) == expected
            assert llm._client.stats().prefix_cache_hits > 0
            kernels = llm.spec.kernels
            groups = ", ".join(dict.fromkeys(_kv_of(group) for group in llm.spec.layout.groups))
    except ModelLoadError as error:
        reason = error.message.replace(str(directory), "it").partition(" (relative error")[0]
        return Verdict(_class_name(directory), reason)
    _check_handoff(directory, prompts, expected)
    _check_drafts(directory, prompts, expected)
    is_cut = _on_two_ranks(directory, prompts, expected)
    return Verdict(_class_name(directory), is_cut=is_cut, kernels=kernels, groups=groups)


def _kv_of(group: KVGroupSpec) -> str:
    return "latent" if group.kind == "full" and not group.value_head_dim else group.kind


def _open(directory: Path, **options: object) -> LLM:
    return LLM(str(directory), **_SETTINGS | {"max_num_batched_tokens": _CHUNK} | options)


def _answers(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [each.token_ids for each in llm.generate(prompts, _GREEDY, use_tqdm=False)]


def _check_handoff(directory: Path, prompts: Sequence[list[int]], expected: Sequence[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        handoffs = Handoffs(*(create_engine(directory, Path(scratch) / "kv", max_model_len=128) for _ in range(2)))
        try:
            decoded = handoffs.run(prompts, _GREEDY)
            assert [each.token_ids for each in decoded] == expected
            assert {each.received.recompute_reason for each in decoded if each.received} == {""}
            handoffs.check_integrity()
        finally:
            handoffs.close()


def _check_drafts(directory: Path, prompts: Sequence[list[int]], expected: Sequence[list[int]]) -> None:
    with mock.patch.object(scheduler, "DraftDepth", AllDrafts), _open(directory, speculative="ngram:min=1") as llm:
        assert _answers(llm, [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)])
        assert _answers(llm, prompts) == expected
        assert llm._client.stats().drafts.num_verified > 0


def _on_two_ranks(directory: Path, prompts: Sequence[list[int]], expected: Sequence[list[int]]) -> bool:
    try:
        with _open(directory, tensor_parallel_size=2) as llm:
            assert _answers(llm, prompts) == expected
    except ConfigError:
        return False
    return True


def _class_name(directory: Path) -> str:
    return str(json.loads((directory / "config.json").read_text())["architectures"][0])
