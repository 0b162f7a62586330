"""A simulated pod publishes its figures when a real one would, and they show what the real ones show."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from planning.simulator.clock import Clock
from planning.simulator.hardware import Drafts, Hardware
from planning.simulator.pod import Listener, PodRequest, SimulatedPod
from planning.steps import StepFit

BLOCK_SIZE = 16
PROMPT = 128  # tokens
PROMPT_S, DECODE_S = 0.2, 0.01  # of a step
HARDWARE = Hardware(
    name="steady",
    steps=StepFit(
        prefill_base_s=PROMPT_S,
        decode_base_s=DECODE_S,
        prompt_token_s=0.0,
        attended_s=0.0,
        decode_request_s=0.0,
        context_token_s=0.0,
    ),
    handoff_s=0.001,
    handoff_token_s=0.0,
    num_blocks=1000,
    block_size=BLOCK_SIZE,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
)


class Silent:
    """A Listener that drops everything."""

    def on_scheduled(self, num_cached_tokens: int) -> None:
        pass

    def on_tokens(self) -> None:
        pass

    def on_end(self) -> None:
        pass


class Counted(Silent):
    """A Listener that counts the steps that brought it tokens."""

    num_steps = 0

    def on_tokens(self) -> None:
        self.num_steps += 1


def job(name: int, num_output_tokens: int, listener: Listener = Silent(), **settings) -> PodRequest:  # noqa: B008
    tokens = [name] * (PROMPT + num_output_tokens)
    return PodRequest(tokens, PROMPT, num_output_tokens, listener=listener, **settings)


class Watched:
    """A pod, and what it said at the end of each of its steps."""

    def __init__(self, hardware: Hardware = HARDWARE) -> None:
        self.clock = Clock()
        self.times: list[float] = []
        self.num_queued_tokens: list[int] = []
        self.step_s: list[float] = []
        self.pod = SimulatedPod(hardware, self.clock, self._note)

    def _note(self, pod: SimulatedPod) -> None:
        self.times.append(self.clock.now)
        self.num_queued_tokens.append(pod.stats.num_queued_tokens)
        self.step_s.append(pod.stats.last_step_s)


def test_a_pod_speaks_at_the_ends_of_steps_and_not_of_what_came_during_one() -> None:
    watched = Watched()
    watched.clock.at(0.0, lambda: watched.pod.submit(job(1, 1)))
    watched.clock.at(PROMPT_S / 2, lambda: watched.pod.submit(job(2, 1)))
    watched.clock.run()
    assert watched.times == pytest.approx([PROMPT_S, 2 * PROMPT_S])
    assert watched.num_queued_tokens == [0, 0]


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(1, 0), (6, 2), (101, 40)])
def test_steps_bring_as_many_tokens_as_drafts_allow_and_take_as_long_as_these(num_tokens: int, num_steps: int) -> None:
    """2.5 tokens in a step, which also verifies drafts that are wrong."""
    listener = Counted()
    steps, drafts = msgspec.structs.replace(HARDWARE.steps, decode_request_s=0.001), Drafts(2.5, acceptance=0.75)
    watched = Watched(HARDWARE._replace(steps=steps, drafts=drafts))
    watched.clock.at(0.0, lambda: watched.pod.submit(job(1, num_tokens, listener)))
    watched.clock.run()
    assert watched.clock.now == pytest.approx(PROMPT_S + num_steps * (DECODE_S + 0.001 * (1 + 2)))
    assert listener.num_steps == 1 + num_steps
    assert watched.pod.check() == []


def test_steps_with_prompts_have_no_drafts() -> None:
    """Prompts that are computed beside a stream: as long as there are any, a step brings it one token."""
    watched = Watched(HARDWARE._replace(drafts=Drafts(4.0), max_num_batched_tokens=PROMPT))
    watched.clock.at(0.0, lambda: watched.pod.submit(job(0, 21)))
    for number in range(1, 9):
        watched.clock.at(PROMPT_S - DECODE_S / 2, partial(watched.pod.submit, job(number, 1)))
    watched.clock.run()
    assert len(watched.times) >= 1 + 8 + (20 - 8) / 4


def test_no_two_steps_in_a_row_look_like_the_same_one() -> None:
    watched = Watched()
    for number in range(4):
        watched.clock.at(number, lambda number=number: watched.pod.submit(job(number, 1)))  # type: ignore[misc]
    watched.clock.run()
    assert watched.step_s == pytest.approx([PROMPT_S] * 4)
    assert all(before != after for before, after in zip(watched.step_s, watched.step_s[1:], strict=False))


def test_a_consumer_has_its_blocks_before_its_kv_is_there_and_computes_nothing_of_its_prompt() -> None:
    watched, listener = Watched(), Counted()
    consumer = job(1, 4, listener, role="consumer")
    watched.clock.at(0.0, lambda: watched.pod.submit(consumer))
    watched.clock.at(1.0, lambda: watched.pod.deliver(consumer))
    watched.clock.at(0.5, lambda: watched.num_queued_tokens.append(watched.pod.stats.num_free_blocks))
    watched.clock.run()
    assert watched.num_queued_tokens[0] == HARDWARE.num_blocks - PROMPT // BLOCK_SIZE
    assert watched.times == pytest.approx([1 + step * DECODE_S for step in (1, 2, 3)])
    assert listener.num_steps == 3, "the first token came from the prefill pod"
    assert watched.pod.check() == []
