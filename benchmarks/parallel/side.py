"""An engine of one process, or of two ranks, as one of the sides; see `benchmarks.compare.side`."""

from __future__ import annotations

import dataclasses

import msgspec
import psutil

from benchmarks.compare.baton_side import Baton, offline_config
from benchmarks.compare.side import serve
from common.engine.client.inproc import InprocClient
from common.engine.config import EngineConfig, ParallelConfig
from common.engine.executor.multiproc.executor import MultiprocExecutor

NUM_BLOCKS = 257


def config_of(directory: str, dtype: str, num_ranks: int) -> EngineConfig:
    """Two threads in all."""
    config = offline_config(directory, dtype)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, device="cpu", num_threads=2 // num_ranks),
        cache=msgspec.structs.replace(config.cache, num_blocks=NUM_BLOCKS),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
    )


def open_client(directory: str, dtype: str, kind: str) -> InprocClient:
    """`kind`: one, shared, or "in turn": shared, with no step scheduled before the one before it has ended."""
    config = config_of(directory, dtype, 1 if kind == "one" else 2)
    if kind == "one":
        return InprocClient(config)
    executor = MultiprocExecutor(config)
    executor.runs_ahead = executor.runs_ahead and kind != "in turn"
    return InprocClient(config, executor)


@dataclasses.dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank's process."""

    pss: int
    kv: int


def rank_memory(directory: str, dtype: str) -> list[RankMemory]:
    """Returns the memory of the ranks of an engine that has answered once."""
    with open_client(directory, dtype, "shared") as client:
        Baton(client).generate([[5] * 128] * 8, 8, lambda _: None)
        ranks = [each for each in psutil.Process().children(recursive=True) if "worker_process" in str(each.cmdline())]
        kv = client.spec.num_blocks * client.spec.bytes_per_block
        return [RankMemory(each.memory_full_info().pss, kv) for each in ranks]


def _load(directory: str, dtype: str, kind: str) -> Baton:
    return Baton(open_client(directory, dtype, kind))


if __name__ == "__main__":
    serve(_load)
