"""Steps, transfers and their results are plain data."""

from __future__ import annotations

import msgspec
import pytest

from common.engine.contract.step import (
    ModelRunnerOutput,
    NewRequest,
    NoToken,
    PromptLogprobs,
    SchedulerOutput,
    accepted,
    outcomes_of,
)
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, Destination, TransferResult
from common.types import (
    BlockHash,
    Constraint,
    ExtraKey,
    Logprobs,
    PromptPositions,
    RequestId,
    SampledToken,
    SamplingParams,
)

A, B = RequestId("a"), RequestId("b")
SAMPLING = SamplingParams(temperature=0.5, seed=3, logit_bias={4: 1.0}, structured_outputs=Constraint.regex("x"))
TOKEN = SampledToken(7, Logprobs(-0.5, [(7, -0.5), (8, -1.0)], 1))
KEYS = [ExtraKey(0, 1, b"image")]
POSITIONS = PromptPositions.of([[0, 1], [0, 0]])
STEP = SchedulerOutput(
    new_requests=[NewRequest(A, [1, 2, 3], 2, SAMPLING, [[4, 5], [0, 6]], 1, True, True, POSITIONS, b"root", KEYS)],
    new_block_ids={B: [[6]]},
    num_scheduled_tokens={A: 2, B: 1},
    total_num_scheduled_tokens=3,
    work=3.5,
    num_context_tokens=9,
    dropped_request_ids=[RequestId("c")],
    drafts={B: [8, 9]},
)
RESULT = ModelRunnerOutput(
    {A: [TOKEN, SampledToken(9)], B: NoToken.NOT_YET},
    {A: PromptLogprobs(1, [Logprobs(-1.0, [])])},
    fence=7,
    drafts={A: [4]},
)
HASHES = (BlockHash(b"\x00\xff"), BlockHash(b"b"))
SAVE = BlockTransfer(3, A, (4, 5), HASHES, 2, Destination(b"\xfe", (8, 9)), is_for_tier=True, fence=7)
LOAD = BlockTransfer(4, B, (4, 5), HASHES, 2, digests=(b"\xfd", b""), num_last=2)


@pytest.mark.parametrize(
    "message",
    [
        STEP,
        RESULT,
        SchedulerOutput(),
        ModelRunnerOutput(),
        SAVE,
        LOAD,
        TransferResult(3, 1, "store_failed", (b"\xfd",), (True, False)),
        ConnectorFacts(is_direct=True, address=b"\xfe", part_blocks=3),
    ],
)
def test_messages_can_be_encoded(message: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


def test_outcomes_of_one_sample_each() -> None:
    samples = [TOKEN, NoToken.MASKED]
    assert outcomes_of([A, B], samples) == {A: [TOKEN], B: NoToken.MASKED}


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 9, 7], [5, 9]),
        ([9, 6, 7], [9]),
        ([5, NoToken.COMPLETE, 7], [5]),  # it has no token after that one, which is seen in the next step
        ([NoToken.MASKED, 6, 7], NoToken.MASKED),
    ],
)
def test_samples_hold_up_to_the_first_that_is_not_the_draft(samples: list[object], outcome: object) -> None:
    found = accepted([5, 6], [SampledToken(each) if isinstance(each, int) else each for each in samples])  # type: ignore[misc]
    assert found == (outcome if isinstance(outcome, NoToken) else [SampledToken(each) for each in outcome])  # type: ignore[attr-defined]
