"""How long a step takes, learned from the steps that pods report.

For all pods of a role together, the model is `base_s + tokens * token_s`: weighted least squares over the latest
steps, in which old ones fade. Errors count relative to the step's length, so that short decode steps and long prefill
steps both fit. What the steps do not show (all were of one length, say, or there were none) is taken from a prior. A
step that is far from what was expected counts as half or twice of that, so that one hiccup changes little and a
lasting change gets through all the same.

Of a single pod only its speed next to that is learned, and small differences count for nothing: they come from what it
happens to run, and a router that believed them would send everything to whichever pod looks fastest.
"""

from __future__ import annotations

import math

PRIOR_BASE_S = 0.010
PRIOR_TOKEN_S = 1e-4
_FADING = 0.97  # weight of a step after one more
_PRIOR_WEIGHT = 0.1  # steps that the prior counts for, at each of its two lengths
_TRUSTED_STEPS = 5.0  # before so many, every step is believed
_SURPRISE = 2.0  # how much longer or shorter than expected a step may count
_MIN_TOKEN_S = 1e-9
_LEAST_DIFFERENCE = math.log(1.25)  # of a pod's speed from the role's


class StepTimes:
    """Of all pods of a role together."""

    def __init__(self, budget: float, *, base_s: float = PRIOR_BASE_S, token_s: float = PRIOR_TOKEN_S) -> None:
        """`budget`: most tokens of a step; the other two are the prior."""
        self._budget = max(budget, 2.0)
        self._prior_base_s = base_s
        self._prior_token_s = token_s
        self._num_steps = 0.0
        self._log_speed = 0.0  # sum of log(seconds / prior)
        self._w = self._x = self._xx = self._y = self._xy = 0.0  # sums of w, wx, wxx, wy, wxy; x tokens, y seconds
        self.base_s = base_s
        self.token_s = token_s

    def predict(self, tokens: float) -> float:
        """Seconds of a step."""
        return self.base_s + tokens * self.token_s

    def observe(self, seconds: float, tokens: float) -> None:
        """Learn from one step. What cannot be (no tokens, no time, not a number) is passed over."""
        if not can_be(seconds, tokens):
            return
        if self._num_steps > _TRUSTED_STEPS:
            expected = self.predict(tokens)
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        usual = self._prior_base_s + tokens * self._prior_token_s
        weight = 1 / usual**2
        self._num_steps = _FADING * self._num_steps + 1
        self._log_speed = _FADING * self._log_speed + math.log(seconds / usual)
        self._w = _FADING * self._w + weight
        self._x = _FADING * self._x + weight * tokens
        self._xx = _FADING * self._xx + weight * tokens * tokens
        self._y = _FADING * self._y + weight * seconds
        self._xy = _FADING * self._xy + weight * tokens * seconds
        self._solve()

    def _solve(self) -> None:
        speed = math.exp(self._log_speed / self._num_steps)
        w, x, xx, y, xy = self._w, self._x, self._xx, self._y, self._xy
        for tokens in (1.0, self._budget):
            usual = self._prior_base_s + tokens * self._prior_token_s
            weight = _PRIOR_WEIGHT / usual**2
            w += weight
            x += weight * tokens
            xx += weight * tokens * tokens
            y += weight * usual * speed
            xy += weight * tokens * usual * speed
        self.token_s = max((w * xy - x * y) / (w * xx - x * x), _MIN_TOKEN_S)
        self.base_s = (y - self.token_s * x) / w
        if self.base_s < 0:
            self.base_s, self.token_s = 0.0, xy / xx


class Slowness:
    """Of one pod: how much longer its steps take than the role's; 1 as long as that is not sure."""

    def __init__(self) -> None:
        self._num_steps = 0.0
        self._log_sum = 0.0
        self.value = 1.0

    def observe(self, seconds: float, expected_s: float) -> None:
        """Learn from one step, that was expected to take `expected_s`."""
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
    """Whether a step can have been like that."""
    return 0 < seconds < math.inf and 0 < tokens < math.inf
