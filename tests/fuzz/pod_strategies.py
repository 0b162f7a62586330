"""What routers and decode pods might say to pods, as steps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from hypothesis import strategies as st

from common.pb import common_pb2, pods_pb2
from tests.fuzz.proto_strategies import messages, nearly

VOCAB_SIZE = 512
_OFTEN = ["Prefill.Prefill", "Decode.Session", "Handoff.Open"]
METHODS = [*_OFTEN, "Pod.GetInfo", "Pod.CheckIntegrity", "Pod.WatchStats"]  # but Drain, which no pod takes back
_IDS = st.sampled_from(["a", "b", "c"])  # few, so that they meet
_TRANSFERS = st.sampled_from(["t", "u"])
_EPOCHS = st.integers(1, 2)

_sampling = st.builds(
    common_pb2.SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.just(1.0),
    repetition_penalty=st.just(1.0),
    max_tokens=st.integers(1, 12),
    num_logprobs=st.none() | st.integers(0, 3),
)
_engine_requests = st.builds(
    lambda length, seed, **fields: common_pb2.EngineRequest(
        prompt_token_ids=[(7 * index + seed) % VOCAB_SIZE for index in range(length)], **fields
    ),
    st.integers(1, 100),
    st.integers(0, 1),
    request_id=_IDS,
    sampling=_sampling,
)
_prefills = st.builds(
    pods_pb2.PrefillRequest, request=_engine_requests, transfer_id=st.just("") | _TRANSFERS, epoch=_EPOCHS
)


@dataclass(frozen=True)
class Step:
    """One call: what is said in it, what is awaited, and how it ends."""

    method: str  # with its service
    sent: tuple[Message, ...]
    num_turns: int  # of the loop, before each message and before the end
    num_answers: int  # that are awaited before the end, at most
    is_cancelled: bool  # else the caller says no more, and hears the rest

    @property
    def num_sure_answers(self) -> int:
        """So many come for certain, or the end: one for each submission, and to whoever begins a handoff."""
        match self.method:
            case "Decode.Session":
                return sum(command.HasField("submit") for command in self.sent)
            case "Handoff.Open":
                return min(1, len(self.sent))
            case _:
                return 1


@dataclass(frozen=True)
class Facts:
    """What good messages must say."""

    prefill_address: str
    fingerprint: bytes
    connector: str
    layout: pods_pb2.KVLayout


def _submits(facts: Facts) -> st.SearchStrategy[pods_pb2.Submit]:
    addresses = st.just(facts.prefill_address) | st.sampled_from(["", "127.0.0.1:1", "unix:/dev/null", "a b", "[::"])
    remote = st.builds(pods_pb2.RemotePrefill, transfer_id=_TRANSFERS, epoch=_EPOCHS, prefill_address=addresses)
    good = st.builds(
        pods_pb2.Submit,
        request=_engine_requests,
        remote_prefill=st.none() | remote,
        timeout_s=st.sampled_from([0.0, 10.0, 0.001]),
    )
    return good | nearly(good, pods_pb2.Submit)


def _decode_commands(facts: Facts) -> st.SearchStrategy[pods_pb2.DecodeCommand]:
    command = pods_pb2.DecodeCommand
    aborts = st.builds(pods_pb2.AbortCommand, request_id=_IDS)
    failures = st.builds(pods_pb2.PrefillFailed, request_id=_IDS, epoch=_EPOCHS, reason=st.integers(-1, 99))
    return st.one_of(
        st.builds(lambda submit: command(submit=submit), _submits(facts)),
        st.builds(lambda submit: command(submit=submit), _submits(facts)),
        st.builds(lambda abort: command(abort=abort), aborts),
        st.builds(lambda failed: command(prefill_failed=failed), failures),
        messages(command),
    )


@st.composite
def _handoffs(draw: st.DrawFn, facts: Facts) -> list[pods_pb2.HandoffCommand]:
    command = pods_pb2.HandoffCommand
    good = st.builds(
        pods_pb2.HandoffStart,
        transfer_id=_TRANSFERS,
        epoch=_EPOCHS,
        fingerprint=st.just(facts.fingerprint),
        connector=st.just(facts.connector),
        decode_pod_id=st.just("fuzz"),
        connector_address=st.just(b"nobody's"),
        layout=st.just(facts.layout),
    )
    starts = (good | nearly(good, pods_pb2.HandoffStart)).map(lambda start: command(start=start))
    reserved = st.builds(
        pods_pb2.HandoffReserved, num_held_tokens=st.sampled_from([0, 16, 32]), block_ids=st.lists(st.integers(0, 300))
    ).map(lambda reserved: command(reserved=reserved))
    later = st.lists(reserved | messages(command), max_size=4)
    return [draw(starts), *draw(later)] if draw(st.integers(0, 5)) else draw(later)


def steps(facts: Facts, *methods: str) -> st.SearchStrategy[Step]:
    """Calls of the methods, or of any, those that begin work more often."""
    prefill = _prefills | nearly(_prefills, pods_pb2.PrefillRequest)
    said: dict[str, st.SearchStrategy[Any]] = {
        "Prefill.Prefill": st.tuples(prefill),
        "Decode.Session": st.lists(_decode_commands(facts), max_size=6).map(tuple),
        "Handoff.Open": _handoffs(facts).map(tuple),
        "Pod.GetInfo": st.just((pods_pb2.GetInfoRequest(),)),
        "Pod.CheckIntegrity": st.just((pods_pb2.CheckIntegrityRequest(),)),
        "Pod.WatchStats": st.tuples(messages(pods_pb2.WatchStatsRequest)),
    }
    return st.sampled_from(methods or [*_OFTEN, *_OFTEN, *METHODS]).flatmap(
        lambda method: st.builds(
            Step,
            st.just(method),
            said[method],
            num_turns=st.integers(0, 8),
            num_answers=st.integers(0, 3),
            is_cancelled=st.just(True) if method == "Pod.WatchStats" else st.booleans(),  # which never ends
        )
    )
