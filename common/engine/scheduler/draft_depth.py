"""How many of its drafts each request verifies in a step: as many as make the expected time per token least.

A draft costs a row of the step, and gains a token with the chance that it and those before it are right. Drafts are
added in the order of tokens gained per second, as long as that is more than the step gains without the next one; then
the step with drafts is compared with the one without any. That is the optimum: gains of a request fall with each draft,
and a ratio of sums is raised by exactly those terms whose own ratio is higher.

A draft model takes time for each draft that it proposes, whether it is verified or not. So a step asks it for as many
drafts of each request as pay with that; those that are there then cost no more than others.

Drafts that do not pay are tried all the same now and then, within a small share of the time, to notice when they are
right again; and so are steps without drafts where these pay, to know what they take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from common.engine.contract.step import NOTHING_ASKED, Asked, Drafting
from common.engine.messages import NUM_DRAFT_POSITIONS
from common.step_times import StepTimes

_UNKNOWN_CHANCE = 0.5  # of a draft that is like none before
_PRIOR_WEIGHT = 2.0  # verifications that what is known beforehand counts for
_POD_FADING = 0.98  # of a verification's weight, with each further one of any request
_REQUEST_FADING = 0.9  # of the same request
_PROBE_SHARE = 0.015  # of the time, for drafts that are not expected to pay
_LEAST_PLAIN_STEPS = 3  # between two that only probe, so that what they take is known
_MAX_DRAFTING_STEPS = 64  # in a row, for the same reason
_SLOWNESS_FADING = 0.95  # of the weight of a step with drafts
_MOST_SURPRISE = math.log(2)
_LEAST_S = 1e-9
_CATCH_UP_SHARE = 0.1  # of a step that takes long enough, for a draft model to catch up beside it
_NUM_RECORDED = 2  # passes of a size: with one token of each request, and with several of some
_MEASURED_ROWS = 128  # most tokens of a measured step whose time tells of as many rows


class Acceptance:
    """How likely drafts are right: a chance for each position, if the drafts before it are right."""

    __slots__ = ("_fading", "_prior", "_right", "_tried", "num_accepted", "num_verified")

    def __init__(self, prior: Acceptance | None = None) -> None:
        """`prior`: of the pod, for that of a request, which tells it what it observes."""
        self._prior = prior
        self._fading = _POD_FADING if prior is None else _REQUEST_FADING
        self._tried = [0.0] * NUM_DRAFT_POSITIONS  # verifications that came to the position, older ones faded
        self._right = [0.0] * NUM_DRAFT_POSITIONS
        self.num_verified = 0  # drafts; so is the next one
        self.num_accepted = 0

    def chance(self, position: int) -> float:
        """The chance of the draft at `position`, from 0 on. Later positions than are told apart are like the last."""
        position = min(position, NUM_DRAFT_POSITIONS - 1)
        expected = _UNKNOWN_CHANCE if self._prior is None else self._prior.chance(position)
        return (self._right[position] + _PRIOR_WEIGHT * expected) / (self._tried[position] + _PRIOR_WEIGHT)

    def observe(self, num_drafts: int, num_right: int) -> None:
        """So many of the first of `num_drafts` drafts were right; after the first wrong one nothing is known."""
        self.num_verified += num_drafts
        self.num_accepted += num_right
        for position in range(min(num_right + 1, num_drafts, NUM_DRAFT_POSITIONS)):
            self._tried[position] = self._fading * self._tried[position] + 1
            self._right[position] = self._fading * self._right[position] + (position < num_right)
        if self._prior is not None:
            self._prior.observe(num_drafts, num_right)


class Candidate(NamedTuple):
    """Drafts that a request may verify."""

    num_drafts: int
    num_context_tokens: int  # whose KV each of them reads
    chance: Callable[[int], float]  # see Acceptance


class _DecodeTimes:
    """Predicts steps without prompts: a line, and the time that drafts add, as other kernels compute such steps."""

    def __init__(self, max_num_rows: int, measured_steps: Sequence[tuple[float, float]]) -> None:
        short = [(tokens, seconds) for tokens, seconds in measured_steps if tokens <= _MEASURED_ROWS]
        self._times = StepTimes.measured(max_num_rows, short)
        self._sizes: set[tuple[int, bool]] = set()
        self._num_drafting = self._log_sum = 0.0  # steps with drafts; log(seconds / those of the line)
        self._slowness = 1.0  # of steps with drafts

    def observe(self, step_s: float, num_rows: int, num_context_tokens: int, *, has_drafts: bool) -> None:
        """Learns from a step."""
        size = (num_rows, has_drafts)
        if size not in self._sizes:  # the first may have been recorded or compiled, which is not part of its time
            self._sizes.add(size)
            return
        if has_drafts:
            surprise = math.log(max(step_s, _LEAST_S) / self._times.predict(num_rows, num_context_tokens))
            self._num_drafting = _SLOWNESS_FADING * self._num_drafting + 1
            self._log_sum = _SLOWNESS_FADING * self._log_sum + min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
            self._slowness = math.exp(max(self._log_sum / (self._num_drafting + _PRIOR_WEIGHT), 0.0))
            step_s /= self._slowness
        self._times.observe(step_s, num_rows, num_context_tokens)

    def plain(self, num_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step without drafts."""
        return max(self._times.predict(num_rows, num_context_tokens), _LEAST_S)

    def drafting(self, num_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step with drafts, before they are added."""
        return self._slowness * self.plain(num_rows, num_context_tokens)

    def draft(self, num_context_tokens: int) -> float:
        """Seconds that one more draft adds."""
        _, row_s, context_s = self._times.line
        return max(self._slowness * (row_s + context_s * num_context_tokens), _LEAST_S)


class _Weighed(NamedTuple):
    """Seconds of a step without drafts, and of one with some before they are added; seconds that a draft of each
    candidate adds; and how many of each pay."""

    plain_s: float
    drafting_s: float
    costs: list[float]
    depths: list[int]

    @property
    def first_s(self) -> float:
        """Seconds that the first draft of a step costs more than others."""
        return self.drafting_s - self.plain_s


class DraftDepth:
    """Chooses how many drafts are verified. Learns from each step of an engine that has a proposer."""

    def __init__(
        self,
        max_num_rows: int,
        measured_steps: Sequence[tuple[float, float]] = (),
        most_asked: Asked = NOTHING_ASKED,
    ) -> None:
        """`measured_steps`: tokens and seconds of prompts. `most_asked`: of a draft model, by a step; its `catch_up_s`
        by a short one."""
        self._times = _DecodeTimes(max_num_rows, measured_steps)
        self._most_asked = most_asked
        self._passes = StepTimes(max_num_rows)  # of the draft model
        self._num_unlearned: Counter[int] = Counter()  # by rows: times with passes that may have been recorded
        self._has_drafted = False
        self._is_off = False  # the draft model was asked last, if at all, to see whether it pays
        self._num_probed = 0  # passes of those asked for
        self._num_alike = 0  # latest steps all of which had drafts, or none of which had
        self._had_drafts = False
        self._has_paid = False  # the last time that drafts were there, some were expected to
        self._probe_s = 0.0  # that probes may take
        self._next_probed = 0
        self.acceptance = Acceptance()  # of the pod

    def observe(self, step_s: float, num_rows: int, num_context_tokens: int, *, has_drafts: bool) -> None:
        """Learns from a step without prompts."""
        self._num_alike = self._num_alike + 1 if has_drafts == self._had_drafts else 1
        self._had_drafts = has_drafts
        self._times.observe(step_s, num_rows, num_context_tokens, has_drafts=has_drafts)

    @property
    def expects_drafts(self) -> bool:
        """Whether one of the last steps had drafts that paid, so that the next may have some."""
        return self._has_paid and (self._had_drafts or self._num_alike < _LEAST_PLAIN_STEPS)

    def choose(self, candidates: Sequence[Candidate], num_rows: int, num_context_tokens: int, room: int) -> list[int]:
        """Returns how many drafts each candidate verifies, at most `room` together. `num_rows`: of the step without
        drafts, each of which gives a token; they read the KV of `num_context_tokens`."""
        if self._had_drafts and self._num_alike >= _MAX_DRAFTING_STEPS:
            return [0] * len(candidates)
        weighed = self._weigh(candidates, num_rows, num_context_tokens, room)
        self._save_for_probes(weighed)
        self._has_paid = any(weighed.depths)
        if self._has_paid:
            self._probe(candidates, weighed, 0.0, room)
        elif not self._had_drafts and self._num_alike >= _LEAST_PLAIN_STEPS:
            self._probe(candidates, weighed, weighed.first_s, room)
        return weighed.depths

    def would_choose(self, candidates: Sequence[Candidate], num_rows: int, num_context_tokens: int, room: int) -> bool:
        """Whether `choose` would find drafts to verify. If not, the step goes on without being asked about."""
        weighed = self._weigh(candidates, num_rows, num_context_tokens, room)
        if any(weighed.depths) or self._probe_s >= weighed.first_s + min(weighed.costs):
            return True
        self._save_for_probes(weighed)
        return False

    def ask(self, chances: Sequence[Callable[[int], float]], num_rows: int, num_context_tokens: int) -> Asked:
        """Returns what to ask of the draft model when a step without prompts has sampled, of which `num_rows` rows give
        a token each and read the KV of `num_context_tokens`. The next is expected to be like it. `chances`: of those of
        its requests that may have drafts then, see Acceptance."""
        most = self._most_asked
        if not most.num_drafts or not chances:
            return NOTHING_ASKED
        plain_s = self._times.plain(num_rows, num_context_tokens)
        drafting_s = self._times.drafting(num_rows, num_context_tokens)
        pass_s = self._passes.predict(len(chances)) if self._has_drafted else 0.0
        draft_s = pass_s + len(chances) * self._times.draft(num_context_tokens // num_rows)
        best, plain_token_s, least_s = 0, plain_s / num_rows, math.inf
        tokens, gains = float(num_rows), [1.0] * len(chances)
        for position in range(most.num_drafts):
            gains = [gain * chance(position) for gain, chance in zip(gains, chances, strict=True)]
            tokens += sum(gains)
            token_s = (drafting_s + (position + 1) * draft_s) / tokens
            if token_s >= least_s:
                break  # as each further draft gains less than the one before it
            least_s = token_s
            best = position + 1 if token_s < plain_token_s else 0
        self._is_off = not best
        probe_s = draft_s + (0.0 if best else drafting_s - plain_s)
        self._probe_s = min(self._probe_s + _PROBE_SHARE * plain_s, 4 * probe_s)
        self._num_probed = int(best < most.num_drafts and self._probe_s > 2 * probe_s)
        if not best:
            return Asked(1, self._probe_s - probe_s) if self._num_probed else NOTHING_ASKED
        return Asked(best + self._num_probed, max(most.catch_up_s, _CATCH_UP_SHARE * drafting_s))

    def ask_beside_prompts(self, step_s: float) -> Asked:
        """The same for a step with prompts, which takes so long. The next may have some, too, and verify nothing."""
        if not self._most_asked.num_drafts or self._is_off:
            return NOTHING_ASKED
        return Asked(0, max(self._most_asked.catch_up_s, _CATCH_UP_SHARE * step_s))

    def observe_drafting(self, drafting: Drafting) -> None:
        """Learns from what the draft model has done after a step."""
        if self._is_off:
            self._probe_s -= drafting.catch_up_s
        if drafting.num_passes:
            pass_s = drafting.proposing_s / drafting.num_passes
            self._probe_s -= self._num_probed * pass_s
            if self._num_unlearned[drafting.num_rows] < _NUM_RECORDED:
                self._num_unlearned[drafting.num_rows] += 1
                return
            self._passes.observe(pass_s, drafting.num_rows)
            self._has_drafted = True

    def _weigh(self, candidates: Sequence[Candidate], num_rows: int, num_context_tokens: int, room: int) -> _Weighed:
        plain_s = self._times.plain(num_rows, num_context_tokens)
        drafting_s = self._times.drafting(num_rows, num_context_tokens)
        costs = [self._times.draft(each.num_context_tokens) for each in candidates]
        return _Weighed(plain_s, drafting_s, costs, best_depths(candidates, costs, num_rows, plain_s, drafting_s, room))

    def _save_for_probes(self, weighed: _Weighed) -> None:
        if not self._most_asked.num_drafts:
            self._probe_s = min(self._probe_s + _PROBE_SHARE * weighed.plain_s, 2 * weighed.drafting_s)

    def _probe(self, candidates: Sequence[Candidate], weighed: _Weighed, first_s: float, room: int) -> None:
        """Adds a draft to some, in turn, as far as time for that is left. The first costs `first_s` more."""
        costs, depths = weighed.costs, weighed.depths
        num_left = room - sum(depths)
        for number in range(len(candidates)):
            index = (self._next_probed + number) % len(candidates)
            if depths[index] == candidates[index].num_drafts:
                continue
            if not num_left or self._probe_s < costs[index] + first_s:
                self._next_probed = index
                return
            depths[index] += 1
            num_left -= 1
            self._probe_s -= costs[index] + first_s
            first_s = 0.0


def best_depths(
    candidates: Sequence[Candidate],
    costs: Sequence[float],
    num_tokens: int,
    plain_s: float,
    drafting_s: float,
    room: int,
) -> list[int]:
    """Returns how many drafts of each candidate make the time per token least, at most `room` together. `costs`:
    seconds that a draft of each adds to `drafting_s`; without drafts the step takes `plain_s` for `num_tokens`
    tokens."""
    depths = [0] * len(candidates)
    tokens, seconds = float(num_tokens), drafting_s
    gains = [each.chance(0) for each in candidates]  # of the next draft
    best = [(-gains[index] / costs[index], index) for index, each in enumerate(candidates) if each.num_drafts]
    heapify(best)
    while best and room and -best[0][0] * seconds > tokens:
        _, index = best[0]
        tokens += gains[index]
        seconds += costs[index]
        room -= 1
        depths[index] += 1
        gains[index] *= candidates[index].chance(depths[index])
        if depths[index] < candidates[index].num_drafts:
            heapreplace(best, (-gains[index] / costs[index], index))
        else:
            heappop(best)
    return depths if tokens * plain_s > num_tokens * seconds else [0] * len(candidates)
