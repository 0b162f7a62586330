"""One request of a session, its engine and its handoff played by hand."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from common.engine.messages import (
    AddRequest,
    KVReceived,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferUpdate,
)
from common.pb import common_pb2, pods_pb2
from common.pod.tasks import TaskSet
from common.rpc.channel import ChannelPool
from common.types import FinishReason, RequestId, SampledToken, SamplingParams
from decode_service.config import DecodeConfig
from decode_service.handoff import HandoffTimeouts
from decode_service.quarantine import Quarantine
from decode_service.request import DecodeRequest, PodServices
from tests.pods import DEADLINE_S, decode_pod, prompt_of

REQUEST = AddRequest(request_id=RequestId("a"), prompt_token_ids=prompt_of(40), sampling=SamplingParams(max_tokens=8))
SUBMIT = pods_pb2.Submit(remote_prefill=pods_pb2.RemotePrefill(transfer_id="t-a", epoch=3, prefill_address="prefill"))


class RecordingEngine:
    """In place of EngineRequests."""

    def __init__(self) -> None:
        self.added: list[AddRequest] = []
        self.updates: list[TransferUpdate | TransferQuiesced] = []
        self.forgotten: list[RequestId] = []

    def add(self, request: AddRequest, _: Any) -> RequestId:
        self.added.append(request)
        return RequestId("a~1")

    def update_transfer(self, command: TransferUpdate) -> None:
        self.updates.append(command)

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        self.updates.append(command)

    def forget(self, engine_id: RequestId) -> None:
        self.forgotten.append(engine_id)

    def abort(self, *_: RequestId) -> None: ...


@pytest.fixture
def deltas() -> list[pods_pb2.TokenDelta]:
    return []


@pytest.fixture
async def request_and_engine(deltas: list[pods_pb2.TokenDelta]) -> AsyncIterator[tuple[DecodeRequest, RecordingEngine]]:
    """A consumer that has reserved blocks."""
    engine = RecordingEngine()
    async with decode_pod({}) as pod, ChannelPool() as peers:
        quarantine = Quarantine(1)
        context = replace(pod.context, requests=engine)
        services = PodServices(
            context, DecodeConfig(), peers, TaskSet(), quarantine, HandoffTimeouts(queue_s=DEADLINE_S)
        )
        request = DecodeRequest(
            services, REQUEST, SUBMIT, emit=lambda _, delta: deltas.append(delta), on_end=lambda _: None
        )
        request.reserve()
        yield request, engine


async def test_the_engine_learns_that_it_is_a_consumer(request_and_engine) -> None:
    _, engine = request_and_engine
    assert [added.transfer for added in engine.added] == [KVTransferParams(transfer_id="t-a", epoch=3, role="consumer")]


async def test_the_engine_learns_all_that_a_failed_handoff_brought(request_and_engine) -> None:
    request, engine = request_and_engine
    request.load(16, [b"1"])
    request.recompute("prefill_failed", 32, [b"2"], is_quiescent=False)
    request.note_quiescent()
    settings: dict[str, Any] = {"request_id": "a~1", "epoch": 3}
    assert engine.updates == [
        TransferUpdate(**settings, num_ready_tokens=16, digests=[b"1"]),
        TransferUpdate(**settings, num_ready_tokens=32, final=True, failure="prefill_failed", digests=[b"2"]),
        TransferQuiesced(**settings),
    ]
    assert len(engine.added) == 1  # it is there already


async def test_that_the_producer_is_quiescent_may_come_with_the_failure(request_and_engine) -> None:
    request, engine = request_and_engine
    request.recompute("handoff_broken", 0, [], is_quiescent=True)
    quiesced, failed = engine.updates
    assert quiesced == TransferQuiesced(request_id="a~1", epoch=3), "first: the failure lets the engine use the blocks"
    assert failed.failure == "handoff_broken"


async def test_an_end_without_a_token_is_told(request_and_engine, deltas) -> None:
    request, engine = request_and_engine
    request.take_output(RequestOutput(request_id=RequestId("a~1"), finish_reason=FinishReason.ABORT))
    assert deltas == [pods_pb2.TokenDelta(request_id="a", finish_reason=common_pb2.FINISH_REASON_ABORT)]
    assert engine.forgotten == ["a~1"]


async def test_report_says_how_the_prompt_was_obtained(request_and_engine, deltas) -> None:
    request, _ = request_and_engine
    events = [
        RequestStarted(queue_s=5.0, num_cached_tokens=16),
        KVReceived(num_tokens=24, handoff_s=0.5, recompute_reason="block_missing"),
    ]
    request.take_output(RequestOutput(request_id=RequestId("a~1"), events=events))
    assert not deltas
    request.take_output(RequestOutput(request_id=RequestId("a~1"), tokens=[SampledToken(7)]))
    report = deltas[0].report
    assert (report.num_cached_tokens, report.num_external_tokens) == (16, 24)
    assert (report.handoff_s, report.recompute_reason) == (0.5, "block_missing")
    assert 5.0 <= report.queue_s < 5.0 + DEADLINE_S  # with the time before it entered the engine


async def test_drafts_are_counted_with_the_tokens_that_they_led_to(request_and_engine, deltas) -> None:
    request, _ = request_and_engine
    request.take_output(
        RequestOutput(
            request_id=RequestId("a~1"), tokens=[SampledToken(7)], num_verified_drafts=3, num_accepted_drafts=1
        )
    )
    assert (deltas[0].num_verified_drafts, deltas[0].num_accepted_drafts) == (3, 1)
