"""Drafts are verified as far as they pay."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from common.engine.contract.step import NOTHING_ASKED, Asked, Drafting
from common.engine.messages import EngineStats, join_stats
from common.engine.scheduler.draft_depth import Acceptance, Candidate, DraftDepth, best_depths
from common.engine.scheduler.totals import DraftTotals
from common.step_times import Line
from tests.unit.common.engine.scheduler_factories import FakeEngine, create_proposer, create_request, create_scheduler

CPU = Line(0.0245, 0.00112, 2e-7)  # a step of one row takes 26 ms, one of 32 rows 60 ms
GPU = Line(0.010, 1e-5, 1e-9)
NUM_DRAFTS = 6
CONTEXT = 500


def expected_tokens(chances: list[float], depth: int) -> float:
    return sum(math.prod(chances[: number + 1]) for number in range(depth))


@pytest.mark.parametrize("seed", range(60))
def test_the_time_per_token_is_the_least_of_all_choices(seed: int) -> None:
    choices = random.Random(seed)
    all_chances = [[choices.random() ** 0.5 for _ in range(4)] for _ in range(3)]
    candidates = [Candidate(choices.randrange(4), CONTEXT, chances.__getitem__) for chances in all_chances]
    costs = [choices.uniform(0.01, 0.3) for _ in candidates]
    num_tokens, plain_s, drafting_s = choices.randrange(3, 9), 1.0, choices.uniform(1.0, 1.3)

    def time_per_token(depths: tuple[int, ...]) -> float:
        seconds = drafting_s + sum(depth * cost for depth, cost in zip(depths, costs, strict=True))
        gained = sum(map(expected_tokens, all_chances, depths))
        return (seconds if any(depths) else plain_s) / (num_tokens + gained)

    found = best_depths(candidates, costs, num_tokens, plain_s, drafting_s, room=99)
    possible = itertools.product(*(range(each.num_drafts + 1) for each in candidates))
    assert time_per_token(tuple(found)) == pytest.approx(min(map(time_per_token, possible)))


@pytest.mark.parametrize("room", range(5))
def test_the_room_goes_to_the_drafts_that_are_likeliest(room: int) -> None:
    candidates = [Candidate(3, CONTEXT, ([chance] * 4).__getitem__) for chance in (0.5, 0.9, 0.2)]
    found = best_depths(candidates, [1e-4] * 3, 3, 1.0, 1.0, room)
    assert found == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0], [1, 3, 0]][room]


def test_acceptance_is_learned_for_each_position_from_what_was_judged() -> None:
    pod = Acceptance()
    request = Acceptance(pod)
    for _ in range(200):
        request.observe(4, 2)
    assert min(request.chance(0), request.chance(1)) > 0.95
    assert request.chance(2) < 0.05
    assert request.chance(3) == 0.5, "after a wrong draft, the others are not judged"
    assert (request.num_verified, request.num_accepted) == (pod.num_verified, pod.num_accepted) == (800, 400)
    assert Acceptance(pod).chance(2) == pytest.approx(pod.chance(2)), "a new request is expected to be like the others"
    pod.observe(40, 40)
    assert pod.chance(30) == pod.chance(15)


class Batch:
    """Requests whose drafts are right with a chance that changes, on a machine whose steps take known times."""

    def __init__(self, machine: Line, size: int, slowness: float = 1.0) -> None:
        self._machine = machine
        self._size = size
        self._slowness = slowness  # of steps with drafts
        self._noise = random.Random(1)
        self._drawn = random.Random(2)
        measured = [(float(tokens), machine.at(tokens, 0)) for tokens in (1, 64, 128, 256)]
        self._depth = DraftDepth(256, measured)
        self._requests = [Acceptance(self._depth.acceptance) for _ in range(size)]

    def run(self, num_steps: int, chance: float) -> tuple[float, float]:
        """Tokens per second, relative to those without drafts; mean depth."""
        seconds = plain_s = 0.0
        num_tokens = num_drafts = 0
        num_context = self._size * CONTEXT
        for _ in range(num_steps):
            candidates = [Candidate(NUM_DRAFTS, CONTEXT, each.chance) for each in self._requests]
            depths = self._depth.choose(candidates, self._size, num_context, room=2048)
            num_rows, noise = self._size + sum(depths), self._noise.uniform(0.97, 1.03)
            step_s = noise * self._machine.at(num_rows, num_rows * CONTEXT)
            step_s *= self._slowness if any(depths) else 1.0
            self._depth.observe(step_s, num_rows, num_rows * CONTEXT, has_drafts=any(depths))
            seconds += step_s
            plain_s += noise * self._machine.at(self._size, num_context)
            num_tokens += self._size
            num_drafts += sum(depths)
            for request, depth in zip(self._requests, depths, strict=True):
                right = list(itertools.takewhile(lambda _: self._drawn.random() < chance, range(depth)))
                num_tokens += len(right)
                if depth:
                    request.observe(depth, len(right))
        return num_tokens / seconds / (num_steps * self._size / plain_s), num_drafts / num_steps / self._size


MACHINES = pytest.mark.parametrize(
    ("machine", "slowness"), [(CPU, 1.0), (CPU, 1.05), (GPU, 1.0), (GPU, 1.2), (Line(0.005, 0.004, 0.0), 1.0)]
)


@MACHINES
@pytest.mark.parametrize("size", [1, 4, 32, 128])
def test_wrong_drafts_cost_no_more_than_three_hundredths(machine: Line, slowness: float, size: int) -> None:
    batch = Batch(machine, size, slowness)
    batch.run(60, chance=0.0)  # at the start of the pod
    speed, depth = batch.run(200, chance=0.0)
    assert speed > 0.97
    assert 0 < depth < 0.5, "but they are tried"


@MACHINES
@pytest.mark.parametrize("size", [1, 8])
def test_right_drafts_are_verified_as_far_as_they_pay(machine: Line, slowness: float, size: int) -> None:
    batch = Batch(machine, size, slowness)
    batch.run(40, chance=1.0)
    speed, depth = batch.run(100, chance=1.0)
    most = (NUM_DRAFTS + 1) * machine.at(size, size * CONTEXT)
    most /= slowness * machine.at((NUM_DRAFTS + 1) * size, (NUM_DRAFTS + 1) * size * CONTEXT)
    assert speed > 0.9 * most
    assert depth > 0.9 * NUM_DRAFTS or most < 2


@pytest.mark.parametrize(("machine", "size", "num_steps"), [(CPU, 1, 150), (CPU, 4, 300), (GPU, 8, 150)])
def test_drafts_that_become_right_are_noticed(machine: Line, size: int, num_steps: int) -> None:
    batch = Batch(machine, size)
    batch.run(300, chance=0.0)
    batch.run(num_steps, chance=0.9)
    speed, depth = batch.run(50, chance=0.9)
    assert speed > 1.5
    assert depth > 2


class DraftedBatch:
    """The same with a draft model: its passes take known times, and each step decides what it is asked for."""

    def __init__(self, machine: Line, passes: Line, size: int) -> None:
        self._machine, self._passes, self._size = machine, passes, size
        self._noise, self._drawn = random.Random(1), random.Random(2)
        measured = [(float(tokens), machine.at(tokens, 0)) for tokens in (1, 64, 128, 256)]
        self._depth = DraftDepth(256, measured, Asked(NUM_DRAFTS, 0.005))
        self._requests = [Acceptance(self._depth.acceptance) for _ in range(size)]
        self._num_proposed = [0] * size
        self._num_behind = [0] * size  # tokens that the draft model has not seen

    def run(self, num_steps: int, chance: float) -> tuple[float, float]:
        """Tokens per second, relative to those without drafts; mean number of drafts proposed."""
        seconds = plain_s = 0.0
        num_tokens = num_asked = 0
        num_context = self._size * CONTEXT
        for _ in range(num_steps):
            asked = self._depth.ask([each.chance for each in self._requests], self._size, num_context)
            depths = [0] * self._size
            if any(self._num_proposed):
                proposed = zip(self._num_proposed, self._requests, strict=True)
                candidates = [Candidate(number, CONTEXT, each.chance) for number, each in proposed]
                depths = self._depth.choose(candidates, self._size, num_context, room=2048)
            num_rows, noise = self._size + sum(depths), self._noise.uniform(0.97, 1.03)
            step_s = noise * self._machine.at(num_rows, num_rows * CONTEXT)
            self._depth.observe(step_s, num_rows, num_rows * CONTEXT, has_drafts=any(depths))
            self._num_behind = [number + 1 for number in self._num_behind]
            drafting_s = self._draft(asked, noise)
            seconds += step_s + drafting_s
            plain_s += noise * self._machine.at(self._size, num_context)
            num_tokens += self._size
            num_asked += asked.num_drafts
            for request, depth in zip(self._requests, depths, strict=True):
                right = list(itertools.takewhile(lambda _: self._drawn.random() < chance, range(depth)))
                num_tokens += len(right)
                if depth:
                    request.observe(depth, len(right))
        return num_tokens / seconds / (num_steps * self._size / plain_s), num_asked / num_steps

    def _draft(self, asked: Asked, noise: float) -> float:
        self._num_proposed = [0] * self._size
        if asked == NOTHING_ASKED:
            return 0.0
        num_caught_up = self._catch_up((asked.catch_up_s - self._passes.base_s) / self._passes.token_s)
        catch_up_s = noise * self._passes.at(num_caught_up, 0) if num_caught_up else 0.0
        self._num_proposed = [asked.num_drafts if number <= 4 else 0 for number in self._num_behind]
        num_rows = sum(map(bool, self._num_proposed))
        num_passes = max(self._num_proposed)
        proposing_s = num_passes * noise * self._passes.at(num_rows, 0)
        self._num_behind = [number if number > 4 else 0 for number in self._num_behind]
        drafting = Drafting(num_passes, num_rows, proposing_s, num_caught_up, catch_up_s)
        self._depth.observe_drafting(drafting)
        return drafting.seconds

    def _catch_up(self, num_tokens: float) -> int:
        """As a DraftModel does: one block at least."""
        num_caught_up = 0
        for number in sorted(range(self._size), key=self._num_behind.__getitem__):
            if self._num_behind[number] > 4 and not (num_caught_up and num_caught_up >= num_tokens):
                chunk = int(min(self._num_behind[number], max(16, num_tokens - num_caught_up)))
                self._num_behind[number] -= chunk
                num_caught_up += chunk
        return num_caught_up


def tenth_of(machine: Line) -> Line:
    return Line(machine.base_s / 10, machine.token_s / 10, 0.0)


@pytest.mark.parametrize("machine", [CPU, GPU, Line(0.005, 0.004, 0.0)])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_a_draft_model_that_is_wrong_costs_no_more_than_three_hundredths(machine: Line, size: int) -> None:
    batch = DraftedBatch(machine, tenth_of(machine), size)
    batch.run(60, chance=0.0)  # at the start of the pod
    speed, depth = batch.run(600, chance=0.0)
    assert speed > 0.97
    assert 0 < depth < 0.25, "but it is tried"


@pytest.mark.parametrize(("chance", "most"), [(1.0, 2.3), (0.7, 1.4)])
def test_a_draft_model_that_is_right_is_asked_as_far_as_it_pays(chance: float, most: float) -> None:
    batch = DraftedBatch(CPU, tenth_of(CPU), 1)
    batch.run(200, chance)
    speed, depth = batch.run(300, chance)
    assert speed > most
    assert depth > (NUM_DRAFTS - 1 if chance == 1 else 2)


def test_a_draft_model_that_is_too_slow_is_not_asked() -> None:
    batch = DraftedBatch(CPU, CPU, 1)
    batch.run(100, 0.7)
    speed, depth = batch.run(600, 0.7)
    assert speed > 0.97
    assert depth < 0.1


@pytest.mark.parametrize("size", [1, 4])
def test_a_draft_model_that_becomes_right_is_noticed(size: int) -> None:
    batch = DraftedBatch(CPU, tenth_of(CPU), size)
    batch.run(300, chance=0.0)
    batch.run(400, chance=0.9)
    speed, depth = batch.run(100, chance=0.9)
    assert speed > 1.5
    assert depth > 2


def test_without_a_draft_model_nothing_is_asked() -> None:
    depth = DraftDepth(16)
    assert depth.ask([Acceptance().chance], 1, 100) == depth.ask_beside_prompts(1.0) == NOTHING_ASKED


def test_beside_prompts_a_draft_model_that_pays_only_catches_up() -> None:
    depth = DraftDepth(16, [(1.0, 0.02), (64.0, 0.09)], Asked(4, 0.005))
    assert depth.ask_beside_prompts(0.01) == Asked(0, 0.005)
    assert depth.ask_beside_prompts(0.25) == Asked(0, 0.025)
    for _ in range(2):  # these may have been recorded
        depth.observe_drafting(Drafting(4, 1, 4.0, 0, 0.0))
        assert depth.ask([Acceptance().chance], 1, 100).num_drafts > 0
    depth.observe_drafting(Drafting(4, 1, 4.0, 0, 0.0))
    assert depth.ask([Acceptance().chance], 1, 100) == depth.ask_beside_prompts(0.2) == NOTHING_ASKED


def drafted_engine(accuracy: str, num_requests: int, num_blocks: int = 1025, **settings: bool) -> FakeEngine:
    """The proposer is taken for a draft model of a tenth of the machine's times."""
    measured = [(tokens, CPU.at(tokens, 0)) for tokens in (1, 64)]
    asked = Asked(3, 0.005)
    scheduler = create_scheduler(num_blocks=num_blocks, max_model_len=60, measured_steps=measured, most_asked=asked)
    proposer = create_proposer(accuracy)  # type: ignore[arg-type]
    engine = FakeEngine(scheduler, proposer=proposer, passes=tenth_of(CPU), **settings)
    engine.machine = CPU
    for turn in range(4):
        engine.add(*(create_request(f"r{turn}-{each}", max_tokens=40) for each in range(num_requests)))
        engine.run()
        engine.assert_idle()
    return engine


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_with_a_draft_model_gains_where_it_is_right(num_requests: int, runs_ahead: bool) -> None:
    plain = finished_engine("none", num_requests)
    right, wrong = (drafted_engine(each, num_requests, runs_ahead=runs_ahead) for each in ("right", "wrong"))
    assert right.outputs == wrong.outputs == plain.outputs
    assert right.now < 0.8 * plain.now
    assert wrong.now < 1.05 * plain.now
    learned = right.scheduler._drafts._depth._times.drafting(num_requests, 0)
    assert learned == pytest.approx(CPU.at(num_requests, 0), rel=0.1), "without the draft model's time"
    assert right.num_short_of_room == wrong.num_short_of_room == 0, "blocks are there before drafts are written to them"
    assert bool(wrong.num_ahead) == runs_ahead, "steps run ahead where nothing is asked"
    figures = right.scheduler.stats().drafts
    assert figures.num_accepted == figures.num_verified
    assert wrong.scheduler.stats().drafts.num_proposed < 0.3 * figures.num_proposed


