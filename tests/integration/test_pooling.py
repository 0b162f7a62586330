"""Prompts that are pooled, from an HTTP client over the router to real engines, equal transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton import AsyncClient
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from common.engine.messages import AddRequest
from common.errors import InvalidRequestError
from common.types import NO_SAMPLING, PoolingParams, RequestId
from common.types.pooling import PoolingTask
from tests.integration.cluster import DEADLINE_S, Cluster, running_cluster, with_tokenizer
from tests.lora import merged_dir, write_adapter
from tests.pooling_models import class_logits, classifier_dir, embedding, embedding_model_dir, without_head
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

TEXTS = ["The capital of France", "a", "Paris, of course, as everybody knows who has ever been to it. " * 3]


@asynccontextmanager
async def serving(
    path: Path, model: Path, num_prefill: int = 1, num_decode: int = 0, **settings: Any
) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    directory = with_tokenizer(model, path / "model")
    async with (
        running_cluster(path, directory, num_prefill=num_prefill, num_decode=num_decode, **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client,
    ):
        yield cluster, client


def token_ids(cluster: Cluster, text: str) -> list[int]:
    return cluster.router.service.models[0].tokenizer.encode(text)


async def answer(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


def assert_close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 0), (0, 1), (2, 1)])
async def test_embeddings_on_prefill_pods_or_on_decode_pods_where_there_are_none(
    num_prefill: int, num_decode: int, tmp_path: Path
) -> None:
    base = tiny_model_dir("qwen3")
    model = embedding_model_dir(base, tmp_path / "embedding", mode="mean_tokens")
    async with serving(tmp_path, model, num_prefill, num_decode) as (cluster, client):
        found = await answer(client, "/v1/embeddings", input=TEXTS)
        for entry, text in zip(found["data"], TEXTS, strict=True):
            assert_close(entry["embedding"], embedding(base, token_ids(cluster, text), "mean_tokens"))
        num_tokens = sum(len(token_ids(cluster, text)) for text in TEXTS)
        assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (num_tokens, num_tokens)
        pods = cluster.prefill or cluster.decode
        assert sum(pod.context.stats.by_engine[0].num_prompt_tokens for pod in pods) == num_tokens
        assert (await client.get("/health")).status_code == 200


async def test_a_model_that_generates_embeds_beside_a_stream_and_reads_its_cache(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    prompt = prompt_of(70)
    async with serving(tmp_path, base, 1, 1) as (cluster, client):
        asked = [answer(client, "/v1/embeddings", input=[prompt[:5], prompt]), cluster.tokens([prompt], max_tokens=8)]
        found, tokens = await asyncio.gather(*asked)
        assert tokens == [reference_generate(base, prompt, 8)]
        assert_close(found["data"][1]["embedding"], embedding(base, prompt))
        again = await answer(client, "/v1/embeddings", input=prompt)
        assert_close(again["data"][0]["embedding"], embedding(base, prompt))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_embeddings_with_an_adapter_are_those_of_the_merged_model(tmp_path: Path) -> None:
    """Also with one that PEFT has saved of the model without its head, whose layers' paths are shorter."""
    base, prompt = tiny_model_dir("qwen3"), prompt_of(40)
    adapter, short = write_adapter(tmp_path / "adapter", base), write_adapter(tmp_path / "short", base)
    tensors = load_file(short / "adapter_model.safetensors")
    bare = {key.replace("base_model.model.model.", "base_model.model."): tensor for key, tensor in tensors.items()}
    save_file(bare, short / "adapter_model.safetensors")
    expected = embedding(merged_dir(base, adapter), prompt)
    async with serving(tmp_path, base) as (_, client):
        for path in (adapter, short):
            loading = {"lora_name": path.name, "lora_path": str(path)}
            assert (await client.post("/v1/load_lora_adapter", json=loading)).status_code == 200
            found = await answer(client, "/v1/embeddings", model=path.name, input=prompt)
            assert_close(found["data"][0]["embedding"], expected)
        plain = await answer(client, "/v1/embeddings", input=prompt)
        assert_close(plain["data"][0]["embedding"], embedding(base, prompt))


