"""Time of the scheduler alone: run as a file, so that it is that of the checkout on PYTHONPATH.

    python benchmarks/handoff/scheduling.py NUM_RUNNING NUM_STEPS

Prints the seconds of each decode step, schedule and update, as one line of JSON. The scheduler is built by the factory
of the checkout's own unit tests, with their transfers and no model.
"""

from __future__ import annotations

import json
import sys
import time

from common.engine.contract.step import ModelRunnerOutput
from common.types import SampledToken
from tests.unit.common.engine.scheduler_factories import create_request, create_scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 128
_WARM_UP_STEPS = 5
_STEP_S = 0.02


def main() -> None:
    """Measures and prints."""
    num_running, num_steps = map(int, sys.argv[1:])
    num_tokens = num_steps + _WARM_UP_STEPS + num_running  # the first decode while the last prompts are computed
    max_model_len = _PROMPT_TOKENS + _BLOCK_SIZE + num_tokens + 1
    scheduler = create_scheduler(
        num_blocks=num_running * (max_model_len // _BLOCK_SIZE + 2),
        block_size=_BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=4096,
    )
    for index in range(num_running):  # of different lengths, so that they do not all fill a block in one step
        prompt = _PROMPT_TOKENS + index % _BLOCK_SIZE
        scheduler.add_request(create_request(f"r{index}", prompt, max_tokens=num_tokens), 0.0)
    times: list[float] = []
    while len(times) < num_steps + _WARM_UP_STEPS:
        started = time.perf_counter()
        step = scheduler.schedule(started)
        took = time.perf_counter() - started
        result = ModelRunnerOutput({request_id: [SampledToken(5)] for request_id in step.num_scheduled_tokens})
        started = time.perf_counter()
        scheduler.update(step, result, _STEP_S)
        took += time.perf_counter() - started
        if step.total_num_scheduled_tokens == len(step.num_scheduled_tokens) == num_running:
            times.append(took)
    print(json.dumps(times[_WARM_UP_STEPS:]))


if __name__ == "__main__":
    main()
