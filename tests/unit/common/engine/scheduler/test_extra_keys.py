"""Equal tokens with other extra keys share nothing: not on a device, not across a handoff, not after a preemption."""

from __future__ import annotations

import msgspec
import pytest

from common.engine.messages import AddRequest, KVReceived, RequestStarted
from common.types import ExtraKey
from tests.unit.common.engine.scheduler_factories import (
    FakeEngine,
    create_request,
    create_scheduler,
    expected_output,
    first_token,
)

PROMPT = [5] * 14
ONE, OTHER = [ExtraKey(2, 6, b"one")], [ExtraKey(2, 6, b"other")]


def request(name: str, keys: list[ExtraKey], **settings: object) -> AddRequest:
    return msgspec.structs.replace(create_request(name, PROMPT, **settings), extra_keys=keys)


def num_cached(engine: FakeEngine, name: str) -> int:
    (started,) = [event for event in engine.events[name] if isinstance(event, RequestStarted)]
    return started.num_cached_tokens


@pytest.mark.parametrize(("keys", "expected"), [(ONE, 12), (OTHER, 0), ([], 0)])
def test_the_prefix_cache(keys: list[ExtraKey], expected: int) -> None:
    engine = FakeEngine()
    engine.add(request("a", ONE))
    engine.run()
    engine.add(request("b", keys))
    engine.run()
    assert num_cached(engine, "b") == expected
    engine.assert_idle()


@pytest.mark.parametrize(("keys", "num_received"), [(ONE, 14), (OTHER, 0)])
def test_a_handoff_over_a_store(keys: list[ExtraKey], num_received: int) -> None:
    prefill, decode = FakeEngine(settle_at_once=True), FakeEngine(settle_at_once=True)
    prefill.add(request("a", ONE, role="producer"))
    prefill.run()
    decode.medium = prefill.medium
    consumer = request("a", keys, role="consumer")
    decode.add(consumer)
    decode.step()
    decode.update_transfer("a", len(PROMPT), final=True, first_token=first_token(consumer))
    decode.run()
    assert [event.num_tokens for event in decode.events["a"] if isinstance(event, KVReceived)] == [num_received]
    assert decode.outputs["a"] == expected_output(consumer)[0]
    decode.assert_idle()


def test_after_a_preemption() -> None:
    engine = FakeEngine(create_scheduler(num_blocks=10, max_model_len=32))
    requests = [request(name, keys, max_tokens=12) for name, keys in (("a", ONE), ("b", OTHER))]
    engine.add(*requests)
    engine.run()
    assert engine.scheduler.stats().num_preemptions
    assert [engine.outputs[each.request_id] for each in requests] == [expected_output(each)[0] for each in requests]
    engine.assert_idle()