async def test_formats_and_dimensions_as_openai_asks_for_them(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    prompt = prompt_of(20)
    async with (
        serving(tmp_path, base) as (cluster, client),
        openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none") as official,
    ):
        name = cluster.router.service.models[0].name
        found = await official.embeddings.create(model=name, input=[prompt, prompt[:3]])  # in base64
        assert_close(found.data[1].embedding, embedding(base, prompt[:3]))
        short = await official.embeddings.create(model=name, input=prompt, dimensions=8, encoding_format="float")
        whole = embedding(base, prompt, normalizes=False)
        assert_close(short.data[0].embedding, torch.nn.functional.normalize(whole[:8], dim=0))
        raw = await answer(client, "/v1/embeddings", input=prompt, encoding_format="base64", normalize=False)
        assert_close(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").copy(), whole)
        rows = await answer(client, "/pooling", input=prompt, use_activation=False)
        assert_close(rows["data"][0]["data"][-1], whole)
        assert len(rows["data"][0]["data"]) == len(prompt)


async def test_a_router_without_decode_pods_says_that_nothing_is_generated(tmp_path: Path) -> None:
    async with serving(tmp_path, tiny_model_dir("qwen3")) as (_, client):
        refused = await answer(client, "/v1/completions", 503, prompt="hello")
        assert "no decode pod is known" in refused["error"]["message"]
        assert "/v1/embeddings" in refused["error"]["message"]
        models = (await client.get("/v1/models")).json()["data"]
        assert models[0]["max_model_len"] > 0
        assert (await answer(client, "/tokenize", prompt="hello"))["count"] == 5


async def test_a_model_that_only_embeds_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = embedding_model_dir(tiny_model_dir("qwen3"), tmp_path / "embedding")
    async with serving(tmp_path, model, 1, 1) as (_, client):
        for path, body in (("/v1/completions", {"prompt": "hello"}), ("/v1/classify", {"input": "hello"})):
            refused = await answer(client, path, 400, **body)
            assert refused["error"]["param"] == "model"


async def test_classes_equal_transformers(tmp_path: Path) -> None:
    model = classifier_dir()
    async with serving(tmp_path, model) as (cluster, client):
        found = await answer(client, "/v1/classify", input=TEXTS)
        for entry, text in zip(found["data"], TEXTS, strict=True):
            expected = class_logits(model, token_ids(cluster, text)).softmax(dim=0)
            assert_close(entry["probs"], expected)
            assert entry["label"] == ("sad", "glad", "neither")[int(expected.argmax())]
        refused = await answer(client, "/v1/score", 400, text_1="a", text_2="b")
        assert "3 labels" in refused["error"]["message"]


@pytest.mark.parametrize("num_labels", [1, 2])
async def test_cross_encoders_score_pairs(num_labels: int, tmp_path: Path) -> None:
    model = classifier_dir(num_labels=num_labels)
    async with serving(tmp_path, model) as (cluster, client):
        found = await answer(client, "/v1/score", text_1="Which city?", text_2=TEXTS)
        logits = [class_logits(model, token_ids(cluster, f"Which city?{text}")) for text in TEXTS]
        expected = torch.stack([each.sigmoid()[0] if num_labels == 1 else each.softmax(dim=0)[1] for each in logits])
        assert_close([entry["score"] for entry in found["data"]], expected)
        ranked = await answer(client, "/v1/rerank", query="Which city?", documents=TEXTS, top_n=2)
        order = expected.argsort(descending=True)[:2].tolist()
        assert [entry["index"] for entry in ranked["results"]] == order
        assert ranked["results"][0]["document"] == {"text": TEXTS[order[0]]}


@pytest.mark.matrix
@pytest.mark.cell(feature="models that only pool", degrees="{num_ranks}x{num_stages}")
@pytest.mark.parametrize(
    ("num_ranks", "num_stages"),
    [(2, 1), (1, 2), (2, 2)],
)
def test_models_without_a_head_for_text_are_cut_among_ranks_and_stages(
    num_ranks: int, num_stages: int, tmp_path: Path
) -> None:
    base, classifier, prompt = tiny_model_dir("qwen3"), classifier_dir(), prompt_of(33)
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages)
    tasks: dict[Path, tuple[PoolingTask, torch.Tensor]] = {
        without_head(base, tmp_path): ("embed", embedding(base, prompt)),
        classifier: ("classify", class_logits(classifier, prompt).softmax(dim=0)),
    }
    for directory, (task, expected) in tasks.items():
        request = AddRequest(
            request_id=RequestId("a"), prompt_token_ids=prompt, sampling=NO_SAMPLING, pooling=PoolingParams(task=task)
        )
        config = EngineConfig(
            model=ModelConfig(model=str(directory), num_threads=1, device="cpu", dtype="float32"),
            cache=CacheConfig(block_size=4, num_blocks=64),
            parallel=parallel,
        )
        with InprocClient(config) as client:
            client.add_request(request)
            outputs = []
            while client.has_unfinished:
                outputs += client.step().outputs
            assert client.check_integrity().violations == []
        assert_close(np.frombuffer(outputs[-1].pooled, dtype=np.float32).copy(), expected)


async def test_the_client_for_grpc(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    prompt = prompt_of(30)
    async with (
        serving(tmp_path / "embedding", base) as (cluster, _),
        AsyncClient(cluster.router.grpc_address) as client,
    ):
        whole, short = await client.embed([prompt, "Paris"]), await client.embed([prompt], dimensions=8)
        assert_close(whole[0], embedding(base, prompt))
        assert_close(whole[1], embedding(base, token_ids(cluster, "Paris")))
        assert len(short[0]) == 8
        vectors = torch.stack([embedding(base, token_ids(cluster, text)) for text in ("Paris", "Rome")])
        assert_close(await client.score("Paris", ["Rome"]), (vectors[0] @ vectors[1])[None])
        with pytest.raises(InvalidRequestError, match="classification head"):
            await client.classify(["Paris"])
        with pytest.raises(InvalidRequestError) as refused:
            await client.embed([prompt], dimensions=49)
        assert refused.value.param == "dimensions"
    model = classifier_dir()
    async with serving(tmp_path / "classes", model) as (cluster, _), AsyncClient(cluster.router.grpc_address) as client:
        (found,) = await client.classify([prompt])
        assert list(found) == ["sad", "glad", "neither"]
        assert_close(list(found.values()), class_logits(model, prompt).softmax(dim=0))


async def test_embeddings_score_by_their_cosine(tmp_path: Path) -> None:
    base = tiny_model_dir("qwen3")
    async with serving(tmp_path, base) as (cluster, client):
        found = await answer(client, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
        vectors = torch.stack([embedding(base, token_ids(cluster, text)) for text in TEXTS])
        assert_close([entry["score"] for entry in found["data"]], vectors @ vectors[0])
