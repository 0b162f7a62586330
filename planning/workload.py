"""The requests that a plan is for: of given lengths and a given rate, or recorded in a file."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.recorded_trace import MAX_RECORDED_TOKENS, RECORDED_BLOCK, read_recorded
from common.types import HASH_BYTES
from planning.simulator.hardware import NO_DRAFTS, Drafts
from planning.simulator.trace import Session, Trace, Turn, chain, poisson


class Request(NamedTuple):
    """One request. Prompts with the same leading `prefix` ids begin with the same tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[int, ...] = ()  # each stands for `RECORDED_BLOCK` tokens


class Workload(NamedTuple):
    """Requests in the order of their arrival, at the rate that the plan is for."""

    name: str
    requests: Sequence[Request]
    rate: float  # requests per second
    drafts: Drafts = NO_DRAFTS  # that its texts allow

    @property
    def mean_prompt_tokens(self) -> float:
        """The mean number of tokens in a prompt."""
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        """The mean number of tokens in an answer."""
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.requests)

    def trace(self, scale: float, block_size: int) -> Trace:
        """Returns what the simulator serves: these requests, `scale` times as fast, in blocks of so many tokens."""
        sessions = [
            Session(str(number), request.arrival_s / scale, (_turn(number, request, block_size),))
            for number, request in enumerate(self.requests)
        ]
        return Trace(self.name, sessions, shares=any(request.prefix for request in self.requests))


def synthetic(rate: float, isl: int, osl: int, num_requests: int, *, spread: float = 0.0, seed: int = 1) -> Workload:
    """Returns Poisson arrivals of requests without a common prefix. `spread`: sigma of the log-normal distribution of
    their lengths around `isl` and `osl`; 0: all have these lengths."""
    choices = random.Random(f"{seed} arrivals")
    lengths = random.Random(f"{seed} lengths")
    requests = [
        Request(arrival_s, _length(lengths, isl, spread), _length(lengths, osl, spread))
        for arrival_s in poisson(choices, num_requests, rate)
    ]
    return Workload(f"{isl} prompt tokens, {osl} answer tokens", requests, rate)


def read_trace(path: Path, rate: float | None, max_requests: int) -> Workload:
    """Reads a trace: JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`.

    `rate`: requests per second to which its times are scaled; None: its own. Of a longer file the first `max_requests`
    requests count. Raises ConfigError, which names the line that is wrong.
    """
    read = read_recorded(path, max_requests, option="trace")
    if len(read) < 2:
        raise ConfigError(f"--trace: {path} has fewer than two requests", param="trace")
    start = read[0].timestamp
    duration_s = (read[-1].timestamp - start) / 1e3
    if not duration_s:
        raise ConfigError(f"--trace: {path}: all requests have the same timestamp", param="trace")
    own_rate = (len(read) - 1) / duration_s
    stretch = own_rate / rate if rate else 1.0
    requests = [
        Request((line.timestamp - start) / 1e3 * stretch, line.input_length, line.output_length, tuple(line.hash_ids))
        for line in read
    ]
    return Workload(path.name, requests, rate or own_rate)


def _turn(number: int, request: Request, block_size: int) -> Turn:
    """The hashes of its blocks: those of the shared beginning, then its own."""
    num_blocks = request.num_prompt_tokens // block_size
    per_id = max(1, RECORDED_BLOCK // block_size)
    prompt = b""
    for position, prefix_id in enumerate(request.prefix):
        count = min(per_id, num_blocks - position * per_id)
        if count <= 0:
            break
        prompt = chain(prompt, f"id {prefix_id}", count)
    prompt = chain(prompt, f"request {number}", num_blocks - len(prompt) // HASH_BYTES)
    num_tokens = request.num_prompt_tokens + request.num_output_tokens
    whole = chain(prompt, f"answer {number}", num_tokens // block_size - num_blocks)
    return Turn(0.0, prompt, whole, request.num_prompt_tokens, request.num_output_tokens)


def _length(choices: random.Random, mean: int, sigma: float) -> int:
    if not sigma:
        return mean
    return min(max(1, round(choices.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))), MAX_RECORDED_TOKENS)
