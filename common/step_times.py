"""How long a step takes, learned from the steps that pods report.

For all pods of a role together, the model is `base_s + tokens * token_s + context * context_s`: the tokens that the
step computes, and the tokens of all requests there, whose KV it reads. Weighted least squares over the latest steps,
in which old ones fade. Errors count relative to the step's length, so that short decode steps and long prefill steps
both fit. A prior fills in what the steps do not show, for example if all had one length. An outlier counts
as half or twice the expected time, so that one hiccup changes little and a lasting change is learned all the same.

Of a single pod only its speed relative to that is learned, and small differences are ignored: they come from what it
happens to run, and a router that used them would send all requests to the pod that looks fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self


class Line(NamedTuple):
    """A linear model of a step's seconds."""

    base_s: float
    token_s: float  # per token computed
    context_s: float  # per token of the requests there

    def at(self, tokens: float, context: float) -> float:
        """Returns the seconds of a step."""
        return self.base_s + tokens * self.token_s + context * self.context_s


PRIOR = Line(0.010, 1e-4, 1e-7)
_FADING = 0.99  # of a step's weight, with each further step
_PRIOR_WEIGHT = 0.1  # steps that the prior counts for, at each of three points
_MEASURED_WEIGHT = 10  # steps that a measured one counts for
_TRUSTED_STEPS = 5.0  # steps before which outliers are not clipped
_SURPRISE = 2.0  # factor to which outliers are clipped
_TYPICAL_CONTEXT = 1e5
_MIN_TOKEN_S = 1e-9
_SHORTEST_S, _LONGEST_S = 1e-6, 3600.0  # of a step, and of a handoff
_MOST_TOKENS = 2**24  # of either
_LEAST_DIFFERENCE = math.log(1.25)  # of a pod's speed from the role's


class _Sums:
    """Normal equations of a weighted fit of y to 1, x and z."""

    __slots__ = ("w", "x", "xx", "xy", "xz", "y", "z", "zy", "zz")

    def __init__(self) -> None:
        self.w = self.x = self.z = self.xx = self.xz = self.zz = self.y = self.xy = self.zy = 0.0

    def fade(self, factor: float) -> None:
        """Multiplies all of them."""
        self.w *= factor
        self.x *= factor
        self.xx *= factor
        self.xy *= factor
        self.xz *= factor
        self.y *= factor
        self.z *= factor
        self.zy *= factor
        self.zz *= factor

    def add(self, weight: float, x: float, z: float, y: float) -> None:
        """Adds one point."""
        self.w += weight
        self.x += weight * x
        self.z += weight * z
        self.xx += weight * x * x
        self.xz += weight * x * z
        self.zz += weight * z * z
        self.y += weight * y
        self.xy += weight * x * y
        self.zy += weight * z * y

    def solve(self, prior: _Sums, speed: float) -> tuple[float, float, float]:
        """Returns the constant and the slopes, each at least its minimum, of the points of both sums, those of `prior`
        with `speed` times their y."""
        w, x, z = self.w + prior.w, self.x + prior.x, self.z + prior.z
        sum_xx, sum_xz, sum_zz = self.xx + prior.xx, self.xz + prior.xz, self.zz + prior.zz
        y, sum_xy, sum_zy = self.y + speed * prior.y, self.xy + speed * prior.xy, self.zy + speed * prior.zy
        xx, xz, zz = w * sum_xx - x**2, w * sum_xz - x * z, w * sum_zz - z**2
        xy, zy = w * sum_xy - x * y, w * sum_zy - z * y
        determinant = xx * zz - xz**2
        slope_z = max((xx * zy - xz * xy) / determinant, 0.0)
        slope_x = max((xy - slope_z * xz) / xx, _MIN_TOKEN_S)
        if slope_x == _MIN_TOKEN_S:
            slope_z = max(zy / zz, 0.0)
        constant = (y - slope_x * x - slope_z * z) / w
        if constant < 0:
            return 0.0, max(sum_xy - slope_z * sum_xz, 0.0) / sum_xx + _MIN_TOKEN_S, slope_z
        return constant, slope_x, slope_z


