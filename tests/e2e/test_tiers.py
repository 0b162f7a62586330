"""Tiers below the device: what one pod computed is not computed again, by it or by another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import openai
import pytest

from common.demo_model import DEMO_MODEL_NAME
from common.pb import pods_pb2, pods_pb2_grpc
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import PROMPTS, greedy_chat, greedy_completion

BLOCK_SIZE = 16
MAX_ROUNDS = 5
MAX_TOKENS = 96
MAX_CHAT_TOKENS = 160


def config_file(directory: Path, decode: str = "") -> str:
    """A file by which every prompt goes to a prefill pod, and the decode pod has further settings."""
    file = directory / "baton.yaml"
    file.write_text(f"router: {{remote_prefill: always}}\ndecode: {{{decode}}}\n")
    return str(file)


async def complete(cluster: Cluster, prompts: Sequence[str], max_tokens: int = MAX_TOKENS) -> list[str]:
    """Greedy answers, all at once."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=150) as client:
        completions = await asyncio.gather(
            *(
                client.completions.create(
                    model=DEMO_MODEL_NAME,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for prompt in prompts
            )
        )
    return [completion.choices[0].text for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--connector", "redis"),
        ("--connector", "nixl", "--connector-options", "store=redis", "--connector-options", "host_bytes=64MiB"),
    ],
    ids=["redis", "nixl with redis below host memory"],
)
async def test_a_prefill_pod_finds_what_another_one_computed(tmp_path: Path, options: tuple[str, ...]) -> None:
    prompt = "The sun is a star and the sky is blue. " * 20 + PROMPTS[0]
    expected = greedy_completion(prompt, MAX_TOKENS, ignore_eos=True)
    with running_cluster("--prefill", "2", "--config", config_file(tmp_path), *options) as cluster:
        pods = {name: pod_metrics(cluster, name) for name in ("prefill-0", "prefill-1")}
        assert await complete(cluster, [prompt]) == [expected]
        (first,) = [name for name, metrics in pods.items() if metrics["prompt_tokens"] > 0]
        (second,) = pods.keys() - {first}
        num_tokens = pods[first]["prompt_tokens"]
        assert num_tokens > 10 * BLOCK_SIZE
        if "nixl" in options:  # whose store gets the blocks beside the handoff
            await pods[first].until("num_offloaded_blocks", num_tokens // BLOCK_SIZE)
        drain(cluster, first)
        assert await complete(cluster, [prompt]) == [expected]
        assert pods[first]["prompt_tokens"] == num_tokens
        assert 0 < pods[second]["prompt_tokens"] <= BLOCK_SIZE
        assert pods[second]["tier_hits"] >= num_tokens - BLOCK_SIZE
        cluster.check_integrity()


def drain(cluster: Cluster, name: str) -> None:
    """The pod takes no new work from now on."""
    with grpc.insecure_channel(cluster.addresses[name]) as channel:
        pods_pb2_grpc.PodStub(channel).Drain(pods_pb2.DrainRequest(), timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["shared-storage", "nixl"])
async def test_what_is_preempted_is_restored_from_host_memory(tmp_path: Path, connector: str) -> None:
    """The decode pod has room for less than half of its requests, so that they push each other out."""
    prompts = [f"{index}. " + "The sky is blue. " * 10 + PROMPTS[index] for index in range(8)]
    expected = [greedy_completion(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    config = config_file(tmp_path, decode="num_blocks: 41")
    options = ("--connector", connector, "--connector-options", "host_bytes=64MiB", "--config", config)
    with running_cluster(*options) as cluster:
        decode = pod_metrics(cluster, "decode-0")
        for _ in range(MAX_ROUNDS):
            assert await complete(cluster, prompts) == expected
            cluster.check_integrity()
            if decode["tier_hits"] > 0:  # a request may come back before its blocks are in host memory
                break
        assert decode["num_preemptions"] > 0
        assert decode["tier_hits"] > 0


@pytest.mark.slow
async def test_the_next_turn_of_a_chat_restores_what_the_decode_pod_computed(tmp_path: Path) -> None:
    """The prefill pod never computed the first answer, and does not compute it for the second turn either."""
    question, next_question = "Tell me a story about a dog and a cat.", "And then?"
    options = ("--connector", "redis", "--config", config_file(tmp_path))
    for option in ("offload=true", "lookup_timeout_s=20"):  # in which a busy machine answers, too
        options += ("--connector-options", option)
    with running_cluster(*options) as cluster:
        prefill, decode = pod_metrics(cluster, "prefill-0"), pod_metrics(cluster, "decode-0")
        first = await chat(cluster, question)
        assert first.answer == greedy_chat(question, MAX_CHAT_TOKENS)
        num_full = (first.num_tokens - 1) // BLOCK_SIZE  # nobody computes the KV of the last token
        num_prompt_full = first.num_prompt_tokens // BLOCK_SIZE
        assert num_full >= num_prompt_full + 4
        await decode.until("num_offloaded_blocks", num_full - num_prompt_full)
        num_computed = prefill["prompt_tokens"]
        second = await chat(cluster, question, first.answer, next_question)
        assert second.answer == greedy_chat(question, MAX_CHAT_TOKENS, first.answer, next_question)
        assert prefill["tier_hits"] == (num_full - num_prompt_full) * BLOCK_SIZE
        assert prefill["prompt_tokens"] - num_computed == second.num_prompt_tokens - num_full * BLOCK_SIZE
        cluster.check_integrity()


class Turn(NamedTuple):
    """The end of a conversation."""

    answer: str
    num_prompt_tokens: int
    num_tokens: int  # prompt and answer


async def chat(cluster: Cluster, *texts: str) -> Turn:
    """The greedy answer to the last of `texts`, which user and assistant said in turn."""
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]
    body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": MAX_CHAT_TOKENS, "temperature": 0}
    async with httpx.AsyncClient(timeout=150) as client:
        response = (await client.post(f"{cluster.url}/v1/chat/completions", json=body)).raise_for_status().json()
    usage = response["usage"]
    return Turn(response["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["total_tokens"])
