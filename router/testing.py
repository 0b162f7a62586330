"""Pods without an engine, for tests and for measuring the router alone.

They speak the real protocol over real gRPC and answer with tokens that are a function of the request, so that any pod
of a cluster continues any request the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from common.errors import BatonError, ConflictError, InvalidRequestError, UnavailableError
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.rpc.errors import error_to_pb, rpc_errors
from common.rpc.server import RpcServer

Reply = Callable[[common_pb2.EngineRequest], Sequence[int]]
"""All output tokens of a request, from index 0 on. Shorter than max_tokens: the last one ends the generation."""

_EMBEDDING_SIZE = 4
_LABELS = ("left", "right")

_incarnations = itertools.count(1)


def counting_reply(request: common_pb2.EngineRequest) -> Sequence[int]:
    """Counts on from the last prompt token: as many tokens as allowed, each the one before plus one; all below 1024."""
    start = request.prompt_token_ids[-1] + 1
    return [(start + index) % 1000 + 24 for index in range(request.sampling.max_tokens)]


def fake_numbers(token_ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """The numbers that fake pods compute of a prompt."""
    return (sum(token_ids) % 97 + np.arange(size)).astype("<f4")


def fixed_reply(token_ids: Sequence[int]) -> Reply:
    """The same tokens for every request."""
    return lambda request: token_ids


class FakePod:
    """The base of both roles: a server with Pod, health and reflection. An async context manager."""

    role = pods_pb2.POD_ROLE_UNSPECIFIED
    service_name = ""

    def __init__(
        self,
        reply: Reply = counting_reply,
        *,
        port: int = 0,
        fingerprint: bytes = b"f" * 32,
        kv_dtype: str = "float32",
        block_size: int = 16,
        vocab_size: int = 2048,
        max_model_len: int = 4096,
        connector: str = "fake",
        model_name: str = "fake",
        pooling: Sequence[str] = (),
    ) -> None:
        """`pooling`: tasks of its model, of which "generate" is one; empty: it generates only."""
        self.reply = reply
        self.numbers = fake_numbers
        self.pooled: list[pods_pb2.PoolRequest] = []
        self.pooling_failure: BatonError | None = None  # raised for each prompt that is pooled if set
        self.num_cancelled = 0
        self.may_answer = asyncio.Event()  # calls, not requests of a session
        self.may_answer.set()
        self.num_cached_tokens = 0  # reported for each request
        self.profiles: list[pods_pb2.ProfileRequest] = []
        self.profile_events: list[pods_pb2.ProfileEvent] = []  # the answer
        self.num_cache_resets = 0
        self.adapters: dict[str, bytes] = {}  # digests by the paths from which it can load them
        self.loaded: list[bytes] = []
        self.loads: list[pods_pb2.LoadAdapterRequest] = []
        self.names: dict[str, pods_pb2.AdapterName] = {}  # of its adapters
        self.refuses_names = False
        self.stats = pods_pb2.PodStats(num_free_blocks=100, num_blocks=100, adapters=pods_pb2.PodAdapters())
        self.info = pods_pb2.PodInfo(
            pod_id=f"fake-{os.getpid()}-{next(_incarnations)}",
            role=self.role,
            model_name=model_name,
            fingerprint=fingerprint,
            kv_dtype=kv_dtype,
            block_size=block_size,
            num_blocks=100,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            connector=connector,
            version="fake",
        )
        if pooling:
            self.info.pooling.CopyFrom(
                pods_pb2.PoolingInfo(tasks=pooling, embedding_size=_EMBEDDING_SIZE, labels=_LABELS)
            )
        self._port = port
        self._server: RpcServer | None = None
        self._changed = asyncio.Condition()

    @property
    def address(self) -> str:
        """host:port, known once it has started."""
        assert self._server is not None
        return self._server.address

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of its health service."""
        assert self._server is not None
        await self._server.set_serving(serving)

    async def set_stats(self, stats: pods_pb2.PodStats) -> None:
        """Report these figures from now on."""
        self.stats = stats
        await self.changed()

    async def report_adapters(self) -> None:
        """Say which adapters it has."""
        stats = pods_pb2.PodStats()
        stats.CopyFrom(self.stats)
        stats.adapters.CopyFrom(pods_pb2.PodAdapters(names=self.names.values(), loaded=self.loaded))
        await self.set_stats(stats)

    async def changed(self) -> None:
        """Wake everyone who waits for something about this pod."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Return when `condition()` is true; it is looked at whenever something happens on the pod."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def start(self) -> None:
        """Listen and be healthy."""
        self._server = RpcServer("127.0.0.1", self._port, ["baton.v1.Pod", "baton.v1.Pooling", self.service_name])
        pods_pb2_grpc.add_PoolingServicer_to_server(_PoolingServicer(self), self._server.grpc_server)
        pods_pb2_grpc.add_PodServicer_to_server(_PodServicer(self), self._server.grpc_server)
        self.add_service(self._server.grpc_server)
        await self._server.start()
        self._port = self._server.port
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Die: all connections break. It may be started again, on the same port."""
        if self._server is not None:
            await self._server.stop()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register what the role serves."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


