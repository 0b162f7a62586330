"""What the engine pools equals transformers, however a prompt is cut and whatever runs beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.messages import AddRequest, RequestOutput
from common.engine.model.pooling import check_direction
from common.errors import ErrorCode, ModelLoadError, PromptTooLongError
from common.types import NO_SAMPLING, FinishReason, PoolingParams, RequestId, SamplingParams
from tests.dequantized import save_dequantized
from tests.pooling_models import (
    class_logits,
    classifier_dir,
    embedding,
    embedding_model_dir,
    hidden_states,
    without_head,
)
from tests.tiny_models import MAX_MODEL_LEN, prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir
from tools.quantize_checkpoint import quantize_checkpoint

ARCHITECTURES = Path(__file__).resolve().parents[4] / "docs" / "architectures.md"
EMBED = PoolingParams(task="embed")
TOLERANCE = 1e-5
KERNELS = ("auto", "reference")


def client_of(directory: Path, *, num_blocks: int = 192, kernels: str = "auto", **scheduler: int) -> InprocClient:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), num_threads=1, device="cpu", cpu_kernels=kernels, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 32} | scheduler),
    )
    return InprocClient(config)


def pool(request_id: str, prompt: list[int], pooling: PoolingParams = EMBED) -> AddRequest:
    return AddRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=NO_SAMPLING, pooling=pooling)


def run(client: InprocClient, *requests: AddRequest) -> dict[str, RequestOutput]:
    """The last output of each, after all have ended."""
    for request in requests:
        client.add_request(request)
    return finish(client)


def finish(client: InprocClient) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while client.has_unfinished:
        for output in client.step().outputs:
            if output.finish_reason is not None:
                outputs[output.request_id] = output
    assert client.check_integrity().violations == []
    return outputs


def rows(output: RequestOutput, size: int) -> torch.Tensor:
    assert output.finish_reason is FinishReason.STOP, output.error
    return torch.from_numpy(np.frombuffer(output.pooled, dtype=np.float32).reshape(-1, size).copy())


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.reshape(found.shape), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("mode", ["lasttoken", "cls_token", "mean_tokens"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_embeddings_in_chunks_and_beside_a_stream_equal_transformers(
    name: str, mode: str, kernels: str, tmp_path: Path
) -> None:
    base = tiny_model_dir(name)
    directory = embedding_model_dir(base, tmp_path, mode=mode, normalizes=mode != "cls_token")
    with client_of(directory, kernels=kernels) as client:
        prompts = {f"p{length}": prompt_of(length) for length in (1, 3, 4, 5, 31, 90)}  # of up to 32 tokens in a step
        outputs = run(client, *(pool(each, prompt) for each, prompt in prompts.items()))
        for request_id, prompt in prompts.items():
            expected = embedding(base, prompt, mode, normalizes=mode != "cls_token")
            assert_close(rows(outputs[request_id], 48), expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_model_that_generates_pools_beside_its_streams(kernels: str) -> None:
    base = tiny_model_dir("qwen3")
    prompt, stream = prompt_of(40), prompt_of(7, seed=1)
    with client_of(base, kernels=kernels) as client:
        generation = AddRequest(
            request_id=RequestId("g"),
            prompt_token_ids=stream,
            sampling=SamplingParams(temperature=0.0, max_tokens=12, num_logprobs=0),
        )
        client.add_request(generation)
        token_ids: list[int] = []
        pooled: dict[str, RequestOutput] = {}
        for number in range(20):
            if number == 2:
                client.add_request(pool("e", prompt))
                client.add_request(pool("one", prompt[:1]))
            for output in client.step().outputs if client.has_unfinished else ():
                token_ids += [token.token_id for token in output.tokens]
                pooled |= {output.request_id: output} if output.pooled else {}
        assert token_ids == reference_generate(base, stream, 12)
        assert_close(rows(pooled["e"], 48), embedding(base, prompt))
        assert_close(rows(pooled["one"], 48), embedding(base, prompt[:1]))


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_prefix_hits_give_the_same_and_are_used_where_the_last_token_is_all_that_counts(
    mode: str, tmp_path: Path
) -> None:
    base = tiny_model_dir("qwen3")
    directory = embedding_model_dir(base, tmp_path, mode=mode)
    prompt = prompt_of(40)
    with client_of(directory) as client:
        run(client, pool("first", prompt[:24]))
        output = run(client, pool("second", prompt))["second"]
        assert_close(rows(output, 48), embedding(base, prompt, mode))
        assert client.stats().prefix_cache_hits == (24 if mode == "lasttoken" else 0)


def test_a_preempted_prompt_is_pooled_from_its_beginning(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    directory = embedding_model_dir(base, tmp_path, mode="mean_tokens")
    prompts = {f"p{number}": prompt_of(60, seed=number) for number in range(4)}
    with client_of(directory, max_num_batched_tokens=16) as client:
        scheduler = client._core._scheduler
        for request_id, prompt in prompts.items():
            client.add_request(pool(request_id, prompt))
        for _ in range(3):
            client.step()
        victim = next(each for each in scheduler._running if each.num_computed_tokens)
        scheduler._lifecycle.preempt(victim)
        outputs = finish(client)
    for request_id, prompt in prompts.items():
        assert_close(rows(outputs[request_id], 48), embedding(base, prompt, "mean_tokens"))


def test_fewer_dimensions_are_normalised_again_and_vectors_of_tokens_are_all_there() -> None:
    base = tiny_model_dir("qwen3")
    prompt = prompt_of(50)
    with client_of(base) as client:
        outputs = run(
            client,
            pool("short", prompt, PoolingParams(task="embed", dimensions=16)),
            pool("raw", prompt, PoolingParams(task="embed", use_activation=False)),
            pool("tokens", prompt, PoolingParams(task="token_embed", use_activation=False)),
        )
        hidden = hidden_states(base, prompt)
        assert_close(rows(outputs["short"], 16), torch.nn.functional.normalize(hidden[-1, :16], dim=0))
        assert_close(rows(outputs["raw"], 48), hidden[-1])
        assert_close(rows(outputs["tokens"], 48), hidden)


def test_a_model_without_a_head_embeds_and_generates_nothing(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    with client_of(without_head(base, tmp_path)) as client:
        assert client.spec.pooling.tasks == ("embed", "token_embed")
        prompt = prompt_of(33)
        assert_close(rows(run(client, pool("a", prompt))["a"], 48), embedding(base, prompt))
        request = AddRequest(request_id=RequestId("g"), prompt_token_ids=prompt, sampling=SamplingParams())
        refused = run(client, request)["g"]
        assert "generates no text" in refused.error
        assert refused.error_param == "model"


def test_a_quantised_model_without_a_head_embeds(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir("qwen3"), tmp_path / "quantised", "awq", group_size=16)
    dequantized = save_dequantized(tmp_path / "quantised", tmp_path / "dequantized")
    prompt = prompt_of(33)
    with client_of(without_head(tmp_path / "quantised", tmp_path / "headless")) as client:
        assert_close(rows(run(client, pool("a", prompt))["a"], 48), embedding(dequantized, prompt))


@pytest.mark.parametrize("class_name", ["Qwen3", "Llama", "GPT2"])
def test_classifiers_equal_transformers(class_name: str) -> None:
    directory = classifier_dir(class_name=class_name)
    raw = PoolingParams(task="classify", use_activation=False)
    with client_of(directory) as client:
        assert client.spec.pooling.labels == ("sad", "glad", "neither")
        prompts = {f"p{length}": prompt_of(length) for length in (1, 5, 70)}
        outputs = run(client, *(pool(each, prompt, raw) for each, prompt in prompts.items()))
        probabilities = run(client, pool("p", prompt_of(5), PoolingParams(task="classify")))["p"]
    for request_id, prompt in prompts.items():
        assert_close(rows(outputs[request_id], 3), class_logits(directory, prompt))
    assert_close(rows(probabilities, 3), class_logits(directory, prompt_of(5)).softmax(dim=0))


def test_labels_of_tokens_and_of_one_label_equal_transformers() -> None:
    tokens, single = classifier_dir(kind="Token"), classifier_dir(num_labels=1)
    prompt = prompt_of(40)
    with client_of(tokens) as client:
        found = run(client, pool("t", prompt, PoolingParams(task="token_classify")))["t"]
    assert_close(rows(found, 3), class_logits(tokens, prompt).softmax(dim=1))
    with client_of(single) as client:
        found = run(client, pool("s", prompt, PoolingParams(task="classify")))["s"]
    assert_close(rows(found, 1), class_logits(single, prompt).sigmoid())


def test_prompts_as_long_as_the_context_are_pooled_and_longer_ones_refused() -> None:
    base = tiny_model_dir("qwen3")
    with client_of(base, num_blocks=MAX_MODEL_LEN // 4 + 1) as client:
        prompt = prompt_of(MAX_MODEL_LEN)
        assert_close(rows(run(client, pool("a", prompt))["a"], 48), embedding(base, prompt))
        refused = run(client, pool("b", [*prompt, 5]))["b"]
        assert refused.error_code == PromptTooLongError("").code.value.number


@pytest.mark.parametrize(
    ("pooling", "param"),
    [
        (PoolingParams(task="classify"), "model"),
        (PoolingParams(task="embed", dimensions=49), "dimensions"),
        (PoolingParams(task="embed", dimensions=-1), "dimensions"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(pooling: PoolingParams, param: str) -> None:
    with client_of(tiny_model_dir("qwen3")) as client:
        refused = run(client, pool("a", [1, 2, 3], pooling))["a"]
    assert (refused.error_code, refused.error_param) == (ErrorCode.INVALID_ARGUMENT.value.number, param)


def test_what_is_not_finite_fails_and_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    model = random_model(tiny_config("Qwen3Config", head_dim=16))
    model.model.embed_tokens.weight.data[200] = float("inf")
    model.save_pretrained(tmp_path)
    prompt = [*prompt_of(10), 200, *prompt_of(9)]
    with client_of(tmp_path) as client:
        for request_id in ("a", "b"):
            output = run(client, pool(request_id, prompt))[request_id]
            assert output.error_code == ErrorCode.NON_FINITE.value.number
        assert client.stats().prefix_cache_hits == 0


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}}, "cls_token, "),
        ({"modules.json": [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]}, "module Dense"),
        ({"modules.json": {"type": 1}}, "not a list of modules"),
    ],
)
def test_files_that_ask_for_something_else_are_named(files: dict[str, object], problem: str, tmp_path: Path) -> None:
    directory = embedding_model_dir(tiny_model_dir("qwen3"), tmp_path)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=problem):
        client_of(directory)


def test_a_decoder_whose_configuration_does_not_say_so_is_served(tmp_path: Path) -> None:
    random_model(tiny_config("GPTNeoXConfig")).save_pretrained(tmp_path)
    prompt = prompt_of(9)
    with client_of(tmp_path) as client:
        request = AddRequest(
            request_id=RequestId("g"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        client.add_request(request)
        tokens = []
        while client.has_unfinished:
            tokens += [token.token_id for output in client.step().outputs for token in output.tokens]
    assert tokens == reference_generate(tmp_path, prompt, 8)


def test_no_architecture_that_is_served_counts_as_an_encoder() -> None:
    served, _, _ = ARCHITECTURES.read_text().partition("## Refused")
    _, *model_types = re.findall(r"^\| `(\w+)` \|", served, re.MULTILINE)
    assert len(model_types) > 100
    for model_type in model_types:
        check_direction({}, CONFIG_MAPPING[model_type]())


def test_encoders_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config("BertConfig")
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="bert is an encoder"):
        client_of(tmp_path)
