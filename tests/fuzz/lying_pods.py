"""Pods that answer like others, but for one message, and what sort of lie that is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import strategies as st

from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from router.testing import FakeDecodePod, FakePrefillPod, _DecodeServicer, _PrefillServicer

DecodeLie = Callable[[pods_pb2.TokenDelta], None]
PrefillLie = Callable[[pods_pb2.PrefillResponse], None]

_ODD_NUMBERS = st.sampled_from([float("nan"), float("inf"), -1.0, 1e300, 5e-324])
_TOO_HIGH_TOKENS = st.integers(2048, 2**32 - 1)


class LyingDecodePod(FakeDecodePod):
    """`lie` changes the delta with the output index `lies_at`."""

    lie: DecodeLie = staticmethod(lambda delta: None)
    lies_at = 0

    def add_service(self, server) -> None:
        pods_pb2_grpc.add_DecodeServicer_to_server(_LyingDecodeServicer(self), server)


class LyingPrefillPod(FakePrefillPod):
    """`lie` changes each response."""

    lie: PrefillLie = staticmethod(lambda response: None)

    def add_service(self, server) -> None:
        pods_pb2_grpc.add_PrefillServicer_to_server(_LyingPrefillServicer(self), server)


class _LyingDecodeServicer(_DecodeServicer):
    async def Session(self, request_iterator, context):  # noqa: N802
        async with contextlib.aclosing(super().Session(request_iterator, context)) as all_events:
            async for events in all_events:
                for delta in events.deltas:
                    if delta.start_index == self._pod.lies_at:
                        self._pod.lie(delta)
                yield events


class _LyingPrefillServicer(_PrefillServicer):
    async def Prefill(self, request, context):  # noqa: N802
        response = await super().Prefill(request, context)
        self._pod.lie(response)
        return response


@st.composite
def decode_lies(draw: st.DrawFn) -> DecodeLie:
    """What no sound pod says."""
    kind = draw(st.sampled_from(["token", "skip", "more", "end", "logprobs", "number", "report", "drafts", "nothing"]))
    token, number, count = draw(_TOO_HIGH_TOKENS), draw(_ODD_NUMBERS), draw(st.integers(1, 40))

    def lie(delta: pods_pb2.TokenDelta) -> None:
        match kind:
            case "token":
                delta.token_ids[-1] = token
            case "skip":
                delta.start_index += count
            case "more":
                delta.token_ids.extend([5] * 100)
            case "end":
                delta.finish_reason = draw_end
            case "logprobs":
                delta.logprobs.extend([common_pb2.PositionLogprobs(sampled=-1.0)] * count)
            case "number":
                for position in delta.logprobs:
                    position.sampled = float("nan")
            case "report":
                delta.report.CopyFrom(_report(number, token))
            case "drafts":
                delta.num_verified_drafts, delta.num_accepted_drafts = token, count
            case "nothing":
                delta.ClearField("token_ids")
                delta.ClearField("logprobs")

    draw_end = draw(st.sampled_from([common_pb2.FINISH_REASON_LENGTH, 5, 99, common_pb2.FINISH_REASON_ABORT]))
    return lie


def _report(number: float, count: int) -> pods_pb2.DecodeReport:
    return pods_pb2.DecodeReport(
        num_cached_tokens=count,
        num_external_tokens=count,
        recompute_reason=f"reason {count}\n",
        queue_s=number,
        handoff_s=number,
    )


@st.composite
def prefill_lies(draw: st.DrawFn) -> PrefillLie:
    """What no sound pod answers."""
    kind = draw(st.sampled_from(["token", "end", "logprobs", "numbers"]))
    token, number, end = draw(_TOO_HIGH_TOKENS), draw(_ODD_NUMBERS), draw(st.sampled_from([2, 3, 4, 5, 99]))

    def lie(response: pods_pb2.PrefillResponse) -> None:
        match kind:
            case "token":
                response.first_token_id = token
            case "end":
                response.finish_reason = end
            case "logprobs":
                response.logprobs.sampled = float("nan")
            case "numbers":
                response.num_cached_tokens = token
                response.timing.queue_s = response.timing.compute_s = number

    return lie


odd_stats = st.builds(
    pods_pb2.PodStats,
    num_running=st.integers(0, 2**32 - 1),
    num_waiting=st.integers(0, 2**32 - 1),
    num_free_blocks=st.integers(0, 2**32 - 1),
    num_queued_tokens=st.integers(0, 2**64 - 1),
    last_step_s=_ODD_NUMBERS | st.floats(),
    last_step_tokens=st.integers(0, 2**32 - 1),
)
