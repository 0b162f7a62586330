"""Processes that are ranks, for tests: each takes jobs on its standard input, as lines of JSON, and answers with one.

`RankProcesses` starts them once for many jobs, as importing torch takes longer than any job.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

import pytest

from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from common.engine.contract.step import SchedulerOutput
from common.engine.model.without_compiler import without_compiler
from common.errors import BatonError
from common.types import SamplingParams
from tests.unit.common.engine.worker.step_driver import BLOCK_SIZE, NUM_BLOCKS, Driver


class RankProcesses:
    """Up to `most` ranks."""

    def __init__(self, most):
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.common.engine.model.rank_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for _ in range(most)
        ]

    def run(self, size, **job):
        """The answers of `size` ranks to one job."""
        with tempfile.TemporaryDirectory() as directory:
            return self.answers(self.submit(range(size), size, directory, **job))

    def submit(self, ranks, size, directory, **job):
        """The processes that begin a job as these ranks of so many."""
        chosen = self._processes[: len(ranks)]
        for rank, process in zip(ranks, chosen, strict=True):
            line = json.dumps({"rank": rank, "size": size, "store": f"{directory}/store", **job})
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return chosen

    def answers(self, processes):
        return [json.loads(process.stdout.readline()) for process in processes]

    def close(self):
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=60)
            process.stdout.close()


class NotingDriver(Driver):
    """Notes log probabilities by request."""

    def __init__(self, worker, block_size):
        super().__init__(worker, block_size)
        self.logprobs = {}

    def step(self, scheduled):
        result = super().step(scheduled)
        for request_id, [token] in result.outcomes.items():
            self.logprobs.setdefault(request_id, []).append(token.logprobs and token.logprobs.sampled)
        return result


def generate(job, ranks):
    """Greedy tokens of all prompts at once, and facts of the rank."""
    from common.engine.worker.worker import Worker

    block_size = job.get("block_size", BLOCK_SIZE)
    config = EngineConfig(
        model=ModelConfig(model=job["model"], device="cpu", **job.get("settings", {})),
        cache=CacheConfig(block_size=block_size, num_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=16),
        parallel=ParallelConfig(tensor_parallel_size=ranks.size),
    )
    worker = Worker(config, ranks.rank, ranks)
    try:
        facts = worker.load_model()
        loaded = worker._loaded
        weights = {name.replace(".local", ""): weight for name, weight in loaded.model.named_parameters()}
        storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage() for weight in weights.values()}
        buffers = {name.replace(".local", ""): buffer.tolist() for name, buffer in loaded.model.named_buffers()}
        worker.initialize_kv_cache(NUM_BLOCKS)
        driver = NotingDriver(worker, block_size)
        sampling = SamplingParams(**job.get("sampling", {"temperature": 0.0}))
        requests = [driver.add(f"r{n}", prompt, sampling) for n, prompt in enumerate(job["prompts"])]
        tokens = driver.run(requests, job["num_tokens"], job.get("chunk", 1000))
        worker.execute(SchedulerOutput(dropped_request_ids=[*driver.computed]))
        return {
            "tokens": tokens,
            "logprobs": list(driver.logprobs.values()),
            "kernels": facts.kernels,
            "fingerprint": facts.fingerprint.hex(),
            "layout": [facts.layout.tensor_parallel_size, facts.layout.groups[0].num_kv_heads],
            "bytes_per_block": facts.bytes_per_block,
            "eos": sorted(facts.eos_token_ids),
            "num_weights": {name: weight.numel() for name, weight in weights.items()},
            "num_bytes": sum(storage.nbytes() for storage in storages.values()),
            "buffers": buffers,
        }
    finally:
        worker.close()


@contextlib.contextmanager
def apart():
    from common.engine.devices.cpu import shared_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(shared_ranks, "_map")
        yield


@contextlib.contextmanager
def broken_kernels():
    from common.engine.devices.cpu.operators import CpuOperators

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(CpuOperators, "add_norm")
        yield


def answer_to(job):
    from torch.distributed import FileStore

    from common.engine.model.ranks import GlooRanks

    try:
        store = FileStore(job["store"], job["size"])
        join_timeout_s = job.get("join_timeout_s", 60.0)
        ranks = GlooRanks(store, job["rank"], job["size"], timeout_s=60.0, join_timeout_s=join_timeout_s)
        with contextlib.ExitStack() as stack:
            if job.get("broken") == ranks.rank:
                stack.enter_context(broken_kernels())
            if not job.get("shares_memory", True):
                stack.enter_context(apart())
            return generate(job, ranks)
    except BatonError as error:
        return {"error": type(error).__name__, "message": str(error), "param": getattr(error, "param", None)}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with without_compiler():  # as in an engine's process
        for line in sys.stdin:
            answers.write(json.dumps(answer_to(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
