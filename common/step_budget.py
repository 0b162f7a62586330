"""How many prompt tokens a step computes: the engine schedules by this, the router and the simulator predict by it.

Beside streams, a step takes as many prompt tokens as keep it within the streams' ITL target, and a minimum in any case,
so that prompts make progress.

Without streams, time to first token counts: prompts are computed one after the other, not side by side. A step is full
at the knee, where more tokens would raise the throughput by no more than KNEE_LOSS; a longer prompt is cut into equal
chunks of about that, so that its KV is transferred meanwhile and a shorter prompt need not wait for its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, overload

from common.step_times import Line

if TYPE_CHECKING:  # settings and fronts of pods, which import this, do without
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]

KNEE_LOSS = 0.02  # of the throughput of an endless step
# The ITL target of an engine that is given none. Readers hardly notice gaps below the shortest, and above the longest a
# text comes more slowly than it is read.
MIN_AUTO_TARGET_S, _MAX_AUTO_TARGET_S = 0.05, 0.2
_EFFICIENT = 0.9  # of the highest throughput of prompts, that such a target leaves them
# Prompt tokens of a step beside streams, whatever their target: enough that prompts make progress where even the
# smallest step exceeds the target, few enough that such a step is hardly longer than one without them.
MIN_PREFILL_TOKENS = 64
_ATTENTION_PARITY = 32_768  # context, in tokens, at which attention costs as much as all else: models of 8B to 70B
_LEAST_MEASURED_KNEE = 512  # measured steps read no context, which smaller chunks of a prompt read again and again
_FULL = 2 / 3  # of the knee, from which on no further prompt is begun; chunks of longer prompts are no smaller


@overload
def prefill_work(num_tokens: float, num_context_tokens: float) -> float: ...
@overload
def prefill_work(num_tokens: Column, num_context_tokens: Column) -> Column: ...
def prefill_work(num_tokens: float | Column, num_context_tokens: float | Column) -> float | Column:
    """Returns the work of computing tokens after a context, in units of a token without context."""
    return num_tokens * (1 + (num_context_tokens + num_tokens / 2) / _ATTENTION_PARITY)


def tokens_within(work: float, num_context_tokens: float) -> int:
    """Returns how many tokens after a context make up the work: the inverse of prefill_work, rounded down."""
    slope = 1 + num_context_tokens / _ATTENTION_PARITY
    return int(_ATTENTION_PARITY * (math.sqrt(slope * slope + 2 * max(work, 0.0) / _ATTENTION_PARITY) - slope))


def knee_tokens(line: Line) -> float:
    """Returns the tokens of a step whose throughput is KNEE_LOSS below that of an endless one."""
    return (1 / KNEE_LOSS - 1) * line.base_s / line.token_s


def measured_knee(steps: Sequence[tuple[int, float]]) -> float | None:
    """The same, of steps that were measured: tokens, ascending, and seconds. None if there are none.

    The line of `knee_tokens` adds up what a processor does at once, reading the weights and computing, so that its knee
    is too far out.
    """
    if not steps:
        return None
    best = max(tokens / seconds for tokens, seconds in steps)
    knee = next(tokens for tokens, seconds in steps if tokens / seconds >= (1 - KNEE_LOSS) * best)
    return max(knee, _LEAST_MEASURED_KNEE)


def auto_target_s(steps: Sequence[tuple[int, float]]) -> float:
    """Returns an ITL target, in seconds, with which prompts beside streams are computed at nearly their highest rate.

    `steps`: tokens, ascending, and seconds of some that were measured. A machine that reads its weights slowly, or has
    many of them, needs long steps for that; if it needs a second, streams are worth more.
    """
    best = max((tokens / seconds for tokens, seconds in steps), default=0.0)
    rate = _EFFICIENT * best
    target_s = 0.0
    for (tokens, seconds), (more, longer_s) in pairwise([(0, 0.0), *steps]):
        if more < rate * longer_s:
            continue
        # Between the two, where as many tokens as the rate asks for are computed in their time.
        surplus, lack = more - rate * longer_s, rate * seconds - tokens
        target_s = longer_s - (longer_s - seconds) * surplus / (surplus + lack) if lack > 0 else longer_s
        break
    return min(max(target_s, MIN_AUTO_TARGET_S), _MAX_AUTO_TARGET_S)


class PromptRoom:
    """The room for prompt tokens in one step."""

    __slots__ = ("_knee", "_least", "_num_taken", "_work")

    def __init__(self, *, work: float, least: int, knee: float) -> None:
        self._work = work
        self._least = least
        self._knee = knee
        self._num_taken = 0

    @classmethod
    def beside_streams(cls, line: Line, *, step_s: float, target_s: float, least: int) -> PromptRoom:
        """Returns the room in a step with streams. `step_s`: its seconds without prompts; `target_s`: its target;
        `least`: tokens in any case."""
        return cls(work=(target_s - step_s) / line.token_s, least=least, knee=math.inf)

    @classmethod
    def least(cls, least: int) -> PromptRoom:
        """Returns the room in a step with streams while step times are unknown: so few tokens that it is short on any
        machine."""
        return cls(work=0.0, least=least, knee=math.inf)

    @classmethod
    def unlimited(cls) -> PromptRoom:
        """Returns the room for throughput alone, as in offline generation."""
        return cls(work=math.inf, least=0, knee=math.inf)

    @classmethod
    def alone(cls, knee: float) -> PromptRoom:
        """Returns the room in a step without streams."""
        return cls(work=math.inf, least=0, knee=max(knee, 1.0))

    @property
    def is_full(self) -> bool:
        """Whether no prompt gets more tokens."""
        if self._knee < math.inf:
            return self._num_taken >= _FULL * self._knee
        return self._num_taken >= self._least and self._work < 1

    def chunk(self, num_tokens: int, num_context_tokens: int) -> int:
        """Returns how many of a prompt's next `num_tokens` the step should take."""
        if self.is_full:
            return 0
        if self._knee < math.inf:
            return math.ceil(num_tokens / max(1, round(num_tokens / self._knee)))
        if self._work == math.inf:
            return num_tokens
        allowed = max(tokens_within(self._work, num_context_tokens), self._least - self._num_taken, 0)
        return min(num_tokens, allowed)

    def take(self, num_tokens: int, num_context_tokens: int) -> None:
        """Counts tokens of a prompt that the step takes."""
        self._num_taken += num_tokens
        self._work -= prefill_work(num_tokens, num_context_tokens)
