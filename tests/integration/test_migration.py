"""Streams whose decode pods leave one after the other are the answers that they would have been."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.integration.cluster import DEADLINE_S, Stream, running_cluster
from tests.tiny_models import prompt_of

MAX_TOKENS = 250
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "seed": 11}


async def whole(cluster, prompt, options):
    stream = Stream(cluster, prompt, options)
    await stream.reading
    return stream


async def all_options(cluster, prompt):
    """Options, some of which depend on the answer: what stops it is to come late."""
    plain = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    sampled = {**SAMPLED, "max_tokens": MAX_TOKENS}
    told = await whole(cluster, prompt, sampled)
    late = told.tokens[-40]
    return [
        {**plain, "num_logprobs": 3},
        {**sampled, "presence_penalty": 0.7, "frequency_penalty": 0.4, "num_logprobs": 0},
        {**plain, "repetition_penalty": 1.4},
        {**sampled, "stop": [told.text[-30:-25]]},
        {**sampled, "stop_token_ids": [late], "min_tokens": told.tokens.index(late) + 3},
        {**sampled, "stop": [told.text[2:5]], "min_tokens": 60},
    ]


@pytest.mark.parametrize("num_prefill", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_no_seam_in_any_option(tmp_path, num_prefill):
    prompt = prompt_of(45)
    async with running_cluster(tmp_path, "llama", num_prefill=num_prefill, num_decode=3) as cluster:
        options = await all_options(cluster, prompt)
        expected = [await whole(cluster, prompt, each) for each in options]
        streams = [Stream(cluster, prompt, each) for each in options]
        for num_tokens in (8, 30):
            for stream in streams:
                await stream.reach(num_tokens)
            await cluster.decode.pop().stop()  # as at the end of a drain
        for stream, right, each in zip(streams, expected, options, strict=True):
            await stream.reading
            assert stream.tokens == right.tokens, each
            assert (stream.text, stream.finish_reason) == (right.text, right.finish_reason), each
            assert len(stream.logprobs) == len(right.logprobs)
            for got, wanted in zip(stream.logprobs, right.logprobs, strict=True):
                assert got == pytest.approx(wanted, abs=1e-3)
        moved = cluster.router.metrics.registry.get_sample_value(
            "baton_router_redispatch_total", {"reason": "unavailable"}
        )
        assert moved >= 2


async def test_no_seam_in_several_choices_over_http(tmp_path):
    body = {"prompt": prompt_of(30), "n": 4, "max_tokens": MAX_TOKENS, "stream": True, **SAMPLED}

    def lines_of(response):
        return (json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {"))

    async def read(events, texts, num_chars=None):
        async for event in events:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["text"]
            if num_chars is not None and min(map(len, texts)) >= num_chars:
                return

    async with (
        running_cluster(tmp_path, "llama", num_decode=2) as cluster,
        httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client,
    ):
        expected, texts = [""] * 4, [""] * 4
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await read(lines_of(response), expected)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            events = lines_of(response)
            await read(events, texts, num_chars=5)
            await cluster.decode.pop().stop()
            await read(events, texts)
    assert len(set(expected)) == 4
    assert texts == expected
