"""Requests to an engine in its process, one after the other or all at once."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.client.inproc import InprocClient
from common.engine.messages import AddRequest
from common.types import RequestId, SampledToken, SamplingParams

OUTPUT_TOKENS = 12
SAMPLING = SamplingParams(temperature=1.0, seed=7, max_tokens=OUTPUT_TOKENS, ignore_eos=True, num_logprobs=3)


def alone(
    client: InprocClient, prompts: Sequence[Sequence[int]], adapters: Sequence[bytes] | None = None
) -> list[list[SampledToken]]:
    adapters = adapters or [b""] * len(prompts)
    return [run(client, [prompt], [0], [own])[0] for prompt, own in zip(prompts, adapters, strict=True)]


def run(
    client: InprocClient,
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[int],
    adapters: Sequence[bytes] | None = None,
) -> list[list[SampledToken]]:
    """Tokens of requests, each of which arrives at a step. `adapters`: their digests, empty where there is none."""
    adapters = adapters or [b""] * len(prompts)
    found: dict[RequestId, list[SampledToken]] = {RequestId(f"r{index}"): [] for index in range(len(prompts))}
    step = 0
    while step <= max(arrivals) or client.has_unfinished:
        for request_id, prompt, arrival, adapter in zip(found, prompts, arrivals, adapters, strict=True):
            if arrival == step:
                tokens = list(prompt)
                client.add_request(
                    AddRequest(request_id=request_id, prompt_token_ids=tokens, sampling=SAMPLING, adapter=adapter)
                )
        for output in client.step().outputs:
            found[output.request_id] += output.tokens
        step += 1
    assert all(len(tokens) == OUTPUT_TOKENS for tokens in found.values())
    return list(found.values())
