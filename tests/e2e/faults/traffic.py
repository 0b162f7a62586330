"""Streams of known answers, running at once, and what their clients have seen so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from common.engine.llm import LLM
from common.pb import inference_pb2, inference_pb2_grpc
from common.types import SamplingParams
from tests.e2e.reference import PROMPTS, greedy_completion

REQUEST_DEADLINE_S = 90.0
NUM_JOBS = 10
FILLING = "The sun is a star and the sky is blue. " * 20  # some 200 tokens: several steps of a prefill pod
MAX_TOKENS = 32
ANCHOR_EVERY = 4  # so many greedy jobs, one is also answered by `transformers`


class Job(NamedTuple):
    """One request and the tokens it must be answered with."""

    prompt: str
    params: SamplingParams
    token_ids: list[int]
    text: str


class Stream:
    """One request, seen from its client."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.token_ids: list[int] = []
        self.text = ""
        self.times: list[float] = []  # when each token came, monotonic seconds
        self.ended_at = 0.0
        self.ended = False
        self.error = ""  # why it ended otherwise than well

    @property
    def fault(self) -> str:
        """What is wrong with the answer; empty: nothing."""
        if self.error:
            return self.error
        if self.token_ids != self.job.token_ids:
            return f"wrong tokens: {self.token_ids}, expected {self.job.token_ids}"
        return "" if self.text == self.job.text else f"wrong text: {self.text!r}, expected {self.job.text!r}"

    @property
    def is_prefix(self) -> bool:
        """What came, if not all, is the answer's beginning."""
        return self.job.token_ids[: len(self.token_ids)] == self.token_ids and self.job.text.startswith(self.text)

    def next_at(self, num_tokens: int) -> float:
        """When it went on after its first `num_tokens`, or ended."""
        return self.times[num_tokens] if num_tokens < len(self.times) else self.ended_at

    async def run(
        self, stub: inference_pb2_grpc.InferenceAsyncStub, cache_salt: str, on_news: Callable[[], None]
    ) -> None:
        """Never fails: see `error`."""
        try:
            async for chunk in stub.GenerateStream(_request(self.job, cache_salt), timeout=REQUEST_DEADLINE_S):
                if chunk.token_ids and chunk.start_index != len(self.token_ids):
                    self.error = f"index {chunk.start_index} after {len(self.token_ids)} tokens"
                    break
                self.token_ids += chunk.token_ids
                self.text += chunk.text
                self.times += [time.monotonic()] * len(chunk.token_ids)
                on_news()
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.code().name} after {len(self.token_ids)} tokens: {error.details()}"
        self.ended = True
        self.ended_at = time.monotonic()
        on_news()


class Wave:
    """Streams through one router, all started at once."""

    def __init__(self, target: str, jobs: Sequence[Job], cache_salt: str) -> None:
        """What pods have cached under another salt is of no use: the prompts are computed."""
        self.streams = [Stream(job) for job in jobs]
        self._target = target
        self._cache_salt = cache_salt
        self._news = asyncio.Condition()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when every request has ended."""
        async with grpc.aio.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(stream.run(stub, self._cache_salt, self._changed.set) for stream in self.streams))

    async def until(self, condition: Callable[[list[Stream]], bool]) -> None:
        """Returns once the streams are so; waits for ever if they never are."""
        while not condition(self.streams):
            self._changed.clear()
            await self._changed.wait()

    @property
    def faults(self) -> list[str]:
        """What is wrong with the answers."""
        return [f"{stream.job.prompt[:12]!r}: {stream.fault}" for stream in self.streams if stream.fault]


def make_jobs() -> list[Job]:
    """Prompts of some 200 tokens, greedy and seeded in turn; the greedy ones compared with `transformers`."""
    asked = []
    for index in range(NUM_JOBS):
        greedy = index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9, seed=None if greedy else index, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        asked.append((f"{index}. {FILLING}{PROMPTS[index % len(PROMPTS)]}", params))
    with LLM() as llm:
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
    jobs = [
        Job(prompt, params, answer.token_ids, answer.text)
        for (prompt, params), answer in zip(asked, answers, strict=True)
    ]
    for job in jobs[::ANCHOR_EVERY]:
        assert job.text == greedy_completion(job.prompt, MAX_TOKENS, ignore_eos=True)
    return jobs


def _request(job: Job, cache_salt: str) -> inference_pb2.GenerateRequest:
    options = inference_pb2.GenerateOptions(
        temperature=job.params.temperature,
        seed=job.params.seed,
        max_tokens=job.params.max_tokens,
        ignore_eos=job.params.ignore_eos,
    )
    return inference_pb2.GenerateRequest(text=job.prompt, options=options, cache_salt=cache_salt)
