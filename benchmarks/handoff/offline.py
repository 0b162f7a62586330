"""Time of a decode step without pods: run as a file, so that the engine is that of the checkout on PYTHONPATH.

    python benchmarks/handoff/offline.py MODEL PROMPT_TOKENS TOKENS BATCH...

Prints a list of step times in seconds for each batch, as one line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.messages import AddRequest
from common.types import RequestId, SamplingParams

_WARM_UP_STEPS = 3


def decode_steps(client: InprocClient, batch: int, num_prompt_tokens: int, num_tokens: int) -> list[float]:
    """Seconds of each step in which all of `batch` requests decode, without the first ones."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + _WARM_UP_STEPS, ignore_eos=True)
    num_had: dict[RequestId, int] = {}
    for index in range(batch):
        request_id = RequestId(f"b{batch}-{index}")
        prompt = [random.randrange(3, client.spec.vocab_size) for _ in range(num_prompt_tokens)]
        client.add_request(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        num_had[request_id] = 0
    times = []
    while client.has_work:
        all_decode = min(num_had.values()) > 0
        started = time.perf_counter()
        outputs = client.step().outputs
        took = time.perf_counter() - started
        for output in outputs:
            num_had[output.request_id] += len(output.tokens)
        if all_decode and len(outputs) == batch:
            times.append(took)
    return times[_WARM_UP_STEPS:]


def main() -> None:
    """Measures and prints."""
    model, num_prompt_tokens, num_tokens, *batches = sys.argv[1:]
    config = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(enable_prefix_caching=False))
    with InprocClient(config) as client:
        decode_steps(client, 1, int(num_prompt_tokens), _WARM_UP_STEPS)
        times = {batch: decode_steps(client, int(batch), int(num_prompt_tokens), int(num_tokens)) for batch in batches}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