def test_drafts_take_no_blocks_that_requests_need() -> None:
    """Each of the four grows to 12 of the 30 blocks."""
    engine = drafted_engine("right", 4, num_blocks=31)
    assert engine.outputs == finished_engine("none", 4).outputs
    assert engine.num_short_of_room > 0
    assert engine.scheduler.stats().num_preemptions <= plain_preemptions(4, 31)


def plain_preemptions(num_requests: int, num_blocks: int) -> int:
    engine = FakeEngine(create_scheduler(num_blocks=num_blocks, max_model_len=60))
    for turn in range(4):
        engine.add(*(create_request(f"r{turn}-{each}", max_tokens=40) for each in range(num_requests)))
        engine.run()
    return engine.scheduler.stats().num_preemptions


def test_reasons_of_failures_are_few_and_figures_of_engines_add_up() -> None:
    one, other = DraftTotals(), DraftTotals()
    one.count_verification(4, 2)
    other.count_verification(20, 20)
    for number in range(20):
        one.count_failure(f"reason {number}")
    other.count_failure("reason 0")
    figures = join_stats([EngineStats(drafts=each.figures) for each in (one, other, DraftTotals())]).drafts
    assert figures.accepted_by_position == (2, 2, *[1] * 13, 5)
    assert (figures.num_verifications, figures.num_verified, figures.num_accepted) == (2, 24, 22)
    assert (len(figures.failures), figures.failures["other"], figures.failures["reason 0"]) == (17, 4, 2)


