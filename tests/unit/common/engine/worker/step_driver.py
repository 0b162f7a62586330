"""A scheduler of a few lines, for tests that name the steps of a worker."""

import random

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.types import RequestId, SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 128
GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Hands out shuffled blocks and runs the chunks that a test names."""

    def __init__(self, worker, block_size=BLOCK_SIZE):
        self.worker = worker
        self.block_size = block_size
        self.num_groups = len(getattr(worker, "stages", [worker])[0]._runner.table.block_tables)
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(7).shuffle(self.free)
        self.tokens = {}
        self.blocks = {}  # of each KV group
        self.computed = {}
        self.outputs = {}
        self.dropped = []
        self.new = []

    def add(self, name, prompt, sampling=GREEDY, output=()):
        request_id = RequestId(name)
        self.tokens[request_id] = [*prompt, *output]
        self.computed[request_id] = 0
        self.blocks[request_id] = [[] for _ in range(self.num_groups)]
        self.outputs.setdefault(request_id, list(output))
        self.new.append((request_id, len(prompt), sampling))
        return request_id

    def drop(self, request_id):
        self.dropped.append(request_id)
        self.free.extend(block_id for blocks in self.blocks.pop(request_id) for block_id in blocks)
        del self.computed[request_id]

    def step(self, scheduled):
        fresh = {}
        for request_id, count in scheduled.items():
            tables = self.blocks[request_id]
            missing = -(-(self.computed[request_id] + count) // self.block_size) - len(tables[0])
            fresh[request_id] = [[self.free.pop(0) for _ in range(missing)] for _ in tables]
            for table, added in zip(tables, fresh[request_id], strict=True):
                table.extend(added)
        new_ids = {request_id for request_id, _, _ in self.new}
        new = [
            NewRequest(r, self.tokens[r], num_prompt, sampling, self.blocks[r], self.computed[r])
            for r, num_prompt, sampling in self.new
        ]
        added = {r: blocks for r, blocks in fresh.items() if blocks[0] and r not in new_ids}
        result = self.worker.execute(SchedulerOutput(new, added, scheduled, sum(scheduled.values()), self.dropped))
        self.new, self.dropped = [], []
        for request_id, count in scheduled.items():
            self.computed[request_id] += count
            reaches_end = self.computed[request_id] == len(self.tokens[request_id])
            assert (request_id in result.outcomes) == reaches_end
            if reaches_end:
                self.tokens[request_id] = [*self.tokens[request_id], result.outcomes[request_id][0].token_id]
                self.outputs[request_id].append(result.outcomes[request_id][0].token_id)
        return result

    def remaining(self, request_id):
        return len(self.tokens[request_id]) - self.computed[request_id]

    def run(self, request_ids, num_tokens, chunk=1000):
        """Step all of them until each has `num_tokens` output tokens."""
        while live := [r for r in request_ids if len(self.outputs[r]) < num_tokens]:
            self.step({r: min(chunk, self.remaining(r)) for r in live})
        return [self.outputs[r] for r in request_ids]