class FakePrefillPod(FakePod):
    """Answers Prefill with the first token of the reply."""

    role = pods_pb2.POD_ROLE_PREFILL
    service_name = "baton.v1.Prefill"

    def __init__(self, reply: Reply = counting_reply, **facts: Any) -> None:
        super().__init__(reply, **facts)
        self.prefills: list[pods_pb2.PrefillRequest] = []
        self.failure: BatonError | None = None  # raised for each request if set

    def add_service(self, server: grpc.aio.Server) -> None:
        """See FakePod."""
        pods_pb2_grpc.add_PrefillServicer_to_server(_PrefillServicer(self), server)


class FakeDecodePod(FakePod):
    """Answers each request with one token per step, at most `allowed` in all if that is set."""

    role = pods_pb2.POD_ROLE_DECODE
    service_name = "baton.v1.Decode"

    def __init__(self, reply: Reply = counting_reply, *, step_s: float = 0.0, **facts: Any) -> None:
        super().__init__(reply, **facts)
        self.step_s = step_s
        self.allowed: int | None = None  # output length at which each request pauses
        self.recomputes_only = False  # a remote prefill never succeeds: wait for PrefillFailed
        self.failure: BatonError | None = None  # ends each request if set
        self.submits: list[pods_pb2.Submit] = []
        self.aborts: list[str] = []
        self.prefill_failures: list[pods_pb2.PrefillFailed] = []
        self.live: dict[str, _FakeRequest] = {}

    def add_service(self, server: grpc.aio.Server) -> None:
        """See FakePod."""
        pods_pb2_grpc.add_DecodeServicer_to_server(_DecodeServicer(self), server)

    async def allow(self, num_tokens: int | None) -> None:
        """Let requests go on to this output length; None: to their end."""
        self.allowed = num_tokens
        await self.changed()

    async def stop(self) -> None:
        """See FakePod."""
        await super().stop()
        self.live.clear()


class _FakeRequest:
    def __init__(self, pod: FakeDecodePod, submit: pods_pb2.Submit) -> None:
        self._pod = pod
        self._request = submit.request
        self._tokens = list(pod.reply(submit.request))[: submit.request.sampling.max_tokens]
        self._next = len(submit.request.output_token_ids)
        self._reported = False
        self.waits_for_prefill = pod.recomputes_only and submit.HasField("remote_prefill")
        self._has_prompt = not submit.HasField("remote_prefill")  # computes it, or has to after all
        self._may_recompute = submit.kv_failure_policy != common_pb2.KV_FAILURE_POLICY_FAIL
        self._failure: BatonError | None = None

    @property
    def runnable(self) -> bool:
        return not self.waits_for_prefill and (self._pod.allowed is None or self._next < self._pod.allowed)

    def note_prefill_failed(self) -> None:
        """The KV will not come: go on without, unless that is forbidden."""
        if self.waits_for_prefill and not self._may_recompute:
            self._failure = UnavailableError("the KV did not come: prefill_failed", param="kv_failure_policy")
        self.waits_for_prefill, self._has_prompt = False, True

    def step(self) -> pods_pb2.TokenDelta:
        """The next token."""
        request = self._request
        if (failure := self._failure or self._pod.failure) is not None:
            return pods_pb2.TokenDelta(
                request_id=request.request_id,
                finish_reason=common_pb2.FINISH_REASON_ERROR,
                error=error_to_pb(failure),
            )
        delta = pods_pb2.TokenDelta(
            request_id=request.request_id, start_index=self._next, token_ids=[self._tokens[self._next]]
        )
        if request.sampling.HasField("num_logprobs"):
            delta.logprobs.append(fake_logprobs(self._tokens[self._next], request.sampling.num_logprobs))
        if not self._reported and self._has_prompt:
            delta.prompt_start = 1
            delta.prompt_logprobs.extend(_fake_prompt_logprobs(request))
        if not self._reported:
            self._reported = True
            delta.report.CopyFrom(pods_pb2.DecodeReport(num_cached_tokens=self._pod.num_cached_tokens))
        self._next += 1
        if self._next == len(self._tokens):
            by_length = self._next == request.sampling.max_tokens
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH if by_length else common_pb2.FINISH_REASON_STOP
        return delta


