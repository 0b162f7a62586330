"""Workers of ranks for tests."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.engine.config import EngineConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import FinishedStep, ModelRunnerOutput, NewRequest, SchedulerOutput
from common.engine.executor.fake import MemoryConnector
from common.engine.executor.multiproc.fake import FakeRank
from common.engine.worker.connector import create_connector
from common.errors import ConfigError, ModelLoadError
from common.types import BlockHash, RequestId, SampledToken, SamplingParams

MODULE = __name__
_GREEDY = SamplingParams(temperature=0.0)


class FileStore(MutableMapping[BlockHash, torch.Tensor]):
    """A dict in a directory, which processes share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, key: BlockHash) -> torch.Tensor:
        return torch.from_numpy(np.load(self._directory / key.hex()))

    def __setitem__(self, key: BlockHash, block: torch.Tensor) -> None:
        unfinished = self._directory / f".{key.hex()}"
        with unfinished.open("wb") as file:
            np.save(file, block.numpy())
        unfinished.rename(self._directory / key.hex())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and (self._directory / key.hex()).exists()

    def __delitem__(self, key: BlockHash) -> None:
        (self._directory / key.hex()).unlink()

    def __iter__(self) -> Iterator[BlockHash]:
        return (BlockHash(bytes.fromhex(path.name)) for path in self._directory.iterdir())

    def __len__(self) -> int:
        return len(list(self._directory.iterdir()))


def create_files(name: str, options: Mapping[str, str | int | float | bool]) -> MemoryConnector:
    """ConnectorFactory. Blocks are kept in a directory that the options name."""
    return MemoryConnector(FileStore(Path(str(options["path"]))), is_tier=bool(options.get("is_tier")))


def create_lagging(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """With the connector that is configured."""
    assert config.connector is not None
    return _Lagging(config, rank, rendezvous, create_connector(config.connector))


class _Lagging(FakeRank):
    """Rank 1 is late, for which others wait only where they need its part."""

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        if self._rank == 1:
            time.sleep(0.02)
        return super().submit(step, masks)


def create_stopping(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 is stopped when it is to load the model."""
    return _Stopping(config, rank, rendezvous, MemoryConnector())


class _Stopping(FakeRank):
    def load_model(self) -> ModelFacts:
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().load_model()


def create_forgetful(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 loses the last block of each request, and keeps those that have ended."""
    return _Forgetful(config, rank, rendezvous, MemoryConnector())


class _Forgetful(FakeRank):
    def check(self, known: KnownRequests) -> list[str]:
        if self._rank == 1:
            for request in self._worker._requests.values():
                request.block_tables[0].pop()
            self._worker.compute(SchedulerOutput([NewRequest(RequestId("kept"), [1], 1, _GREEDY, [[1]], 0)]))
        return super().check(known)


class _Unchecked(FakeRank):
    def check(self, known: KnownRequests) -> list[str]:
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP if known.block_ids else signal.SIGKILL)
        return super().check(known)


def create_unchecked(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 is stopped when it is asked about requests, and killed when there are none."""
    return _Unchecked(config, rank, rendezvous, MemoryConnector())


def create_late(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 takes more processor time for a step."""
    return _Late(config, rank, rendezvous, MemoryConnector())


class _Late(FakeRank):
    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        if self._rank == 1:
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
        return super().submit(step, masks)


def create_failing(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 fails in the second step of a request; the others wait for it."""
    return _Failing(config, rank, rendezvous, MemoryConnector())


class _Failing(FakeRank):
    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        if self._rank == 1 and step.num_scheduled_tokens and not step.new_requests:
            raise MemoryError("out of device memory")
        return super().submit(step, masks)


def create_unseeded(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """Rank 1 samples something else when there is a seed."""
    return _Unseeded(config, rank, rendezvous, MemoryConnector())


class _Unseeded(FakeRank):
    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        if self._rank == 1:
            step = replace(
                step,
                new_requests=[
                    replace(each, sampling=_GREEDY) if each.sampling.seed else each for each in step.new_requests
                ],
            )
        return super().submit(step, masks)


def create_unloadable(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    return _Unloadable(config, rank, rendezvous, MemoryConnector())


class _Unloadable(FakeRank):
    def load_model(self) -> ModelFacts:
        if self._rank == 1:
            raise ModelLoadError("model: /nowhere has no weights", param="model")
        self.all_reduce(torch.zeros(1))  # which never comes about
        return super().load_model()


def create_unfit(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    raise ConfigError("dtype: int3 is none", param="dtype")


def create_other_models(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    return _OtherModels(config, rank, rendezvous, MemoryConnector())


class _OtherModels(FakeRank):
    def load_model(self) -> ModelFacts:
        return replace(super().load_model(), fingerprint=bytes([self._rank]) * 32)


def create_masked(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    return _Masked(config, rank, rendezvous, MemoryConnector())


class _Masked(FakeRank):
    """Samples the first token that the masks allow. Logs what it has got."""

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        ids = [each for each in step.num_scheduled_tokens if each != "measured"]
        if not ids:
            return FinishedStep(ModelRunnerOutput())
        found = masks(ids, np.arange(len(ids)) + 5)
        logging.getLogger("tests.masked").warning("masks %s", found)
        if found is None:
            return FinishedStep(ModelRunnerOutput())
        words = dict(zip(found.positions, found.words, strict=True))
        outcomes = {
            each: found.no_tokens[at] if at in found.no_tokens else [SampledToken(int(words[at][0]))]
            for at, each in enumerate(ids)
        }
        return FinishedStep(ModelRunnerOutput(outcomes))
