from __future__ import annotations

import queue
import threading

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ParallelConfig
from common.engine.executor.fake import DirectMemoryConnector, FakeExecutor, MemoryConnector, expected_tokens
from common.engine.kv_connector import BlockTransfer
from common.engine.messages import (
    AddRequest,
    KVReceived,
    KVSaved,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.errors import ConfigError, EngineDeadError
from common.types import FinishReason, RequestId, SamplingParams, TransferId
from tests.unit.common.engine.fake_engines import FailingExecutor

CONFIG = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=64))
TIMEOUT_S = 60.0


class LateConnector(MemoryConnector):
    """Saves settle when told, on whatever thread tells."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: queue.SimpleQueue[BlockTransfer] = queue.SimpleQueue()

    def start_save(self, transfer: BlockTransfer) -> None:
        self._pending.put(transfer)

    def settle_one(self) -> None:
        super().start_save(self._pending.get(timeout=TIMEOUT_S))


def request(request_id: str, *, transfer: KVTransferParams | None = None) -> AddRequest:
    return AddRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=[1, 2, 3, 4, 5],
        sampling=SamplingParams(temperature=0.0, max_tokens=4),
        transfer=transfer,
    )


def run(client: InprocClient) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while client.has_unfinished:
        outputs += client.step(timeout_s=TIMEOUT_S).outputs
    return outputs


def test_generates() -> None:
    with InprocClient(CONFIG, FakeExecutor(block_size=4)) as client:
        client.add_request(request("a"))
        client.add_request(request("b"))
        client.abort_requests([RequestId("b")])
        outputs = run(client)
        tokens = [token.token_id for output in outputs if output.request_id == "a" for token in output.tokens]
        assert tokens == expected_tokens([1, 2, 3, 4, 5], 4)
        assert [output.finish_reason for output in outputs if output.request_id == "b"] == [FinishReason.ABORT]
        assert client.check_integrity().violations == []
        assert client.stats().num_generation_tokens == 4


def test_step_waits_for_a_transfer_to_settle() -> None:
    connector = LateConnector()
    transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="producer")
    with InprocClient(CONFIG, FakeExecutor(block_size=4, connector=connector)) as client:
        client.add_request(request("a", transfer=transfer))
        while client.has_work:
            client.step()
        assert client.has_unfinished
        assert client.step(timeout_s=0.0).outputs == []  # nothing to do, nothing settled
        settler = threading.Thread(target=connector.settle_one)
        settler.start()
        outputs = run(client)
        settler.join(TIMEOUT_S)
        assert [output.events for output in outputs] == [[KVSaved(num_tokens=5)]]
        report = client.check_integrity()
        assert (report.violations, report.num_transfers, report.num_blocks_in_use) == ([], 0, 0)


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_direct_handoff(of_producer: int, of_consumer: int) -> None:
    request_id = RequestId("a")

    def create(num_ranks: int) -> FakeExecutor:
        return FakeExecutor(block_size=4, connector=DirectMemoryConnector(), num_ranks=num_ranks, num_kv_heads=4)

    producing, consuming = create(of_producer), create(of_consumer)
    with InprocClient(CONFIG, producing) as producer, InprocClient(CONFIG, consuming) as consumer:
        assert producer.spec.is_direct
        producer.add_request(
            request("a", transfer=KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="producer"))
        )
        consumer.add_request(
            request("a", transfer=KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="consumer"))
        )
        (started,) = consumer.step().outputs[0].events
        assert isinstance(started, RequestStarted)
        producer.set_transfer_target(
            TransferTarget(
                request_id=request_id,
                epoch=1,
                address=consumer.spec.connector_addresses[0],
                num_held_tokens=started.num_cached_tokens,
                block_ids=started.reserved_block_ids,
            )
        )
        prefilled = run(producer)
        (first,) = [token for output in prefilled for token in output.tokens]
        (saved,) = [event for output in prefilled for event in output.events if isinstance(event, KVSaved)]
        assert (saved.num_tokens, len(saved.digests)) == (5, 2)
        consumer.quiesce_transfer(TransferQuiesced(request_id=request_id, epoch=1))
        consumer.update_transfer(
            TransferUpdate(
                request_id=request_id,
                epoch=1,
                num_ready_tokens=5,
                final=True,
                first_token=first,
                digests=saved.digests,
            )
        )
        decoded = run(consumer)
        assert [token.token_id for output in decoded for token in output.tokens] == expected_tokens([1, 2, 3, 4, 5], 4)
        (received,) = [event for output in decoded for event in output.events if isinstance(event, KVReceived)]
        assert (received.num_tokens, received.recompute_reason) == (5, "")
        for client in (producer, consumer):
            report = client.check_integrity()
            assert (report.violations, report.num_transfers, report.num_blocks_in_use) == ([], 0, 0)


def test_death_in_a_step() -> None:
    executor = FailingExecutor(block_size=4)
    client = InprocClient(CONFIG, executor)
    client.add_request(request("a"))
    with pytest.raises(EngineDeadError, match="out of device memory"):
        client.step()
    for attempt in (client.step, client.stats, client.check_integrity, lambda: client.add_request(request("b"))):
        with pytest.raises(EngineDeadError, match="out of device memory"):
            attempt()
    client.close()
    client.close()
    assert executor.closed


def test_closed() -> None:
    with InprocClient(CONFIG, FakeExecutor(block_size=4)) as client:
        assert client.spec.num_blocks == 64
    with pytest.raises(EngineDeadError, match="closed"):
        client.add_request(request("a"))


def test_several_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="data-parallel-size: 2") as raised:
        InprocClient(EngineConfig(parallel=ParallelConfig(executor="fake", data_parallel_size=2)))
    assert raised.value.param == "data_parallel_size"