def fake_logprobs(token_id: int, num_top: int) -> common_pb2.PositionLogprobs:
    """The token with -0.5, then its neighbours, each one less likely than the one before."""
    top = [common_pb2.TokenLogprob(token_id=token_id + rank, logprob=-0.5 - rank) for rank in range(num_top)]
    return common_pb2.PositionLogprobs(sampled=-0.5, top=top)


def _fake_prompt_logprobs(request: common_pb2.EngineRequest) -> list[common_pb2.PositionLogprobs]:
    """Returns entries for each prompt token but the first, if they are asked for."""
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    entries = [fake_logprobs(each, request.sampling.prompt_logprobs) for each in request.prompt_token_ids[1:]]
    for entry in entries:
        entry.rank = 1
    return entries


class _PodServicer(pods_pb2_grpc.PodServicer):
    def __init__(self, pod: FakePod) -> None:
        self._pod = pod

    async def GetInfo(  # noqa: N802
        self, request: pods_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PodInfo:
        return self._pod.info

    async def WatchStats(  # noqa: N802
        self, request: pods_pb2.WatchStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pods_pb2.PodStats]:
        while True:
            reported = self._pod.stats
            yield reported
            await self._pod.until(lambda: self._pod.stats is not reported, timeout_s=3600)  # noqa: B023

    async def Drain(  # noqa: N802
        self, request: pods_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.DrainResponse:
        await self._pod.set_stats(pods_pb2.PodStats(draining=True))
        return pods_pb2.DrainResponse()

    async def Undrain(  # noqa: N802
        self, request: pods_pb2.UndrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.UndrainResponse:
        await self._pod.set_stats(pods_pb2.PodStats(num_free_blocks=100, num_blocks=100))
        return pods_pb2.UndrainResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pods_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.ResetPrefixCacheResponse:
        self._pod.num_cache_resets += 1
        return pods_pb2.ResetPrefixCacheResponse()

    async def CheckIntegrity(  # noqa: N802
        self, request: pods_pb2.CheckIntegrityRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.CheckIntegrityResponse:
        return pods_pb2.CheckIntegrityResponse()

    async def LoadAdapter(  # noqa: N802
        self, request: pods_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.LoadAdapterResponse:
        self._pod.loads.append(request)
        async with rpc_errors(context):
            digest = self._pod.adapters.get(request.path)
            if digest is None:
                raise InvalidRequestError(f"lora_path: there is no {request.path}", param="lora_path")
            if request.digest not in (b"", digest):
                raise ConflictError("another digest", param="lora_path")
        if digest not in self._pod.loaded:
            self._pod.loaded.append(digest)
            await self._pod.report_adapters()
        return pods_pb2.LoadAdapterResponse(digest=digest)

    async def NameAdapter(  # noqa: N802
        self, request: pods_pb2.NameAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.NameAdapterResponse:
        async with rpc_errors(context):
            if self._pod.refuses_names:
                raise UnavailableError("it takes no names")
        self._pod.names[request.name.name] = request.name
        await self._pod.report_adapters()
        return pods_pb2.NameAdapterResponse()

    async def Profile(  # noqa: N802
        self, request: pods_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pods_pb2.ProfileEvent]:
        self._pod.profiles.append(request)
        for event in self._pod.profile_events:
            yield event


class _PoolingServicer(pods_pb2_grpc.PoolingServicer):
    def __init__(self, pod: FakePod) -> None:
        self._pod = pod

    async def Pool(  # noqa: N802
        self, request: pods_pb2.PoolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PoolResponse:
        pod = self._pod
        pod.pooled.append(request)
        await pod.changed()
        try:
            await pod.may_answer.wait()
        except asyncio.CancelledError:
            pod.num_cancelled += 1
            await pod.changed()
            raise
        async with rpc_errors(context):
            if pod.pooling_failure is not None:
                raise pod.pooling_failure
        pooling, token_ids = request.request.pooling, list(request.request.prompt_token_ids)
        is_embedding = pooling.task in (common_pb2.POOLING_TASK_EMBED, common_pb2.POOLING_TASK_TOKEN_EMBED)
        size = (pooling.dimensions or _EMBEDDING_SIZE) if is_embedding else len(_LABELS)
        if pooling.task in (common_pb2.POOLING_TASK_EMBED, common_pb2.POOLING_TASK_CLASSIFY):
            rows = [pod.numbers(token_ids, size)]
        else:
            rows = [pod.numbers(token_ids[: end + 1], size) for end in range(len(token_ids))]
        values = b"".join(row.tobytes() for row in rows)
        return pods_pb2.PoolResponse(values=values, row_size=size, num_cached_tokens=pod.num_cached_tokens)


class _PrefillServicer(pods_pb2_grpc.PrefillServicer):
    def __init__(self, pod: FakePrefillPod) -> None:
        self._pod = pod

    async def Prefill(  # noqa: N802
        self, request: pods_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PrefillResponse:
        pod = self._pod
        pod.prefills.append(request)
        await pod.changed()
        try:
            await pod.may_answer.wait()
        except asyncio.CancelledError:
            pod.num_cancelled += 1
            await pod.changed()
            raise
        async with rpc_errors(context):
            if pod.failure is not None:
                raise pod.failure
        tokens, sampling = pod.reply(request.request), request.request.sampling
        response = pods_pb2.PrefillResponse(
            first_token_id=tokens[0],
            num_cached_tokens=pod.num_cached_tokens,
            prompt_logprobs=_fake_prompt_logprobs(request.request),
        )
        if sampling.HasField("num_logprobs"):
            response.logprobs.CopyFrom(fake_logprobs(tokens[0], sampling.num_logprobs))
        if sampling.max_tokens == 1:
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
        elif len(tokens) == 1:
            response.finish_reason = common_pb2.FINISH_REASON_STOP
        return response


class _DecodeServicer(pods_pb2_grpc.DecodeServicer):
    def __init__(self, pod: FakeDecodePod) -> None:
        self._pod = pod

    async def Session(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pods_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pods_pb2.DecodeEvents]:
        pod = self._pod
        mine: dict[str, _FakeRequest] = {}
        reader = asyncio.create_task(self._read(request_iterator, mine))
        try:
            while True:
                if not any(request.runnable for request in mine.values()):
                    await pod.until(lambda: any(request.runnable for request in mine.values()), timeout_s=3600)
                deltas = [request.step() for request in list(mine.values()) if request.runnable]
                for delta in deltas:
                    if delta.finish_reason:
                        self._forget(delta.request_id, mine)
                yield pods_pb2.DecodeEvents(deltas=deltas)
                await pod.changed()
                await asyncio.sleep(pod.step_s)
        finally:
            reader.cancel()
            for request_id in list(mine):
                self._forget(request_id, mine)

    async def _read(self, commands: AsyncIterator[pods_pb2.DecodeCommand], mine: dict[str, _FakeRequest]) -> None:
        pod = self._pod
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    pod.submits.append(command.submit)
                    request_id = command.submit.request.request_id
                    mine[request_id] = pod.live[request_id] = _FakeRequest(pod, command.submit)
                case "abort":
                    pod.aborts.append(command.abort.request_id)
                    self._forget(command.abort.request_id, mine)
                case "prefill_failed":
                    pod.prefill_failures.append(command.prefill_failed)
                    if (request := mine.get(command.prefill_failed.request_id)) is not None:
                        request.note_prefill_failed()
            await pod.changed()

    def _forget(self, request_id: str, mine: dict[str, _FakeRequest]) -> None:
        mine.pop(request_id, None)
        self._pod.live.pop(request_id, None)