def test_a_large_batch_verifies_few_where_a_small_one_verifies_many() -> None:
    depths = []
    for size in (1, 8, 64):
        batch = Batch(CPU, size)
        batch.run(60, chance=0.6)
        depths.append(batch.run(60, chance=0.6)[1])
    assert depths[0] > 2
    assert depths[0] > depths[1] > depths[2]
    assert depths[2] < 0.2


def finished_engine(accuracy: str, num_requests: int, machine: Line = CPU, **settings: bool) -> FakeEngine:
    """Has answered with 40 tokens each."""
    measured = [(tokens, machine.at(tokens, 0)) for tokens in (1, 64)]
    scheduler = create_scheduler(num_blocks=1025, measured_steps=measured)
    engine = FakeEngine(scheduler, proposer=create_proposer(accuracy), **settings)  # type: ignore[arg-type]
    engine.machine = machine
    for turn in range(4):
        engine.add(*(create_request(f"r{turn}-{each}", max_tokens=40) for each in range(num_requests)))
        engine.run()
    return engine


@pytest.mark.parametrize("num_requests", [1, 8])
def test_an_engine_is_as_fast_with_wrong_drafts_as_without(num_requests: int) -> None:
    plain, wrong = (finished_engine(accuracy, num_requests) for accuracy in ("none", "wrong"))
    assert wrong.outputs == plain.outputs
    assert wrong.now < 1.03 * plain.now
    figures = wrong.scheduler.stats().drafts
    assert 0 < figures.num_verified < 0.15 * figures.num_proposed
    assert figures.num_accepted == 0


