"""Bandwidth of the shared-storage connector next to plain files of the same sizes on the same medium.

    python -m benchmarks.kv --path /dev/shm --mib 256

Both move the same blocks from one KV cache through one file each to another, on one thread. The connector also renames,
digests, verifies and copies each block through its staging buffer. Every figure is the best of `--runs`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.engine.kv_connector import BlockTransfer
from common.types import BlockHash, RequestId
from kv_store.block_format import HEADER_BYTES
from kv_store.registry import create_connector

MIB = 1 << 20
BLOCK_BYTES = (64 << 10, 1 << 20)
LATENCY_BLOCKS = (1, 16, 128)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="/dev/shm", help="directory on the medium to measure")  # noqa: S108
    parser.add_argument("--mib", type=int, default=256, help="MiB moved per measurement")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    print(f"{'block':>8} {'':>6} {'files GB/s':>11} {'connector GB/s':>15} {'share':>6}")
    for block_bytes in BLOCK_BYTES:
        bench = Bench(Path(args.path), block_bytes, args.mib * MIB // block_bytes)
        best = {name: min(times) for name, times in bench.run(args.runs).items()}
        for direction in ("save", "load"):
            files = bench.total_bytes / best[f"files {direction}"] / 1e9
            connector = bench.total_bytes / best[f"connector {direction}"] / 1e9
            print(
                f"{block_bytes >> 10:>4} KiB {direction:>6} {files:>11.2f} {connector:>15.2f} {connector / files:>6.0%}"
            )
    print(f"\n{'block':>8} {'blocks':>7} {'save ms':>8} {'load ms':>8}")
    for block_bytes in BLOCK_BYTES:
        for num_blocks in LATENCY_BLOCKS:
            times = Bench(Path(args.path), block_bytes, num_blocks).run(args.runs)
            save, load = (min(times[f"connector {direction}"]) * 1e3 for direction in ("save", "load"))
            print(f"{block_bytes >> 10:>4} KiB {num_blocks:>7} {save:>8.2f} {load:>8.2f}")


class Bench:
    """One block size and number of blocks."""

    def __init__(self, medium: Path, block_bytes: int, num_blocks: int) -> None:
        self._medium = medium
        self._num_blocks = num_blocks
        self.total_bytes = block_bytes * num_blocks
        shape = (num_blocks, 8, 2, 4, 16, block_bytes // (8 * 2 * 4 * 16 * 4))
        self._source = torch.rand(shape)
        self._target = torch.zeros(shape)
        self._keys = [BlockHash(os.urandom(16)) for _ in range(num_blocks)]

    def run(self, runs: int) -> dict[str, list[float]]:
        """Seconds of each measurement, one per run, taken in turn."""
        times: dict[str, list[float]] = {}
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir=self._medium) as directory:
                for name, seconds in self._measure(directory).items():
                    times.setdefault(name, []).append(seconds)
        return times

    def _measure(self, directory: str) -> dict[str, float]:
        source, target = (cache.flatten(1).view(torch.uint8).numpy() for cache in (self._source, self._target))
        header = bytearray(HEADER_BYTES)
        plain = Path(directory, "plain")
        plain.mkdir()

        def write_files() -> None:
            for key, row in zip(self._keys, source, strict=True):
                with open(f"{plain}/{key.hex()}", "wb", buffering=0) as file:
                    os.writev(file.fileno(), [header, row])

        def read_files() -> None:
            for key, row in zip(self._keys, target, strict=True):
                with open(f"{plain}/{key.hex()}", "rb", buffering=0) as file:
                    os.readv(file.fileno(), [header, row])

        times = {"files save": _seconds(write_files), "files load": _seconds(read_files)}
        shutil.rmtree(plain)
        self._target.zero_()
        options = {"path": f"{directory}/kv", "threads": 1, "max_bytes": 1 << 40}
        with _Engine(options, self._source) as producer:
            times["connector save"] = producer.transfer("save", self._keys)
        with _Engine(options, self._target) as consumer:
            times["connector load"] = consumer.transfer("load", self._keys)
        assert torch.equal(self._source, self._target)
        return times


class _Engine:
    """A connector around a KV cache; waits for its jobs."""

    def __init__(self, options: dict[str, str | int], kv_cache: torch.Tensor) -> None:
        self._settled = threading.Event()
        self._connector = create_connector("shared-storage", options)
        self._connector.register_kv_cache(kv_cache, bytes(32), self._settled.set)

    def transfer(self, direction: str, keys: list[BlockHash]) -> float:
        """Seconds until the one job for all blocks has settled and was polled."""
        start = self._connector.start_save if direction == "save" else self._connector.start_load
        job = BlockTransfer(1, RequestId("benchmark"), tuple(range(len(keys))), tuple(keys), 16)
        started = time.perf_counter()
        start(job)
        self._settled.wait(60)
        (result,) = self._connector.poll()
        elapsed = time.perf_counter() - started
        assert result.num_blocks_ok == len(keys), result
        self._settled.clear()
        return elapsed

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._connector.close()


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
