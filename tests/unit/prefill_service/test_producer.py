"""One prefill, its engine played by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.messages import AddRequest, RequestOutput, RequestStarted
from common.pod.admission import Admission
from common.types import FinishReason, RequestId, SampledToken, SamplingParams
from prefill_service import producer as producer_module
from prefill_service.producer import FirstToken, Producer
from prefill_service.transfers import TransferRegistry

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
