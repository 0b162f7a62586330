"""How long a pod's step takes, learned from the steps that it reports.

The model is `base_s + tokens * token_s`: weighted least squares over the pod's steps, in which old ones fade. Errors
count relative to the step's length, so that short decode steps and long prefill steps both fit.

What a pod's own steps do not show (all were of one length, say, or there were none) is taken from a prior: the shape of
the role's average pod, at this pod's speed; for the role itself, constants. A step that is far from what was expected
counts as half or twice of that, so that one hiccup changes little and a lasting change gets through all the same.
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


class StepTimes:
    """Of one pod, or of all pods of a role together."""

    __slots__ = (
        "_budget",
        "_constants",
        "_log_speed",
        "_num_steps",
        "_prior",
        "_w",
        "_x",
        "_xx",
        "_xy",
        "_y",
        "base_s",
        "token_s",
    )

    def __init__(
        self,
        budget: float,
        prior: StepTimes | None = None,
        *,
        base_s: float = PRIOR_BASE_S,
        token_s: float = PRIOR_TOKEN_S,
    ) -> None:
        """`budget`: most tokens of a step. `prior`: of the role; without one, the two constants are."""
        self._budget = max(budget, 2.0)
        self._prior = prior
        self._constants = base_s, token_s
        self._num_steps = 0.0
        self._log_speed = 0.0  # sum of log(seconds / prior)
        self._w = self._x = self._xx = self._y = self._xy = (
            0.0  # sums of w, w*x, w*x*x, w*y, w*x*y: x tokens, y seconds
        )
        self.base_s, self.token_s = self._prior_line()

    def predict(self, tokens: float) -> float:
        """Seconds of a step."""
        return self.base_s + tokens * self.token_s

    def observe(self, seconds: float, tokens: float) -> None:
        """Learn from one step. What cannot be (no tokens, no time, not a number) is passed over."""
        if not (0 < seconds < math.inf and 0 < tokens < math.inf):
            return
        if self._num_steps > _TRUSTED_STEPS:
            expected = self.predict(tokens)
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        base_s, token_s = self._prior_line()
        usual = base_s + tokens * token_s
        weight = 1 / usual**2
        self._num_steps = _FADING * self._num_steps + 1
        self._log_speed = _FADING * self._log_speed + math.log(seconds / usual)
        self._w = _FADING * self._w + weight
        self._x = _FADING * self._x + weight * tokens
        self._xx = _FADING * self._xx + weight * tokens * tokens
        self._y = _FADING * self._y + weight * seconds
        self._xy = _FADING * self._xy + weight * tokens * seconds
        self._solve(base_s, token_s)

    def _prior_line(self) -> tuple[float, float]:
        if self._prior is None:
            return self._constants
        return self._prior.base_s, self._prior.token_s

    def _solve(self, base_s: float, token_s: float) -> None:
        speed = math.exp(self._log_speed / self._num_steps)
        w, x, xx, y, xy = self._w, self._x, self._xx, self._y, self._xy
        for tokens in (1.0, self._budget):
            usual = base_s + tokens * token_s
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
