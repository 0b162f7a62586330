"""One checkout's engine on one thread: runs loads as told, one line of JSON each, and says where processor time went.

Run as a script with that checkout's code, of which it needs `common` only.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
import torch

from common.demo_model import demo_model_path
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.core import EngineCore
from common.engine.executor.inproc import InprocExecutor
from common.engine.messages import AddRequest, EngineCoreOutputs
from common.types import RequestId, SamplingParams

NOT_STEADY = 2  # steps at either end of a run that are left out of medians
_TAKES_OUTPUTS = {"on_outputs", "on_news"} & set(inspect.signature(EngineCore).parameters)  # on_news: before 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """Random prompts that arrive at once, and the engine that serves them: equal settings share one."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    temperature: float
    is_caching: bool
    num_blocks: int
    seed: int


@dataclass(frozen=True, slots=True)
class Times:
    """Processor seconds of the step loop's thread, by phase."""

    schedule: float
    prepare: float
    forward: float
    sample: float
    update: float
    encode: float

    @property
    def overhead(self) -> float:
        """All but the forward pass."""
        return self.schedule + self.prepare + self.sample + self.update + self.encode


@dataclass(frozen=True, slots=True)
class Run:
    """The times of a load."""

    step: Times  # median of the steps that gave every request one token
    total: Times  # arrivals included, as part of schedule
    digest: str  # of all tokens


class _Engine:
    """An EngineCore whose clock is the processor time of its thread."""

    def __init__(self, *, is_caching: bool, num_blocks: int) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(demo_model_path()), num_threads=1),
            cache=CacheConfig(enable_prefix_caching=is_caching, num_blocks=num_blocks),
            scheduler=SchedulerConfig(target_itl_ms=None),  # no prompt waits for a stream
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._num_requests = 0
        self._core = EngineCore(
            config,
            InprocExecutor(config),
            on_wakeup=lambda: None,
            on_failure=_raise,
            **dict.fromkeys(_TAKES_OUTPUTS, lambda _: None),
            clock=time.thread_time,
        )

    def run(self, load: Load) -> Run:
        """Serves the load alone. What is cached is no part of it: prompts are new."""
        requests = self._requests(load)
        tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        gc.collect()
        began = self._now()
        self._core.begin_commands()
        for request in requests:
            self._core.receive(request)
            self._core.add_request(request)
        steps = [_between(began, self._now())]
        steady = []
        while self._core.has_work:
            outputs, times = self._step()
            steps.append(times)
            if len(outputs.outputs) == load.num_prompts:
                steady.append(times)
            for output in outputs.outputs:
                tokens[output.request_id] += [token.token_id for token in output.tokens]
        digest = hashlib.sha256(repr(list(tokens.values())).encode()).hexdigest()
        return Run(
            step=Times(*map(statistics.median, zip(*steady[NOT_STEADY:-NOT_STEADY], strict=True))),
            total=Times(*map(sum, zip(*steps, strict=True))),
            digest=digest,
        )

    def _step(self) -> tuple[EngineCoreOutputs, Sequence[float]]:
        before = self._now()
        outputs = self._core.step()
        times = _between(before, self._now())
        began = time.thread_time()
        self._encoder.encode(outputs)
        return outputs, (*times[:-1], time.thread_time() - began)

    def _now(self) -> Sequence[float]:
        phases = self._core.phases.seconds()
        return phases.schedule, phases.prepare, phases.forward, phases.sample, phases.update, 0.0

    def _requests(self, load: Load) -> list[AddRequest]:
        numbers = random.Random(load.seed)
        first, self._num_requests = self._num_requests, self._num_requests + load.num_prompts
        sampling = SamplingParams(
            temperature=load.temperature, max_tokens=load.output_tokens, ignore_eos=True, seed=load.seed
        )
        return [
            AddRequest(
                request_id=RequestId(f"request-{first + number}"),
                prompt_token_ids=[numbers.randrange(3, self._core.spec.vocab_size) for _ in range(load.prompt_tokens)],
                sampling=sampling,
            )
            for number in range(load.num_prompts)
        ]


def _between(before: Sequence[float], after: Sequence[float]) -> Sequence[float]:
    return [late - early for early, late in zip(before, after, strict=True)]


def _raise(error: Exception) -> None:
    raise error


def main() -> None:
    """Answers each load with its Run until the input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    engines: dict[tuple[bool, int], _Engine] = {}
    for line in sys.stdin:
        load = Load(**json.loads(line)[0])
        key = load.is_caching, load.num_blocks
        if key not in engines:
            engines[key] = _Engine(is_caching=load.is_caching, num_blocks=load.num_blocks)
        print(json.dumps(asdict(engines[key].run(load))), file=answers)


if __name__ == "__main__":
    main()
