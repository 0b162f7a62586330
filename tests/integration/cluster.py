"""A whole cluster in this process: router, prefill pods and decode pods, real gRPC, a real model, shared storage.

Only the processes are missing, which tests/e2e has.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from common.engine.client import DataParallelClient
from common.engine.client.threaded import AsyncInprocClient
from common.engine.config import (
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from common.engine.executor.base import Executor
from common.engine.executor.inproc import InprocExecutor
from common.pb import inference_pb2, inference_pb2_grpc, pods_pb2, pods_pb2_grpc
from common.pod.config import PodConfig
from common.pod.context import Role
from common.pod.runtime import FrontFactory, PodRuntime
from common.rpc.channel import ChannelOpener, open_channel
from common.rpc.tls import ClusterTlsConfig, cluster_tls
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from decode_service.handoff import HandoffTimeouts
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.pods.config import HealthConfig
from router.runtime import Router
from router.security.config import SecurityConfig
from router.serving.config import ModelsConfig, ServingConfig
from tests.tiny_models import VOCAB_SIZE, tiny_model_dir

BLOCK_SIZE = 8
CHUNK = 24  # tokens per step: a prompt of three blocks is one chunk
DEADLINE_S = 60.0  # of everything that is awaited here; far more than it takes
START_DEADLINE_S = 150.0  # of pods that are processes, which import torch


@dataclass
class Cluster:
    """A running cluster and a gRPC client of its router."""

    router: Router
    prefill: list[PodRuntime]
    decode: list[PodRuntime]
    _stub: inference_pb2_grpc.InferenceStub
    _open_channel: ChannelOpener = open_channel  # to a pod

    async def generate(
        self, prompt: Sequence[int], *, cache_salt: str = "", **options: object
    ) -> inference_pb2.GenerateResponse:
        """The answer to one prompt; greedy unless `options` say otherwise."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            options=inference_pb2.GenerateOptions(**{"temperature": 0.0, **options}),  # type: ignore[arg-type]
            cache_salt=cache_salt,
        )
        return await self.answer(request)

    async def answer(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
        """The whole answer to a request."""
        return await self._stub.Generate(request, timeout=DEADLINE_S)

    async def tokens(self, prompts: Sequence[Sequence[int]], **options: object) -> list[list[int]]:
        """Output tokens of all prompts, asked for at once."""
        answers = await asyncio.gather(*(self.generate(prompt, **options) for prompt in prompts))
        return [list(answer.choices[0].token_ids) for answer in answers]

    def recomputed(self) -> float:
        """Handoffs that did not bring the whole prompt, on all decode pods."""
        return sum(
            sample.value
            for pod in self.decode
            for metric in pod.context.metrics.registry.collect()
            if metric.name == "baton_pod_kv_recompute"
            for sample in metric.samples
            if sample.name.endswith("_total")
        )

    async def check_integrity(self) -> None:
        """On every pod: every request ended, every transfer settled, every block accounted for."""
        for pod in (*self.prefill, *self.decode):
            async with self._open_channel(pod.address) as channel, asyncio.timeout(DEADLINE_S):
                stub = pods_pb2_grpc.PodStub(channel)
                while True:
                    report = await stub.CheckIntegrity(pods_pb2.CheckIntegrityRequest())
                    assert not report.violations
                    if report.num_requests == report.num_blocks_in_use == report.num_transfers == 0:
                        break
                    await asyncio.sleep(0.01)


class Stream:
    """A streamed answer over gRPC."""

    def __init__(
        self, cluster: Cluster, prompt: Sequence[int], options: Mapping[str, object], *, resumable: bool = False
    ) -> None:
        self._request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            options=inference_pb2.GenerateOptions(**options),  # type: ignore[arg-type]
            resumable=resumable,
        )
        self._stub = cluster._stub
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[tuple[float, ...]] = []
        self.finish_reason = 0
        self._changed = asyncio.Event()
        self._begin()

    async def reach(self, num_tokens: int) -> None:
        """Returns when so many tokens have come."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.tokens) < num_tokens:
                self._changed.clear()
                await self._changed.wait()

    async def resume(self) -> None:
        """Breaks the connection, and goes on by the id of the last event."""
        self._call.cancel()
        await asyncio.wait({self.reading})
        assert self._request.last_event_id
        self._begin()

    def _begin(self) -> None:
        self._call = self._stub.GenerateStream(self._request, timeout=DEADLINE_S)
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._call:
            assert chunk.start_index == len(self.tokens)
            self.text += chunk.text
            self.tokens += chunk.token_ids
            self.logprobs += [(each.sampled, *(top.logprob for top in each.top)) for each in chunk.logprobs]
            self.finish_reason = chunk.finish_reason
            self._request.last_event_id = chunk.event_id
            self._changed.set()


@asynccontextmanager
async def running_cluster(
    path: Path,
    model: str | Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_engines: int = 1,
    decode_engines: int = 1,
    prefill_blocks: int = 256,
    decode_blocks: int = 256,
    decode_policy: str = "round_robin",  # every pod is used
    prefix_caching: bool = True,
    kv_cache_dtype: KVCacheDType = "auto",
    tls: ClusterTlsConfig | None = None,
    security: SecurityConfig | None = None,
    connector: str = "shared-storage",
    connector_options: dict[str, str] | None = None,
    chat_template: str = "",
    added_tokens: Sequence[str] = (),
    speculative: str | None = None,
    decode_executor: Callable[[EngineConfig], Executor] = InprocExecutor,
    further_prefill: Sequence[str] = (),
    further_decode: Sequence[str] = (),
    **scheduler: float | None,
) -> AsyncIterator[Cluster]:
    """Serve a tiny model from `path`; when the block ends, the integrity of every pod is checked.

    `model`: a name, or a directory that `with_tokenizer` has made. `prefill_engines` and `decode_engines`: of each pod.
    `added_tokens` have the last ids of the vocabulary. `further_prefill` and `further_decode`: addresses of pods
    elsewhere. `scheduler`: fields of SchedulerConfig.
    """
    directory = (
        model if isinstance(model, Path) else with_tokenizer(tiny_model_dir(model), path / "model", added_tokens)
    )
    if chat_template:
        (directory / "chat_template.jinja").write_text(chat_template)
    settings = {
        "model": ModelConfig(model=str(directory), num_threads=1),
        "scheduler": SchedulerConfig(**{"max_num_batched_tokens": CHUNK, **scheduler}),  # type: ignore[arg-type]
        "speculation": SpeculationConfig(speculative=speculative),
        "connector": connector,
        "connector_path": str(path / "kv") if connector == "shared-storage" else "",
        "connector_options": connector_options or {},
        "tls": tls or ClusterTlsConfig(),
    }
    async with AsyncExitStack() as stack:

        async def start(role: Role, config: PodConfig, make_front: FrontFactory) -> PodRuntime:
            executor = decode_executor if role == "decode" else InprocExecutor
            engines = [
                AsyncInprocClient(config.engine_config(), executor) for _ in range(config.parallel.data_parallel_size)
            ]
            engine = engines[0] if len(engines) == 1 else DataParallelClient(engines)
            return await stack.enter_async_context(PodRuntime(role, config, engine, make_front))

        def cache(num_blocks: int) -> CacheConfig:
            return CacheConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                enable_prefix_caching=prefix_caching,
                kv_cache_dtype=kv_cache_dtype,
            )

        prefill_config = PrefillConfig(
            cache=cache(prefill_blocks),
            parallel=ParallelConfig(data_parallel_size=prefill_engines),
            **settings,  # type: ignore[arg-type]
        )
        decode_config = DecodeConfig(
            cache=cache(decode_blocks),
            parallel=ParallelConfig(data_parallel_size=decode_engines),
            **settings,  # type: ignore[arg-type]
        )
        patient = HandoffTimeouts(queue_s=DEADLINE_S, connect_s=DEADLINE_S)  # or prompts are computed once more
        prefill = [
            await start("prefill", prefill_config, lambda pod: PrefillFront(pod, prefill_config))
            for _ in range(num_prefill)
        ]
        decode = [
            await start("decode", decode_config, lambda pod: DecodeFront(pod, decode_config, timeouts=patient))
            for _ in range(num_decode)
        ]
        routing = RoutingConfig(remote_prefill="prefer", prefill_policy="round_robin", decode_policy=decode_policy)
        router_config = RouterConfig(
            port=0,
            grpc_port=0,
            prefill=[*(pod.address for pod in prefill), *further_prefill],
            decode=[*(pod.address for pod in decode), *further_decode],
            serving=ServingConfig(served_models=ModelsConfig(model=str(directory)), routing=routing),
            pod_health=HealthConfig(stall_timeout_s=0, canary_interval_s=0),  # a crowded machine may stop an engine
            tls=tls or ClusterTlsConfig(),
            security=security or SecurityConfig(),
        )
        router = await stack.enter_async_context(Router(router_config).running())
        channel = await stack.enter_async_context(open_channel(router.grpc_address))
        await all_ready(router, num_prefill + len(further_prefill), num_decode + len(further_decode))
        cluster = Cluster(router, prefill, decode, inference_pb2_grpc.InferenceStub(channel))
        if tls is not None and (joined := cluster_tls(tls)) is not None:
            cluster._open_channel = joined.open_channel
        yield cluster
        await cluster.check_integrity()


async def all_ready(router: Router, num_prefill: int, num_decode: int) -> None:
    """Returns when the router reaches so many pods."""
    changed = asyncio.Event()
    router.cluster.on_change(changed.set)
    async with asyncio.timeout(START_DEADLINE_S):
        while (len(router.cluster.ready_prefill()), len(router.cluster.ready_decode())) != (num_prefill, num_decode):
            await changed.wait()
            changed.clear()


def with_tokenizer(model: Path, directory: Path, added_tokens: Sequence[str] = ()) -> Path:
    """A copy of the model with a tokenizer: one token per byte, but for those that added tokens take."""
    shutil.copytree(model, directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == VOCAB_SIZE
    alphabet[VOCAB_SIZE - len(added_tokens) :] = added_tokens
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_tokens(list(added_tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
