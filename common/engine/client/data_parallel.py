"""Several engines behind one client: each with its own scheduler, KV cache and ranks.

A request stays in the engine that it was given to. Its id there says which one that is, so that what is said of it
later finds the engine without any table, also after it has ended.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from common.cancellation import end_tasks
from common.engine.client.base import EngineClient, EngineProfile
from common.engine.contract.adapters import AdapterFacts
from common.engine.messages import (
    AddRequest,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
    join_stats,
)
from common.errors import ConflictError, EngineDeadError, ModelLoadError
from common.types import RequestId

_WAITING_WEIGHT = 4  # requests that run, as which one that waits counts
_MAX_BACKLOG = 64  # outputs of all engines that the consumer may be behind before they wait

_Result = TypeVar("_Result")


def id_in_engine(request_id: RequestId, serial: int, data_parallel_rank: int) -> RequestId:
    """The id of a request of its own, which says in which engine it is."""
    place = f"@{data_parallel_rank}" if data_parallel_rank else ""
    return RequestId(f"{request_id}~{serial}{place}")


def data_parallel_rank_of(engine_id: RequestId) -> int:
    """The engine of an `id_in_engine`."""
    return int(engine_id.rpartition("~")[2].partition("@")[2] or 0)


class DataParallelClient:
    """See EngineClient. Ends as soon as one of the engines dies."""

    def __init__(self, engines: Sequence[EngineClient], directory: str | None = None) -> None:
        """Takes ownership of the engines' clients, of which there are at least two, and of a directory that they
        use."""
        self._engines = engines
        self._directory = directory
        self._stats = [EngineStats()] * len(engines)
        self._num_sent = [0] * len(engines)  # requests since the stats
        self._last = len(engines) - 1  # that was chosen
        self._adapters: set[bytes] = set()  # digests of those that all have
        self._cause_of_death: EngineDeadError | None = None

    async def start(self) -> EngineSpec:
        """See EngineClient. Starts all at once; if one fails, none is left open."""
        starting = [asyncio.create_task(engine.start()) for engine in self._engines]
        try:
            joined = join_specs(await asyncio.gather(*starting))
            self._stats = await self.stats_by_engine()
        except BaseException:
            await end_tasks(starting)
            await self.close()
            raise
        return joined

    def least_loaded(self) -> int:
        """See EngineClient. They take turns if several have the same to do."""
        self._last = self._choose()
        self._num_sent[self._last] += 1
        return self._last

    def add_request(self, request: AddRequest) -> None:
        """See EngineClient."""
        self._check_alive()
        self._engines[data_parallel_rank_of(request.request_id)].add_request(request)

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """See EngineClient."""
        self._check_alive()
        by_engine: dict[int, list[RequestId]] = {}
        for request_id in request_ids:
            by_engine.setdefault(data_parallel_rank_of(request_id), []).append(request_id)
        for rank, own in by_engine.items():
            self._engines[rank].abort_requests(own)

    def update_transfer(self, command: TransferUpdate) -> None:
        """See EngineClient."""
        self._check_alive()
        self._engines[data_parallel_rank_of(command.request_id)].update_transfer(command)

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        """See EngineClient."""
        self._check_alive()
        self._engines[data_parallel_rank_of(command.request_id)].quiesce_transfer(command)

    def set_transfer_target(self, target: TransferTarget) -> None:
        """See EngineClient."""
        self._check_alive()
        self._engines[data_parallel_rank_of(target.request_id)].set_transfer_target(target)

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """See EngineClient. Those of each engine are in order."""
        queue: asyncio.Queue[EngineCoreOutputs | EngineDeadError | None] = asyncio.Queue(_MAX_BACKLOG)
        readers = [asyncio.create_task(self._read(rank, queue), name=f"outputs {rank}") for rank in range(self._size)]
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, EngineDeadError):
                    raise item
                yield item
        finally:
            await end_tasks(readers)

    async def spec(self) -> EngineSpec:
        """See EngineClient."""
        return join_specs(await _all(engine.spec() for engine in self._engines))

    async def stats(self) -> EngineStats:
        """See EngineClient."""
        return join_stats(await self.stats_by_engine())

    async def stats_by_engine(self) -> list[EngineStats]:
        """See EngineClient."""
        return await _all(engine.stats() for engine in self._engines)

    async def check_integrity(self) -> IntegrityReport:
        """See EngineClient."""
        reports = await _all(engine.check_integrity() for engine in self._engines)
        return IntegrityReport(
            violations=[f"engine {rank}: {each}" for rank, report in enumerate(reports) for each in report.violations],
            num_requests=sum(report.num_requests for report in reports),
            num_blocks_in_use=sum(report.num_blocks_in_use for report in reports),
            num_transfers=sum(report.num_transfers for report in reports),
        )

    def profile(self, *, seconds: float, max_steps: int = 0) -> AbstractAsyncContextManager[EngineProfile]:
        """See EngineClient. Of the first engine."""
        return self._engines[0].profile(seconds=seconds, max_steps=max_steps)

    async def reset_prefix_cache(self) -> None:
        """See EngineClient."""
        await _all(engine.reset_prefix_cache() for engine in self._engines)

    async def load_adapter(self, directory: str) -> AdapterFacts:
        """See EngineClient. All have it, or the first error is raised, and none has it that did not before. Raises
        ConflictError if they read different weights."""
        answers = await asyncio.gather(
            *(engine.load_adapter(directory) for engine in self._engines), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        loaded = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not errors and len({each.digest for each in loaded}) > 1:
            errors = [ConflictError(f"lora_path: {directory} was replaced while engines read it", param="lora_path")]
        if not errors:
            self._adapters.add(loaded[0].digest)
            return loaded[0]
        for engine, answer in zip(self._engines, answers, strict=True):
            if not isinstance(answer, BaseException) and answer.digest not in self._adapters:
                await engine.unload_adapter(answer.digest)
        raise errors[0]

    async def unload_adapter(self, digest: bytes) -> None:
        """See EngineClient."""
        self._adapters.discard(digest)
        await _all(engine.unload_adapter(digest) for engine in self._engines)

    async def close(self) -> None:
        """See EngineClient."""
        try:
            await _all(engine.close() for engine in self._engines)
        finally:
            if self._directory is not None:
                await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return len(self._engines)

    def _choose(self) -> int:
        in_turn = [(self._last + turn) % self._size for turn in range(1, self._size + 1)]
        return min(in_turn, key=self._load)

    def _load(self, rank: int) -> int:
        stats = self._stats[rank]
        num_waiting = stats.num_waiting + stats.num_waiting_for_remote_kv + self._num_sent[rank]
        return _WAITING_WEIGHT * num_waiting + stats.num_running

    async def _read(self, rank: int, queue: asyncio.Queue[EngineCoreOutputs | EngineDeadError | None]) -> None:
        try:
            async for outputs in self._engines[rank].outputs():
                if outputs.stats is not None:
                    self._stats[rank] = outputs.stats
                    self._num_sent[rank] = 0
                await queue.put(msgspec.structs.replace(outputs, data_parallel_rank=rank) if rank else outputs)
            await queue.put(None)
        except EngineDeadError as error:
            died = EngineDeadError(f"engine {rank} of {self._size}: {error.message}")
            self._cause_of_death = self._cause_of_death or died
            await queue.put(died)

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death.message)


async def _all(calls: Iterable[Awaitable[_Result]]) -> list[_Result]:
    return list(await asyncio.gather(*calls))


def join_specs(by_engine: Sequence[EngineSpec]) -> EngineSpec:
    """Returns the facts that all engines share. Raises ModelLoadError if they have not loaded the same model."""
    first = by_engine[0]
    for rank, other in enumerate(by_engine):
        if (other.fingerprint, other.layout) != (first.fingerprint, first.layout):
            raise ModelLoadError(
                f"the engines have loaded different models: the fingerprint is {first.fingerprint.hex()} in engine 0, "
                f"{other.fingerprint.hex()} in engine {rank}",
                param="model",
            )
    return msgspec.structs.replace(
        first,
        num_blocks=max(spec.num_blocks for spec in by_engine),
        max_model_len=min(spec.max_model_len for spec in by_engine),
        target_itl_s=max(spec.target_itl_s for spec in by_engine),
        max_write_s=max(spec.max_write_s for spec in by_engine),
        kernels_failed=any(spec.kernels_failed for spec in by_engine),
        connector_addresses=tuple(spec.connector_addresses[0] for spec in by_engine),
    )