@pytest.mark.parametrize("num_requests", [1, 8])
def test_an_engine_verifies_right_drafts_to_their_full_depth(num_requests: int) -> None:
    plain, right = (finished_engine(accuracy, num_requests) for accuracy in ("none", "right"))
    assert right.outputs == plain.outputs
    assert right.now < 0.7 * plain.now
    figures = right.scheduler.stats().drafts
    assert figures.num_accepted == figures.num_verified == sum(figures.accepted_by_position)
    assert figures.accepted_by_position[0] == figures.num_verifications
    assert figures.num_verified > 2.7 * figures.num_verifications
    assert figures.num_steps < plain.scheduler.stats().decode_steps.num_steps / 3


def test_steps_run_ahead_unless_drafts_pay() -> None:
    machine = Line(0.005, 0.004, 0.0)  # where a draft that is tried takes half as long as a step
    plain, wrong = (finished_engine(each, 1, machine, runs_ahead=True) for each in ("none", "wrong"))
    assert wrong.outputs == plain.outputs
    assert wrong.num_ahead > 0.9 * plain.num_ahead
    assert wrong.scheduler.stats().drafts.num_verified > 0, "some are tried"
    right, waiting = (finished_engine("right", 1, GPU, runs_ahead=each) for each in (True, False))
    assert right.outputs == plain.outputs
    assert right.now < 1.1 * waiting.now < 0.5 * finished_engine("none", 1, GPU, runs_ahead=True).now


def test_steps_do_not_wait_for_drafts_that_have_no_room() -> None:
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_blocks": 1025}
    engine = FakeEngine(create_scheduler(**settings), proposer=create_proposer("right"), runs_ahead=True)
    engine.machine = CPU
    engine.add(*(create_request(f"r{number}", max_tokens=40) for number in range(8)))
    engine.run()
    assert engine.num_ahead > 20, "as long as all eight run"
