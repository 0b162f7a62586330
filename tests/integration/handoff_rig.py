"""Two engines in this process and the handoff between them, without pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.engine.client.inproc import InprocClient
from common.engine.config import (
    CacheConfig,
    EngineConfig,
    ForHeadsConfig,
    KVCacheDType,
    KVConnectorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from common.engine.kv_connector import WorkerConnector
from common.engine.messages import (
    AddRequest,
    EngineCoreOutputs,
    KVReceived,
    KVSaved,
    KVTransferParams,
    RequestStarted,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.types import FinishReason, RequestId, SampledToken, SamplingParams, TransferId
from kv_store.base import StoreConnectorOptions
from kv_store.faulty_store import FaultyStore
from kv_store.registry import create_connector
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore
from kv_store.store_connector import StoreWorkerConnector

BLOCK_SIZE = 16
CHUNK = 32  # token budget of a step
EPOCH = 1

_faulty_stores: dict[str, FaultyStore] = {}


def create_faulty_connector(name: str, options: Mapping[str, str | int | float | bool]) -> WorkerConnector:
    """A connector factory: shared storage behind a store that stalls and fails on demand, see `faulty_store`."""
    store = FaultyStore(SharedStorageStore(SharedStorageOptions(path=str(options["path"]), max_bytes=1 << 28)))
    _faulty_stores[name] = store
    return StoreWorkerConnector(store, StoreConnectorOptions(threads=1))


def faulty_store(name: str) -> FaultyStore:
    return _faulty_stores[name]


def create_engine(
    model_dir: Path,
    path: Path | None,
    *,
    faulty_name: str = "",
    num_blocks: int = 128,
    max_model_len: int = 256,
    device: str = "cpu",
    batch_invariant: bool = False,
    quantization: str | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    budget: int = CHUNK,
    options: Mapping[str, str | int | float | bool] | None = None,
    executor: str = "inproc",
    speculative: str | None = None,
    for_heads: str | None = None,
    connector_name: str = "shared-storage",
) -> InprocClient:
    """An engine with a connector; `path`: of shared storage; none: without a connector."""
    connector = None
    if path is not None:
        factory = create_faulty_connector if faulty_name else create_connector
        connector = KVConnectorConfig(
            factory=f"{factory.__module__}:{factory.__name__}",
            name=faulty_name or connector_name,
            options={**(_patient(path) if connector_name == "shared-storage" else {}), **(options or {})},
        )
    return InprocClient(
        EngineConfig(
            model=ModelConfig(
                model=str(model_dir),
                dtype="float32",
                device=device,
                max_model_len=max_model_len,
                num_threads=1,
                batch_invariant=batch_invariant,
                quantization=quantization,
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=16),
            connector=connector,
            parallel=ParallelConfig(executor=executor),
            speculation=SpeculationConfig(speculative=speculative),
            for_heads=None if for_heads is None else ForHeadsConfig(speculative=for_heads),
        )
    )


def _patient(path: Path) -> dict[str, str | float]:
    """Options of shared storage that a busy machine may take its time to answer from."""
    return {"path": str(path), "lookup_timeout_s": 60.0}


@dataclass
class Prefilled:
    """What a producer said of one request."""

    num_saved_tokens: int = 0
    failure: str = ""
    first_token: SampledToken | None = None
    digests: list[bytes] = field(default_factory=list)  # that the consumer was not told

    def is_over(self, num_prompt_tokens: int) -> bool:
        return self.failure != "" or (self.first_token is not None and self.num_saved_tokens == num_prompt_tokens)


@dataclass
class Decoded:
    """What a consumer said of one request."""

    tokens: list[SampledToken] = field(default_factory=list)
    received: KVReceived | None = None
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Handoffs:
    """Drives a producer and a consumer and carries the news from one to the other, as pods do."""

    def __init__(self, producer: InprocClient, consumer: InprocClient) -> None:
        self.producer = producer
        self.consumer = consumer
        self.prefilled: dict[RequestId, Prefilled] = {}
        self.decoded: dict[RequestId, Decoded] = {}
        self._requests: dict[RequestId, AddRequest] = {}

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, adapters: Sequence[bytes] | None = None
    ) -> list[Decoded]:
        """All handoffs at once, both engines stepping in turn. `adapters`: their digests, of each request."""
        ids = [RequestId(f"r{len(self._requests) + index}") for index in range(len(prompts))]
        for request_id, prompt, adapter in zip(ids, prompts, adapters or [b""] * len(prompts), strict=True):
            self.start_producer(request_id, prompt, sampling, adapter)
            self.start_consumer(request_id)
        self.run_to_the_end()
        return [self.decoded[request_id] for request_id in ids]

    def run_to_the_end(self) -> None:
        while self.producer.has_unfinished or self.consumer.has_unfinished:
            if self.producer.has_work or (self.producer.has_unfinished and not self.consumer.has_work):
                self.step_producer()
            if self.consumer.has_work or not self.producer.has_unfinished:
                self.step_consumer()

    def prefill(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> Prefilled:
        """The producer's half, to its end."""
        self.start_producer(RequestId(request_id), prompt, sampling)
        while self.producer.has_unfinished:
            self.step_producer()
        return self.prefilled[RequestId(request_id)]

    def decode(self, request_id: str) -> Decoded:
        """The consumer's half after `prefill`, to its end."""
        self.start_consumer(RequestId(request_id))
        while self.consumer.has_unfinished:
            self.step_consumer()
        return self.decoded[RequestId(request_id)]

    def start_producer(
        self, request_id: RequestId, prompt: Sequence[int], sampling: SamplingParams, adapter: bytes = b""
    ) -> None:
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling=sampling,
            adapter=adapter,
            transfer=KVTransferParams(transfer_id=TransferId(request_id), epoch=EPOCH, role="producer"),
        )
        self._requests[request_id] = request
        self.prefilled[request_id] = Prefilled()
        self.producer.add_request(request)

    def start_consumer(self, request_id: RequestId) -> None:
        request = self._requests[request_id]
        self.decoded[request_id] = Decoded()
        self.consumer.add_request(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                adapter=request.adapter,
                transfer=KVTransferParams(transfer_id=TransferId(request_id), epoch=EPOCH, role="consumer"),
            )
        )
        self._tell_consumer(request_id)

    def step_producer(self) -> None:
        for output in self.producer.step().outputs:
            prefilled = self.prefilled[output.request_id]
            if output.tokens:
                prefilled.first_token = output.tokens[0]
            for event in output.events:
                if isinstance(event, KVSaved):
                    prefilled.num_saved_tokens, prefilled.failure = event.num_tokens, event.failure
                    prefilled.digests += event.digests
            if output.request_id in self.decoded:
                self._tell_consumer(output.request_id)

    def step_consumer(self) -> None:
        outputs = self.consumer.step()
        note_decoded(outputs, self.decoded)
        for output in outputs.outputs:
            for event in output.events:
                if isinstance(event, RequestStarted) and self.consumer.spec.is_direct:
                    self._tell_producer(output.request_id, event)

    def check_integrity(self) -> None:
        for engine in (self.producer, self.consumer):
            check_integrity(engine)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()

    def _tell_producer(self, request_id: RequestId, started: RequestStarted) -> None:
        self.producer.set_transfer_target(
            TransferTarget(
                request_id=request_id,
                epoch=EPOCH,
                address=self.consumer.spec.connector_addresses[0],
                num_held_tokens=started.num_cached_tokens,
                block_ids=started.reserved_block_ids,
            )
        )

    def _tell_consumer(self, request_id: RequestId) -> None:
        prefilled = self.prefilled[request_id]
        final = prefilled.is_over(len(self._requests[request_id].prompt_token_ids))
        digests, prefilled.digests = prefilled.digests, []
        if final:
            self.consumer.quiesce_transfer(TransferQuiesced(request_id=request_id, epoch=EPOCH))
        self.consumer.update_transfer(
            TransferUpdate(
                request_id=request_id,
                epoch=EPOCH,
                num_ready_tokens=prefilled.num_saved_tokens,
                final=final,
                first_token=prefilled.first_token if final and not prefilled.failure else None,
                failure=prefilled.failure if final else "",
                digests=digests,
            )
        )


def generate(engine: InprocClient, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    """Tokens of colocated serving, all prompts at once."""
    decoded = {RequestId(f"local-{index}"): Decoded() for index in range(len(prompts))}
    for request_id, prompt in zip(decoded, prompts, strict=True):
        engine.add_request(AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling))
    while engine.has_unfinished:
        note_decoded(engine.step(), decoded)
    return [request.token_ids for request in decoded.values()]


def note_decoded(outputs: EngineCoreOutputs, decoded: dict[RequestId, Decoded]) -> None:
    for output in outputs.outputs:
        assert output.error == ""
        request = decoded[output.request_id]
        if output.tokens:
            assert output.start_index == len(request.tokens)
            request.tokens += output.tokens
        for event in output.events:
            if isinstance(event, KVReceived):
                assert request.received is None
                request.received = event
        request.finish_reason = output.finish_reason or request.finish_reason


def check_integrity(engine: InprocClient) -> None:
    """All requests ended, all transfers settled, all blocks free or cached."""
    report = engine.check_integrity()
    assert report.violations == []
    assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)
