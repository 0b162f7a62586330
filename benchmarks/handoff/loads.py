"""Loads on a running cluster, and their outcomes. All times are seconds."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.client import Client, Generation, in_background

PROBE_TOKENS = 64  # prompt of a stream whose handoff is measured
_PROBE_OUTPUT_TOKENS = 8
_CALIBRATION = (64, 320)  # prompts from whose times the time of a token is taken
_CALIBRATION_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Streams handed over by a prefill pod that never rests."""

    gaps: list[float]  # from first to second token, less the median of the stream's later gaps
    decode_s: float  # a decode step, median
    step_s: float  # a step of the prefill pod, median


@dataclass(frozen=True, slots=True)
class Beside:
    """Streams beside long prompts on one pod."""

    gaps: list[float]  # between tokens
    tokens_per_s: float  # of all streams
    decode_s: float  # gap between tokens before there were long prompts, median
    least_prompt_s: float  # a prompt of MIN_PREFILL_TOKENS takes so long, median


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Prompts that come at the same time."""

    ttfts: list[float]
    tokens_per_s: float  # of the prompts


async def token_time(client: Client) -> float:
    """Seconds that the prefill pod takes for one more token of a prompt."""
    times: dict[int, list[float]] = {length: [] for length in _CALIBRATION}
    for _ in range(_CALIBRATION_REPEATS):
        for length, taken in times.items():
            taken.append((await client.complete(length, 1)).ttft_s)
    (short, short_s), (long, long_s) = ((length, statistics.median(taken)) for length, taken in times.items())
    return max(long_s - short_s, 1e-6) / (long - short)


async def handoffs(client: Client, *, step_tokens: int, step_s: float, seconds: float, min_samples: int) -> Handoffs:
    """Streams one after the other while the prefill pod computes prompts of `step_tokens`, one each step, which takes
    about `step_s`; for so many seconds, and until there are `min_samples`."""
    ends: list[float] = []

    async def occupy(pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            generation = await client.complete(step_tokens, 1)
            ends.append(generation.token_times[-1])

    streams: list[Generation] = []
    # One prompt waits whenever another is computed. The pause keeps the two from getting into one step.
    async with in_background(occupy(0.0), occupy(step_s / 2)):
        await asyncio.sleep(2 * step_s)
        until = time.perf_counter() + seconds
        while len(streams) < min_samples or time.perf_counter() < until:
            await asyncio.sleep(client.random.random() * step_s)  # in any phase of a step
            streams.append(await client.complete(PROBE_TOKENS, _PROBE_OUTPUT_TOKENS))
    decode_steps = [statistics.median(stream.gaps_s[1:]) for stream in streams]
    return Handoffs(
        gaps=[stream.gaps_s[0] - decode_s for stream, decode_s in zip(streams, decode_steps, strict=True)],
        decode_s=statistics.median(decode_steps),
        step_s=statistics.median(later - earlier for earlier, later in itertools.pairwise(sorted(ends))),
    )


async def first_gaps(client: Client, *, num_streams: int, num_prompt_tokens: int, num_tokens: int) -> list[float]:
    """Gaps between the first and the second token of streams that start at once, in median ITLs."""
    streams = await client.complete_at_once(num_streams, num_prompt_tokens, num_tokens)
    itl = statistics.median(gap for stream in streams for gap in stream.gaps_s[1:])
    return [stream.gaps_s[0] / itl for stream in streams]


async def beside_prompts(
    client: Client,
    *,
    num_streams: int,
    num_prompt_tokens: int,
    num_tokens: int,
    long_prompt_tokens: int,
    interval_s: float,
    seconds: float,
    least_prompt_tokens: int,
) -> Beside:
    """`num_streams` streams for so many seconds, a new one for each that ends, beside a long prompt every
    `interval_s`."""
    least = [(await client.complete(least_prompt_tokens, 1)).ttft_s for _ in range(_CALIBRATION_REPEATS)]
    alone = await client.complete_at_once(num_streams, num_prompt_tokens, num_tokens // 8)
    streams = [client.send(num_prompt_tokens, num_tokens) for _ in range(num_streams)]

    async def go_on(generation: Generation) -> None:
        while True:
            with generation:
                await generation.finish()
            generation = client.send(num_prompt_tokens, num_tokens)
            streams.append(generation)

    async def disturb() -> None:
        async with asyncio.TaskGroup() as prompts:
            while True:
                prompts.create_task(client.complete(long_prompt_tokens, 1))
                await asyncio.sleep(interval_s)

    async with in_background(*map(go_on, streams)):
        await asyncio.gather(*(generation.begin() for generation in streams))
        started = time.perf_counter()
        async with in_background(disturb()):
            await asyncio.sleep(seconds)
        ended = time.perf_counter()
    return Beside(
        gaps=[gap for generation in streams for gap in _gaps_within(generation, started, ended)],
        tokens_per_s=sum(started < at <= ended for each in streams for at in each.token_times) / (ended - started),
        decode_s=statistics.median(_steady_gaps(alone)),
        least_prompt_s=statistics.median(least),
    )


async def prompts_at_once(client: Client, *, num_prompts: int, num_prompt_tokens: int) -> AtOnce:
    """First tokens of prompts that come at the same time, while the pod computes one that came just before: else the
    first of them would be alone in a step."""
    with client.send(num_prompt_tokens // 2, 1) as before:
        answers = await client.complete_at_once(num_prompts, num_prompt_tokens, 1)
    took = max(answer.token_times[-1] for answer in answers) - before.sent_at
    return AtOnce([answer.ttft_s for answer in answers], (num_prompts + 0.5) * num_prompt_tokens / took)


async def steady_itls(client: Client, *, num_streams: int, num_prompt_tokens: int, num_tokens: int) -> list[float]:
    """Gaps between tokens while all of several streams decode."""
    return _steady_gaps(await client.complete_at_once(num_streams, num_prompt_tokens, num_tokens))


def _steady_gaps(streams: Sequence[Generation]) -> list[float]:
    all_began = max(stream.token_times[0] for stream in streams)
    first_ended = min(stream.token_times[-1] for stream in streams)
    return [gap for stream in streams for gap in _gaps_within(stream, all_began, first_ended)]


def _gaps_within(stream: Generation, started: float, ended: float) -> list[float]:
    """Gaps that ended between the two times."""
    return [later - earlier for earlier, later in itertools.pairwise(stream.token_times) if started < later <= ended]