class StepTimes:
    """The step times of all pods of a role together."""

    def __init__(self, budget: float, prior: Line = PRIOR) -> None:
        """`budget`: most tokens of a step."""
        self._prior = prior
        self._num_steps = 0.0
        self._log_speed = 0.0  # sum of log(seconds / prior)
        self._sums = _Sums()
        self._prior_sums = _Sums()
        for tokens, context in ((1.0, 0.0), (max(budget, 2.0), 0.0), (1.0, _TYPICAL_CONTEXT)):
            usual = prior.at(tokens, context)
            self._prior_sums.add(_PRIOR_WEIGHT / usual**2, tokens, context / _TYPICAL_CONTEXT, usual)
        self.line = prior

    @classmethod
    def measured(cls, budget: float, steps: Sequence[tuple[float, float]]) -> Self:
        """`steps`: tokens and seconds of some that were run for this. They take the place of the prior."""
        fit = cls(budget)
        if not steps:
            return fit
        for _ in range(_MEASURED_WEIGHT):
            for tokens, seconds in steps:
                fit._learn(seconds, tokens, 0.0)
        fit._solve()
        times = cls(budget, fit.line)
        times._num_steps = fit._num_steps
        return times

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen for a prediction."""
        return self._num_steps > _TRUSTED_STEPS

    def predict(self, tokens: float, context: float = 0.0) -> float:
        """Seconds of a step."""
        return self.line.at(tokens, context)

    def observe(self, seconds: float, tokens: float, context: float = 0.0) -> None:
        """Learns from one step. Ignores invalid ones: no tokens, no time, not a number."""
        if not can_be(seconds, tokens):
            return
        if self._num_steps > _TRUSTED_STEPS:
            expected = self.predict(tokens, context)
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        self._learn(seconds, tokens, context)
        self._solve()

    def _learn(self, seconds: float, tokens: float, context: float) -> None:
        usual = self._prior.at(tokens, context)
        self._num_steps = _FADING * self._num_steps + 1
        self._log_speed = _FADING * self._log_speed + math.log(seconds / usual)
        self._sums.fade(_FADING)
        self._sums.add(1 / usual**2, tokens, context / _TYPICAL_CONTEXT, seconds)

    def _solve(self) -> None:
        speed = math.exp(self._log_speed / self._num_steps)
        base_s, token_s, context_s = self._sums.solve(self._prior_sums, speed)
        self.line = Line(base_s, token_s, context_s / _TYPICAL_CONTEXT)


class Slowness:
    """The slowness of one pod: its step times relative to the role's; 1 until a difference is certain."""

    def __init__(self) -> None:
        self._num_steps = 0.0
        self._log_sum = 0.0
        self.value = 1.0

    def observe(self, seconds: float, expected_s: float) -> None:
        """Learns from one step that was expected to take `expected_s`."""
        surprise = math.log(seconds / expected_s)
        if self._num_steps > _TRUSTED_STEPS:
            limit = math.log(_SURPRISE)
            now = self._log_sum / self._num_steps
            surprise = min(max(surprise, now - limit), now + limit)
        self._num_steps = _FADING * self._num_steps + 1
        self._log_sum = _FADING * self._log_sum + surprise
        mean = self._log_sum / (self._num_steps + 1)
        self.value = math.exp(math.copysign(max(abs(mean) - _LEAST_DIFFERENCE, 0.0), mean))


def can_be(seconds: float, tokens: float) -> bool:
    """Whether the figures of a step are plausible. Larger ones, which a pod may report, would overflow the sums."""
    return _SHORTEST_S <= seconds <= _LONGEST_S and 0 < tokens <= _MOST_TOKENS
