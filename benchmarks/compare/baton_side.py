"""Baton's engine as one of the sides. The prefix cache is off: repeats would find their prompts in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from benchmarks.compare.side import largest
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from common.engine.messages import AddRequest
from common.types import NO_SAMPLING, PoolingParams, RequestId, SamplingParams

_SHARE_OF_GPU = 0.3  # for the KV cache: the sides share one device
_OPTIONS: dict[str, dict[str, Any]] = {"invariant": {"batch_invariant": True}, "baton_ngram": {"speculative": "ngram"}}


class Baton:
    """See Generator."""

    def __init__(self, client: InprocClient) -> None:
        self._client = client
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        tokens: dict[RequestId, list[int]] = {}
        for prompt in prompts:
            request_id = RequestId(f"r{self._num_requests}")
            self._num_requests += 1
            tokens[request_id] = []
            self._client.add_request(
                AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling)
            )
        while self._client.has_work:
            for output in self._client.step().outputs:
                tokens[output.request_id].extend(token.token_id for token in output.tokens)
            on_step(min(map(len, tokens.values())))
        return list(tokens.values())

    def close(self) -> None:
        """See Generator."""
        self._client.close()


class BatonPooling(Baton):
    """See Generator. Embeds, see benchmarks.compare.pooling."""

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        numbers: dict[RequestId, bytes] = {}
        for prompt in prompts:
            request_id = RequestId(f"r{self._num_requests}")
            self._num_requests += 1
            numbers[request_id] = b""
            self._client.add_request(
                AddRequest(
                    request_id=request_id,
                    prompt_token_ids=list(prompt),
                    sampling=NO_SAMPLING,
                    pooling=PoolingParams(task="embed"),
                )
            )
        while self._client.has_work:
            numbers |= {output.request_id: output.pooled for output in self._client.step().outputs}
        on_step(1)
        return [largest(np.frombuffer(each, "<f4").tolist()) for each in numbers.values()]


def load(name: str, directory: str, dtype: str, quantization: str | None) -> Baton:
    """Returns the side of this name with a model. Raises RuntimeError if its kernels compute something else."""
    side = BatonPooling if name == "baton_pooling" else Baton
    client = InprocClient(offline_config(directory, dtype, quantization, **_OPTIONS.get(name, {})))
    if client.spec.kernels_failed:  # it would be served all the same, tens of times as slowly; the log says why
        client.close()
        raise RuntimeError(f"no kernels for {directory} in {dtype}, quantization {quantization}")
    return side(client)


def offline_config(
    directory: str,
    dtype: str,
    quantization: str | None = None,
    *,
    batch_invariant: bool = False,
    speculative: str | None = None,
) -> EngineConfig:
    """Returns the configuration of offline generation: no stream waits for a step."""
    return EngineConfig(
        model=ModelConfig(
            model=directory, dtype=cast("DType", dtype), quantization=quantization, batch_invariant=batch_invariant
        ),
        cache=CacheConfig(
            enable_prefix_caching=False, memory_fraction=_SHARE_OF_GPU if torch.cuda.is_available() else None
        ),
        scheduler=SchedulerConfig(target_itl_ms=None),
        speculation=SpeculationConfig(speculative=speculative),
    )
