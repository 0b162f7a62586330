"""How long steps take on this machine, measured before the first request.

An engine plans its steps by their predicted time. Learned from requests alone, the prediction is wrong for the first of
them; and a prefill pod whose prompts are all of one length would never learn at which number of tokens a step becomes
efficient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from common.step_budget import KNEE_LOSS

_FIRST_GROWN = 64  # tokens; a step of fewer takes about as long as one of a single token
_LONG_S = 0.15  # steps that are longer grow only as long as that gains much
_LARGE_GAIN = 0.1  # of throughput
_LONGEST_S = 1.0  # a step of so many seconds is the last
_ENOUGH_S = 0.5  # no further round once measuring took so long
_MAX_ROUNDS = 3  # the shortest time of each size counts: what runs beside makes steps longer, never shorter


def measure_steps(
    run: Callable[[int], None], max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[int, float]]:
    """Tokens and seconds of steps of 1, 64, 128, ... and `max_tokens` tokens, until longer ones gain no throughput;
    `run` runs one and returns when it is over."""
    run(1)  # what is set up at first use is not part of a step
    shortest: dict[int, float] = {}
    started = clock()
    for _ in range(_MAX_ROUNDS):
        _measure_round(run, max_tokens, clock, shortest)
        if clock() - started > _ENOUGH_S:
            break
    return sorted(shortest.items())


def _measure_round(
    run: Callable[[int], None], max_tokens: int, clock: Callable[[], float], shortest: dict[int, float]
) -> None:
    def measure(num_tokens: int) -> float:
        began = clock()
        run(num_tokens)
        step_s = shortest[num_tokens] = min(clock() - began, shortest.get(num_tokens, math.inf))
        return step_s

    measure(1)

    step_s = measure(1)
    num_tokens, longer = 1, min(_FIRST_GROWN, max_tokens)
    while longer > num_tokens and step_s < _LONGEST_S:
        least_gain = _LARGE_GAIN if step_s > _LONG_S else KNEE_LOSS
        longest_s = step_s * longer / num_tokens / (1 + least_gain)
        step_s = measure(longer)
        if step_s > longest_s and (step_s := measure(longer)) > longest_s:  # again: the first may have been disturbed
            return
        num_tokens, longer = longer, min(2 * longer, max_tokens)
