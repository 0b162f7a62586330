"""Sends a workload to an endpoint, and measures.

In an open loop every request has a time at which it is sent, whatever became of those before it: a slow endpoint does
not slow the load down, so that no wait is left out of the figures (coordinated omission). What the load generator
itself is late, because it lacks time or because max_concurrency is reached, is kept in `Sample.delay_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from loadgen.endpoint import Endpoint, Prompt
from loadgen.http_client import Clock
from loadgen.samples import Failure, Sample
from loadgen.workload import Conversation, Turn

OnEnd = Callable[[Sample], None]
_NOT_SENT = Failure("not sent", "an earlier turn of the conversation failed")


class Run(NamedTuple):
    """The measurements of a run."""

    samples: Sequence[Sample]  # one for each turn that has ended, in the order of the workload
    started_s: float  # by the load generator's clock
    duration_s: float  # until the last answer was complete
    cpu_s: float  # processor time of the load generator
    num_unfinished: int = 0  # turns that had not ended, or not begun, when the run was interrupted


class RunInterrupted(asyncio.CancelledError):
    """The run was cancelled. `run` is what was measured until then."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


async def run_load(
    conversations: Sequence[Conversation],
    endpoint: Endpoint,
    *,
    max_concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    on_end: OnEnd = lambda _: None,
) -> Run:
    """Sends all conversations, at most `max_concurrency` at once, and returns when all have ended. Raises
    RunInterrupted if it is cancelled."""
    slots: Any = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    samples: list[list[Sample]] = []
    with _short_collections():
        started_s, started_cpu_s = clock(), time.process_time()

        def measured() -> Run:
            ended = [sample for each in samples for sample in each if sample.has_ended]
            num_unfinished = sum(len(each.turns) for each in conversations) - len(ended)
            cpu_s = time.process_time() - started_cpu_s
            return Run(ended, started_s, clock() - started_s, cpu_s, num_unfinished)

        try:
            async with asyncio.TaskGroup() as tasks:
                for conversation in conversations:
                    due_s = None if conversation.start_s is None else started_s + conversation.start_s
                    if due_s is not None:
                        await _sleep_until(due_s, clock)
                    samples.append([Sample(due_s), *(Sample(None) for _ in conversation.turns[1:])])
                    talk = _Conversing(conversation.turns, samples[-1], endpoint, clock, on_end)
                    tasks.create_task(talk.run(slots))
        except asyncio.CancelledError:
            raise RunInterrupted(measured()) from None
        return measured()


class _Conversing:
    """One conversation under way."""

    def __init__(
        self, turns: Sequence[Turn], samples: Sequence[Sample], endpoint: Endpoint, clock: Clock, on_end: OnEnd
    ) -> None:
        self._turns = turns
        self._samples = samples
        self._endpoint = endpoint
        self._clock = clock
        self._on_end = on_end
        self._said: list[tuple[str, str]] = []  # turns and their answers

    async def run(self, slots: Any) -> None:
        """Sends the turns one after the other; the first failure ends the conversation."""
        async with slots:
            for number, (turn, sample) in enumerate(zip(self._turns, self._samples, strict=True)):
                if turn.wait_s:
                    sample.due_s = self._clock() + turn.wait_s
                    await _sleep_until(sample.due_s, self._clock)
                answer = await self._endpoint.ask(self._prompt(turn), turn.num_output_tokens, sample)
                self._on_end(sample)
                if sample.failure is not None:
                    self._give_up(self._samples[number + 1 :])
                    return
                self._said.append((turn.text, answer))

    def _prompt(self, turn: Turn) -> Prompt:
        if turn.messages:
            return turn.messages
        return self._endpoint.conversation(self._said, turn.text) if self._said else turn.text

    def _give_up(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.failure = _NOT_SENT
            self._on_end(sample)


async def _sleep_until(when_s: float, clock: Clock) -> None:
    while (left_s := when_s - clock()) > 0:  # noqa: ASYNC110  (again if the timer, in milliseconds, was early)
        await asyncio.sleep(left_s)


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Keeps what is there before the run, such as all prompts, out of garbage collections, whose time would show in the
    gaps between tokens."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
