"""One prefill, its engine played by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.messages import AddRequest, KVSaved, RequestOutput, RequestStarted
from common.errors import RequestCancelledError
from common.pod.admission import Admission
from common.types import FinishReason, RequestId, SampledToken, SamplingParams, TransferId
from prefill_service import producer as producer_module
from prefill_service.producer import FirstToken, Producer
from prefill_service.transfers import TransferKey, TransferRegistry

TOKEN = SampledToken(7)


@pytest.mark.parametrize(
    ("events", "figures"),
    [
        (
            [RequestStarted(queue_s=2.0, num_cached_tokens=16)],
            {"num_cached_tokens": 16, "queue_s": 2.0, "compute_s": 3.0},
        ),
        (
            [RequestStarted(queue_s=6.0, num_cached_tokens=0)],
            {"num_cached_tokens": 0, "queue_s": 6.0, "compute_s": 0.0},
        ),
        ([], {"num_cached_tokens": 0, "queue_s": 0.0, "compute_s": 5.0}),
    ],
)
async def test_the_first_token_says_what_it_took(
    events: list[Any], figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(producer_module, "time", clock)
    requests = SimpleNamespace(add=lambda *_: RequestId("a~1"), forget=lambda _: None)
    transfers = TransferRegistry(Admission(8), max_transfers=8, lease_s=30.0, is_direct=False)
    message = AddRequest(request_id=RequestId("a"), prompt_token_ids=[5] * 20, sampling=SamplingParams(max_tokens=8))
    producer = Producer(SimpleNamespace(requests=requests), transfers, message)  # type: ignore[arg-type]
    producer.start(None)
    clock.monotonic = lambda: 105.0
    producer.take_output(
        RequestOutput(request_id=RequestId("a~1"), tokens=[TOKEN], finish_reason=FinishReason.LENGTH, events=events)
    )
    assert producer.first_token.result() == FirstToken(token=TOKEN, finish_reason=None, **figures)


class Engine:
    """In place of EngineRequests: takes everything."""

    def __init__(self) -> None:
        self.forgotten: list[RequestId] = []

    def add(self, *_: Any) -> RequestId:
        return RequestId("a~1")

    def forget(self, engine_id: RequestId) -> None:
        self.forgotten.append(engine_id)


@pytest.mark.parametrize("is_direct", [False, True])
async def test_an_abort_of_the_engine_fails_the_transfer_once_nothing_is_written_any_more(is_direct: bool) -> None:
    engine = Engine()
    pod = SimpleNamespace(requests=engine, spec=SimpleNamespace(is_direct=is_direct))
    transfers = TransferRegistry(Admission(8), max_transfers=8, lease_s=30.0, is_direct=is_direct)
    key = TransferKey(TransferId("t"), 1)
    transfer = transfers.attach_consumer(key)
    message = AddRequest(request_id=RequestId("a"), prompt_token_ids=[5] * 20, sampling=SamplingParams(max_tokens=8))
    producer = Producer(pod, transfers, message)  # type: ignore[arg-type]
    producer.start(key)

    producer.take_output(RequestOutput(request_id=RequestId("a~1"), finish_reason=FinishReason.ABORT))
    assert transfer.is_settled == (not is_direct)
    last = KVSaved(num_tokens=0, failure="transfer_cancelled")
    producer.take_output(RequestOutput(request_id=RequestId("a~1"), events=[last]))
    assert isinstance(transfer.error, RequestCancelledError)
    assert transfer.is_quiescent
    assert isinstance(producer.first_token.exception(), RequestCancelledError)
    assert "a~1" in engine.forgotten
    transfers.close()
