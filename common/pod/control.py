"""The Pod service: facts, figures, drain, integrity."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack, aclosing
from typing import Any, Protocol

import grpc

from common import __version__
from common.engine.messages import EngineStats
from common.pb import pods_pb2, pods_pb2_grpc
from common.pod.adapters import PodAdapters
from common.pod.context import PodContext
from common.pod.convert import draft_figures_to_pb, phase_seconds_to_pb, rank_figures_to_pb
from common.pod.profiles import PodProfiles
from common.rpc.convert import adapter_name_from_pb, adapter_name_to_pb
from common.rpc.errors import rpc_errors
from common.step_budget import MIN_PREFILL_TOKENS

DEFAULT_STATS_INTERVAL_S = 0.1
MAX_DRAIN_WAIT_S = 24 * 3600.0  # of a call without a deadline

_ROLES = {"prefill": pods_pb2.POD_ROLE_PREFILL, "decode": pods_pb2.POD_ROLE_DECODE}


class OpenWork(Protocol):
    """The state of the role's front."""

    @property
    def num_handoffs(self) -> int:
        """Handoffs in flight."""

    def violations(self) -> list[str]:
        """Broken invariants of the front, one line each."""


class PodServicer(pods_pb2_grpc.PodServicer):
    """Served by every pod."""

    def __init__(self, context: PodContext, front: OpenWork, profiles: PodProfiles) -> None:
        self._pod = context
        self._front = front
        self._profiles = profiles

    async def GetInfo(  # noqa: N802  (the proto's name)
        self, request: pods_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PodInfo:
        """Static facts of this incarnation."""
        pod, spec = self._pod, self._pod.spec
        method = pod.config.engine_config().speculation.method
        return pods_pb2.PodInfo(
            pod_id=pod.pod_id,
            incarnation=pod.incarnation,
            role=_ROLES[pod.role],
            model_name=pod.config.model_name,
            fingerprint=spec.fingerprint,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            connector=pod.config.connector or "",
            version=__version__,
            target_itl_ms=0.0 if math.isinf(spec.target_itl_s) else 1000 * spec.target_itl_s,
            min_prefill_tokens=MIN_PREFILL_TOKENS,
            eos_token_ids=spec.eos_token_ids,
            kv_dtype=spec.layout.kv_dtype,
            parallel_sizes=pod.config.parallel.sizes,
            proposer=method.name if method is not None else "",
            max_adapters=pod.config.adapters.max_loras,
            pooling=pods_pb2.PoolingInfo(
                tasks=spec.pooling.tasks,
                embedding_size=spec.pooling.embedding_size,
                labels=spec.pooling.labels,
            ),
        )

    async def WatchStats(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self, request: pods_pb2.WatchStatsRequest, context: grpc.aio.ServicerContext[Any, pods_pb2.PodStats]
    ) -> None:
        """Sends a report of each engine at once, then at each change, at most once per interval; several if many blocks
        of a prefix cache have changed."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            interval_s = request.min_interval_ms / 1000 or DEFAULT_STATS_INTERVAL_S
            adapters, told = self._pod.adapters, -1
            with ExitStack() as stack:
                caches = self._pod.caches if request.with_kv_events else ()
                watches = [stack.enter_context(cache.watch()) for cache in caches]
                async with aclosing(self._pod.stats.watch(interval_s)) as reports:
                    async for by_engine in reports:
                        for rank, stats in enumerate(by_engine):
                            changes = watches[rank].take() if watches else []
                            report = self._report(stats, rank, *changes[:1])
                            if told != adapters.version:
                                told = adapters.version
                                report.adapters.CopyFrom(_adapters_to_pb(adapters))
                            await context.write(report)
                            for events in changes[1:]:
                                await context.write(self._report(stats, rank, events))

    async def Drain(  # noqa: N802
        self, request: pods_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.DrainResponse:
        """Stops admission and returns when running work has finished, or shortly before the call's deadline."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            admission = self._pod.admission
            admission.drain()
            if request.returns_at_once:
                return pods_pb2.DrainResponse(num_unfinished=admission.num_open)
            remaining = context.time_remaining()  # None without a deadline, unlike in the type stubs
            wait_s = MAX_DRAIN_WAIT_S if remaining is None else remaining * 0.9
            try:
                async with asyncio.timeout(wait_s):
                    await admission.wait_idle()
            except TimeoutError:
                pass  # the response has the number of those left
        return pods_pb2.DrainResponse(num_unfinished=admission.num_open)

    async def Undrain(  # noqa: N802
        self, request: pods_pb2.UndrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.UndrainResponse:
        """Admits work again."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            self._pod.admission.undrain()
        return pods_pb2.UndrainResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pods_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.ResetPrefixCacheResponse:
        """Removes the blocks that no request uses from the prefix cache."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            await self._pod.engine.reset_prefix_cache()
        return pods_pb2.ResetPrefixCacheResponse()

    async def CheckIntegrity(  # noqa: N802
        self, request: pods_pb2.CheckIntegrityRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.CheckIntegrityResponse:
        """Checks the invariants of engine and front."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            report = await self._pod.engine.check_integrity()
        return pods_pb2.CheckIntegrityResponse(
            violations=[*report.violations, *self._front.violations()],
            num_requests=max(report.num_requests, self._pod.admission.num_open),  # one request may be in both
            num_blocks_in_use=report.num_blocks_in_use,
            num_transfers=report.num_transfers + self._front.num_handoffs,
        )

    async def Profile(  # type: ignore[override]  # noqa: N802  (as WatchStats)
        self, request: pods_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, pods_pb2.ProfileEvent]
    ) -> None:
        """Takes a profile of the engine and sends it. A call that ends before ends the profile."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            await self._profiles.take(request, context.write)

    async def LoadAdapter(  # noqa: N802
        self, request: pods_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.LoadAdapterResponse:
        """Makes requests with an adapter computable."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            facts = await self._pod.adapters.load(request.path, request.digest)
        return pods_pb2.LoadAdapterResponse(digest=facts.digest, rank=facts.rank, num_bytes=facts.num_bytes)

    async def NameAdapter(  # noqa: N802
        self, request: pods_pb2.NameAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.NameAdapterResponse:
        """Gives a name to a loaded adapter, or takes one away."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            self._pod.adapters.give_name(adapter_name_from_pb(request.name)._replace(is_permanent=False))
        return pods_pb2.NameAdapterResponse()

    def _report(
        self, stats: EngineStats, data_parallel_rank: int, events: pods_pb2.KVEvents | None = None
    ) -> pods_pb2.PodStats:
        return pods_pb2.PodStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_for_remote_kv=stats.num_waiting_for_remote_kv,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            num_queued_tokens=stats.num_queued_tokens,
            last_step_s=stats.last_step_s,
            last_step_tokens=stats.last_step_tokens,
            num_preemptions=stats.num_preemptions,
            draining=self._pod.admission.draining,
            kv_events=events,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generation_tokens=stats.num_generation_tokens,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            kv_bytes_saved=stats.saves.num_blocks * self._pod.spec.bytes_per_whole_block,
            kv_bytes_loaded=stats.loads.num_blocks * self._pod.spec.bytes_per_whole_block,
            phases=phase_seconds_to_pb(self._pod.stats.phases[data_parallel_rank]),
            data_parallel_rank=data_parallel_rank,
            ranks=map(rank_figures_to_pb, stats.ranks),
            drafts=draft_figures_to_pb(stats.drafts),
            running_adapters=stats.running_adapters,
        )


def _adapters_to_pb(adapters: PodAdapters) -> pods_pb2.PodAdapters:
    return pods_pb2.PodAdapters(names=map(adapter_name_to_pb, adapters.names), loaded=adapters.loaded)
