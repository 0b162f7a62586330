"""A simulated pod: continuous batching, chunked prefill, prefix caching, preemption by recompute. What a step takes of
prompts is what the engine would take, by what the pod has learned of its own steps.

As in the engine, a request that arrives while a step runs is looked at when the step has ended, and figures are
published at the ends of steps. While all that runs decodes and nothing waits, several steps are taken as one stretch,
which an arrival cuts short at the end of the step that it falls into.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable
from typing import Protocol

from common.engine.worker.step_measurement import measure_steps
from common.step_budget import MIN_PREFILL_TOKENS, PromptRoom, measured_knee, prefill_work
from common.step_times import StepTimes
from planning.simulator.cache import BlockCache
from planning.simulator.hardware import Hardware, Step, StepModel

_LONGEST_STRETCH_S = 0.05  # as often as a pod reports
_UNLIKE = 1e-9  # share by which the durations of two steps in a row differ at least, as measured ones do


class Clock:
    """Simulated time: callbacks in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call it then."""
        heapq.heappush(self._events, (time_s, next(self._numbers), callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call it after a delay."""
        self.at(self.now + delay_s, callback)

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        while self._events:
            self.now, _, callback = heapq.heappop(self._events)
            callback()


class Listener(Protocol):
    """Who waits for a job."""

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """Its prompt has its turn for the first time."""

    def on_tokens(self, count: int, seconds_each: float) -> None:
        """So many tokens, so far apart; the last one now."""

    def on_end(self) -> None:
        """All tokens were produced."""


