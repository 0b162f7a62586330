"""The stages of a model in one process, each a worker, which take their steps one after the other."""

from collections import deque

from common.engine.model.stage_links import OneStage
from common.engine.worker.worker import Worker


class QueueLinks(OneStage):
    """See StageLinks. Of a model whose layers are in one KV group."""

    def __init__(self, stage, num_stages, num_layers, passed):
        self.stage, self.num_stages = stage, num_stages
        self._num_layers = num_layers
        self._passed = passed
        self.sent = []  # and copies, as they must not change

    def join(self, name, own):
        return [None] * self._num_layers if name == "windows" else []

    def receive(self, shape, dtype):
        hidden = self._passed.popleft()
        assert (tuple(hidden.shape), hidden.dtype) == (tuple(shape), dtype)
        return hidden.clone()

    def send(self, hidden):
        self.sent.append((hidden, hidden.clone()))
        self._passed.append(hidden)


class StagedWorker:
    """As one Worker."""

    def __init__(self, config, num_stages, num_layers):
        passed = deque()
        self.links = [QueueLinks(stage, num_stages, num_layers, passed) for stage in range(num_stages)]
        self.stages = [Worker(config, stage, links=links) for stage, links in enumerate(self.links)]
        self._sampled = {}

    def load_model(self):
        for worker in self.stages:
            worker.load_model()

    def initialize_kv_cache(self, num_blocks):
        for worker in self.stages:
            worker.initialize_kv_cache(num_blocks)

    @property
    def num_failed_recordings(self):
        return sum(worker.num_failed_recordings for worker in self.stages)

    def execute(self, step):
        for worker in self.stages[:-1]:
            worker.note_sampled(self._sampled)
        for worker in self.stages:
            result = worker.execute(step)
        self._sampled = {
            request_id: [token.token_id for token in tokens] for request_id, tokens in result.outcomes.items()
        }
        return result