class PodRequest:
    """A request's leg on one pod."""

    def __init__(
        self,
        hashes: list[bytes],
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        handed_over: bool,
        listener: Listener,
    ) -> None:
        """`hashes` of prompt and answer. `handed_over`: the prompt's KV and the first token come from elsewhere.

        A prefill leg has one output token.
        """
        self.hashes = hashes
        self.listener = listener
        self.handed_over = handed_over
        self.num_tokens = num_prompt_tokens + handed_over  # known so far
        self.num_left = num_output_tokens - handed_over  # to be produced
        self.num_computed = 0
        self.num_filled = 0  # leading blocks that are full and computed
        self.held: list[bytes] = []  # cached blocks in use
        self.num_private = 0
        self.started = False
        self.order = 0.0  # the lowest is computed first
        self.owed = 0.0  # tokens of the next step: the part of one that drafts have brought so far

    @property
    def is_stream(self) -> bool:
        """Its next token is waited for."""
        return self.started and self.num_uncomputed == 1 and self.num_left > 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before, and for, the next one."""
        return self.num_tokens - self.num_computed


class SimulatedPod:
    """One pod. `on_change` is called when a step has ended, and before the next one begins."""

    def __init__(self, hardware: Hardware, clock: Clock, on_change: Callable[[SimulatedPod], None]) -> None:
        self.hardware = hardware
        self.cache = BlockCache(hardware.num_blocks)
        self.waiting: list[PodRequest] = []  # in order
        self.running: list[PodRequest] = []
        steps = measured_steps(hardware.steps, hardware.max_num_batched_tokens)
        measured_work = [(prefill_work(tokens, 0), seconds) for tokens, seconds in steps]
        self._step_times = StepTimes.measured(hardware.max_num_batched_tokens, measured_work)
        self._knee = measured_knee(steps) or 1.0
        self.last_step_s = 0.0
        self.last_step_tokens = 0
        self.num_preemptions = 0
        self.busy_s = 0.0
        self._clock = clock
        self._on_change = on_change
        self._arrived: list[PodRequest] = []  # since the step began
        self._stretch: tuple[float, float, int] | None = None  # start, seconds of a step, steps
        self._load = 0.0, 0  # work and context of one of its steps
        self._tokens_per_step = 1.0  # of a request that decodes
        self._chunks: list[tuple[PodRequest, int]] = []
        self._version = 0

    @property
    def num_queued_tokens(self) -> int:
        """Tokens not yet computed, waiting and running."""
        return sum(job.num_uncomputed for job in self.waiting if not job.handed_over) + sum(
            job.num_uncomputed for job in self.running
        )

    def submit(self, job: PodRequest) -> None:
        """Take a job."""
        self._arrived.append(job)
        if self._stretch is None:
            self._start()
        else:
            start, step_s, steps = self._stretch
            done = max(1, math.ceil((self._clock.now - start) / step_s))
            if done < steps:
                self._run(start, step_s, done)

    def _take_arrived(self) -> None:
        for job in self._arrived:
            job.order = self._clock.now
            if not job.handed_over:
                num_cached = self.cache.match(job.hashes[: job.num_tokens // self.hardware.block_size])
                num_cached *= self.hardware.block_size
                job.order += self._step_times.line.token_s * prefill_work(job.num_tokens - num_cached, num_cached)
            insort(self.waiting, job, key=_order)
        self._arrived.clear()

    def _start(self) -> None:
        self._take_arrived()
        self._make_room()
        self._admit_handed_over()
        hardware = self.hardware
        chunks = [(job, 1) for job in self.running if job.num_uncomputed == 1]
        context = sum(job.num_tokens for job, _ in chunks)
        num_decoding, attended, work = len(chunks), 0.0, float(len(chunks))
        room = self._room_for_prompts(sum(job.is_stream for job, _ in chunks), num_decoding, context)
        budget = hardware.max_num_batched_tokens - num_decoding
        prompts = sorted((job for job in self.running if job.num_uncomputed > 1), key=_order, reverse=True)
        while budget > 0 and (job := self._next_prompt(prompts, room)) is not None:
            chunk = min(room.chunk(job.num_uncomputed, job.num_computed), budget)
            if chunk:
                room.take(chunk, job.num_computed)
                budget -= chunk
                attended += chunk * (job.num_computed + chunk / 2)
                work += prefill_work(chunk, job.num_computed)
                chunks.append((job, chunk))
        if not chunks:
            return
        self._chunks = chunks
        tokens = sum(chunk for _, chunk in chunks)
        step_s = self._draft(Step(tokens - num_decoding, num_decoding, len(chunks), context, attended))
        self._load = work, context
        self._run(self._clock.now, step_s, self._stretch_steps(step_s))

    def _draft(self, step: Step) -> float:
        """Returns the seconds of the step. It has drafts if no prompts and a token takes less time with them."""
        steps, drafts = self.hardware.steps, self.hardware.drafts
        plain_s = steps.seconds(step)
        drafting_s = steps.seconds(step._replace(num_drafts=step.num_decoding * drafts.per_step))
        pays = not step.prompt_tokens and drafting_s < plain_s * drafts.tokens_per_step
        self._tokens_per_step = drafts.tokens_per_step if pays else 1.0
        return drafting_s if pays else plain_s

    def _room_for_prompts(self, num_streams: int, num_decoding: int, context: int) -> PromptRoom:
        times = self._step_times
        if not num_streams:
            return PromptRoom.alone(self._knee)
        if not times.is_known:
            return PromptRoom.least(MIN_PREFILL_TOKENS)
        return PromptRoom.beside_streams(
            times.line,
            step_s=times.predict(num_decoding, context),
            target_s=self.hardware.target_itl_s,
            least=MIN_PREFILL_TOKENS,
        )

    def _next_prompt(self, prompts: list[PodRequest], room: PromptRoom) -> PodRequest | None:
        """The next in order: one of those that are under way, the first last, or the first that waits, if it can be
        admitted."""
        if room.is_full:
            return None
        if self.waiting and not (prompts and prompts[-1].order < self.waiting[0].order) and self._admit():
            return self.running[-1]
        return prompts.pop() if prompts else None

    def _stretch_steps(self, step_s: float) -> int:
        """How many equal steps follow, if nothing arrives."""
        if self.waiting or any(job.num_uncomputed != 1 for job in self.running):
            return 1
        num_tokens = self.cache.num_free // len(self.running) * self.hardware.block_size
        num_tokens = min(num_tokens, *(job.num_left for job in self.running))
        return max(1, min(int(num_tokens / self._tokens_per_step), int(_LONGEST_STRETCH_S / step_s)))

    def _run(self, start: float, step_s: float, steps: int) -> None:
        self._stretch = (start, step_s, steps)
        self._version += 1
        version = self._version
        self._clock.at(start + step_s * steps, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version or self._stretch is None:
            return
        _, step_s, steps = self._stretch
        self._stretch = None
        self.busy_s += step_s * steps
        self._learn(step_s)
        for job, chunk in self._chunks:
            self._advance(job, chunk, steps, step_s)
        for job, _ in self._chunks:
            if not job.num_left:
                self.running.remove(job)
                self._release(job)
                job.listener.on_end()
        self._on_change(self)
        self._start()

    def _learn(self, step_s: float) -> None:
        """Learns once from a stretch: to do so from each of its steps, as the engine does, takes most of a simulation's
        time."""
        self._step_times.observe(step_s, *self._load)
        self.last_step_s = step_s * (1 + _UNLIKE) if step_s == self.last_step_s else step_s
        self.last_step_tokens = sum(chunk for _, chunk in self._chunks)

    def _advance(self, job: PodRequest, chunk: int, steps: int, step_s: float) -> None:
        """Tokens that one step brings come at once."""
        if job.is_stream:
            job.owed += steps * self._tokens_per_step
            sampled = min(int(job.owed), job.num_left)
            job.owed -= sampled
            job.num_computed += sampled
        else:
            job.num_computed += chunk
            sampled = int(not job.num_uncomputed)
        if sampled:
            job.num_tokens += sampled
            job.num_left -= sampled
            job.listener.on_tokens(steps, step_s)
        self._grow(job)
        self._fill(job)

    def _admit_handed_over(self) -> None:
        """Prompts that were computed elsewhere pass those that wait to be computed here."""
        for job in [job for job in self.waiting if job.handed_over]:
            if not self._admit(job):
                return
            self._fill(job)

    def _admit(self, job: PodRequest | None = None) -> bool:
        """Take a waiting job, the first unless one is named, if there is a slot and blocks."""
        if len(self.running) >= self.hardware.max_num_seqs:
            return False
        job = job or self.waiting[0]
        block_size = self.hardware.block_size
        whole = job.hashes[: (job.num_tokens - 1) // block_size]  # one token is computed in any case
        num_cached = self.cache.match(whole)
        num_new = -(-job.num_tokens // block_size) - num_cached
        watermark = self.hardware.num_blocks // 100 if self.running else 0
        if num_new + self.cache.num_idle(whole[:num_cached]) + watermark > self.cache.num_free:
            return False
        self.waiting.remove(job)
        job.held = whole[:num_cached]
        self.cache.share(job.held)
        self.cache.allocate(num_new)
        job.num_private = num_new
        job.num_filled = num_cached
        job.num_computed = num_cached * block_size
        if job.handed_over:
            job.num_computed = job.num_tokens - 1
            job.handed_over = False
        if not job.started:
            job.started = True
            job.listener.on_scheduled(num_cached * block_size)
        self.running.append(job)
        return True

    def _make_room(self) -> None:
        """Preempt the latest jobs until all others can grow by a block."""
        while len(self.running) > 1 and self.cache.num_free < len(self.running):
            needed = sum(self._lacks(job) for job in self.running)
            if needed <= self.cache.num_free:
                return
            job = max(self.running, key=_order)
            self.running.remove(job)
            self._release(job)
            job.num_computed = 0
            insort(self.waiting, job, key=_order)
            self.num_preemptions += 1

    def _lacks(self, job: PodRequest) -> int:
        """Blocks to take before the next token."""
        if job.num_left <= 1:
            return 0
        most = min(job.num_left, math.ceil(self.hardware.drafts.tokens_per_step))
        return max(0, -(-(job.num_tokens + most) // self.hardware.block_size) - len(job.held) - job.num_private)

    def _grow(self, job: PodRequest) -> None:
        if (lacks := min(self._lacks(job), self.cache.num_free)) > 0:
            self.cache.allocate(lacks)
            job.num_private += lacks

    def _fill(self, job: PodRequest) -> None:
        """Cache what is full now."""
        full = min(job.num_computed // self.hardware.block_size, len(job.hashes))
        while job.num_filled < full:
            block_hash = job.hashes[job.num_filled]
            job.num_filled += 1
            if job.num_private and self.cache.fill(block_hash):
                job.num_private -= 1
                job.held.append(block_hash)

    def _release(self, job: PodRequest) -> None:
        self.cache.release(job.held, job.num_private)
        job.held, job.num_private, job.num_filled = [], 0, 0


def measured_steps(model: StepModel, max_num_batched_tokens: int) -> list[tuple[int, float]]:
    """Returns tokens and seconds of the steps that an engine runs before its first request."""
    now = 0.0

    def run(tokens: int) -> None:
        nonlocal now
        now += model.seconds(Step(tokens, 0, 1, 0, tokens**2 / 2))

    return measure_steps(run, max_num_batched_tokens, lambda: now)


def _order(job: PodRequest) -> float:
    return job.order
