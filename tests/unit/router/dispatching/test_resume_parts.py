"""What resuming a stream is made of: event ids, streams that are kept, text that is replayed."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.errors import InvalidRequestError
from common.types import FinishReason, SamplingParams
from router.dispatching.kept import KnownChoice, ResumableStreams, ResumedElsewhereError, StreamKey
from router.dispatching.text_generation import TextGeneration
from router.dispatching.token_log import OutputDelta
from router.fairness.tenant import Tenant
from router.gateway.answering.resume import (
    EventId,
    Position,
    Stream,
    check_fits,
    checksum_of,
    digest_of,
    parse_event_id,
    resumption_of,
)
from router.gateway.openai.completion_bodies import parse_completion
from router.metrics import SurvivalMetrics
from router.requests.request import Resumption, SpeculationCounts
from router.testing import fake_logprobs

DIGEST = bytes(range(12))
KEY = StreamKey("", "cmpl-1")
SOURCES = ("kept", "computed_again")


# --- event ids ---


def test_an_id_says_what_was_delivered():
    stream = Stream(DIGEST, 2**64 - 1, "my.request:1-2_3", [Position(), Position()])
    stream.advance(1, [7, 8, 9], ended=False)
    line = stream.advance(0, [4], ended=True)
    assert line.startswith(b"id: ")
    assert line.endswith(b"\n")
    event_id = parse_event_id(line[4:-1].decode())
    positions = (Position(1, checksum_of([4]), ended=True), Position(3, checksum_of([7, 8, 9])))
    assert event_id == EventId(DIGEST, 2**64 - 1, "my.request:1-2_3", positions)


def test_positions_go_on_where_they_were():
    first = Stream(DIGEST, 1, "a", [Position()])
    first.advance(0, [1, 2], ended=False)
    whole = first.advance(0, [3], ended=False)
    resumed = Stream(DIGEST, 1, "a", [Position(2, checksum_of([1, 2]))])
    assert resumed.advance(0, [3], ended=False) == whole


GOOD = Stream(DIGEST, 5, "a", [Position()]).advance(0, [1], ended=False)[4:-1].decode()


@pytest.mark.parametrize(
    "text",
    [
        "1", "17", "abc", "2" + GOOD[1:], GOOD.replace(".a.", "."), GOOD.replace(".a.", ".."), GOOD[:-1] + "x",
        GOOD + "-", GOOD + "!!", GOOD.replace("_", ":"), GOOD[:4] + GOOD[5:], GOOD[:4] + "*" + GOOD[5:], "1..a.1_0",
        "1.AAAA.a.1_0", GOOD.replace(".a.", ".a.-"), "1." + "é" * 27 + ".a.1_0",
    ],
)  # fmt: skip
def test_an_id_that_is_not_ours_is_refused_by_name(text):
    with pytest.raises(InvalidRequestError, match="Last-Event-ID") as caught:
        parse_event_id(text)
    assert caught.value.param == "Last-Event-ID"


def choice(max_tokens=8):
    return SimpleNamespace(sampling=SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("digest", "seed", "choices"),
    [
        (b"x" * 12, 5, [choice()]),
        (DIGEST, 6, [choice()]),
        (DIGEST, 5, []),
        (DIGEST, 5, [choice(), choice()]),
        (DIGEST, 5, [choice(max_tokens=0)]),
    ],
)
def test_an_id_of_another_request_is_refused(digest, seed, choices):
    event_id = parse_event_id(GOOD)
    check_fits(event_id, DIGEST, 5, [choice()])
    with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
        check_fits(event_id, digest, seed, choices)


def test_the_digest_is_of_the_meaning():
    def digest(body=b'{"prompt": "a", "stop": ["x"]}', tenant="t", fingerprint=b"f"):
        return digest_of(parse_completion(body), Tenant(name=tenant), fingerprint)

    assert digest() == digest(b'{"stop":["x"],"prompt":"a"}')
    others = [digest(b'{"prompt": "b", "stop": ["x"]}'), digest(b'{"prompt": "a", "stop": ["x"], "seed": 1}')]
    assert len({digest(), *others, digest(tenant="u"), digest(fingerprint=b"g")}) == 5


def test_what_is_known_of_a_choice_is_not_computed_again():
    position = Position(2, 77)
    drafts = SpeculationCounts(5, 2)
    known = KnownChoice(array("I", [1, 2, 3]), FinishReason.LENGTH, drafts)
    assert resumption_of(position, None, wants_logprobs=False) == Resumption(2, 77)
    whole = Resumption(2, 77, known.token_ids, FinishReason.LENGTH, speculation=drafts)
    assert resumption_of(position, known, wants_logprobs=False) == whole
    assert resumption_of(position, known, wants_logprobs=True) == Resumption(
        2, 77, known.token_ids[:2], speculation=drafts
    )
    assert resumption_of(Position(3, 9, ended=True), known, wants_logprobs=True) == Resumption(
        3, 9, finish_reason=FinishReason.STOP, ended=True, speculation=drafts
    )


# --- streams that are kept ---


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class FakeGeneration:
    def __init__(self, *token_ids):
        self.token_ids = token_ids
        self.failed = asyncio.Event()

    def known(self):
        return KnownChoice(array("I", self.token_ids), None)

    def fail(self, error):
        assert isinstance(error, ResumedElsewhereError)
        self.failed.set()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def streams(clock, registry):
    metrics = SurvivalMetrics(registry)
    return ResumableStreams(window_s=30, max_streams=3, max_bytes=10_000, metrics=metrics, clock=clock)


def break_off(streams, key, *token_ids, identity=b"i"):
    with suppress(ConnectionError), streams.running(key, identity) as running:
        running.generations = [FakeGeneration(*token_ids)]
        raise ConnectionError


async def known(streams, key, identity=b"i"):
    kept = await streams.take_over(key, identity, timeout_s=30)
    return None if kept is None else [list(each.token_ids) for each in kept.choices]


async def test_a_broken_stream_is_kept_once_and_for_its_own(streams, registry):
    break_off(streams, KEY, 1, 2)
    assert await known(streams, StreamKey("other tenant", KEY.request_id)) is None
    assert await known(streams, KEY, b"another body") is None
    assert await known(streams, KEY) == [[1, 2]]
    assert await known(streams, KEY) is None
    assert streams.num_bytes == 0
    resumed = {
        each: registry.get_sample_value("baton_router_stream_resume_total", {"source": each}) for each in SOURCES
    }
    assert resumed == {"kept": 1, "computed_again": 3}


async def test_a_stream_that_ended_well_or_brought_nothing_is_not_kept(streams):
    with streams.running(KEY, b"i") as running:
        running.generations = [FakeGeneration(1)]
    break_off(streams, StreamKey("", "empty"))
    assert len(streams) == 0


async def test_the_window_ends(streams, clock):
    break_off(streams, KEY, 1)
    clock.now = 29.9
    break_off(streams, StreamKey("", "later"), 2)
    clock.now = 30
    assert await known(streams, KEY) is None
    assert await known(streams, StreamKey("", "later")) == [[2]]


async def test_number_and_bytes_are_bounded_and_the_oldest_goes_first(streams):
    for number in range(5):
        break_off(streams, StreamKey("", str(number)), number)
    assert [await known(streams, StreamKey("", str(number))) for number in range(5)] == [
        None,
        None,
        [[2]],
        [[3]],
        [[4]],
    ]
    for number in range(3):
        break_off(streams, StreamKey("", str(number)), *range(1000))
    assert len(streams) == 1
    break_off(streams, KEY, *range(2244))
    assert streams.num_bytes == 10_000
    break_off(streams, KEY, *range(2245))
    assert len(streams) == streams.num_bytes == 0


async def test_a_stream_whose_connection_looks_alive_is_taken_over(streams):
    generation = FakeGeneration(1, 2, 3)

    async def serve():
        with streams.running(KEY, b"i") as running:
            running.generations = [generation]
            await generation.failed.wait()
            raise ResumedElsewhereError("gone")

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    assert await known(streams, KEY, b"another") is None
    assert not generation.failed.is_set()
    assert await known(streams, KEY) == [[1, 2, 3]]
    with pytest.raises(ResumedElsewhereError):
        await serving


async def test_a_connection_that_does_not_end_is_not_waited_for_for_ever(streams):
    with streams.running(KEY, b"i"), pytest.raises(TimeoutError):
        await streams.take_over(KEY, b"i", timeout_s=0.01)


# --- text ---

ANSWER = "Où? Une île, ça va 🦜🌍 STOP and on"


class Scripted:
    """A generation that brings its tokens in pieces of `step`. `merged`: new ones come with those that are known."""

    def __init__(
        self, tokens, *, step, resumption=None, stops=(), finish=FinishReason.LENGTH, logprobs=False, merged=False
    ):
        self.request = SimpleNamespace(
            prompt_token_ids=[600], continues_prompt=True, stops=stops, has_no_output=False,
            spelled_ids=frozenset(), sampling=SamplingParams(min_tokens=0), resumption=resumption, trace=None,
        )  # fmt: skip
        known = list(resumption.known_token_ids) if resumption else []
        ends = [len(known)] if known and not (merged and len(known) < len(tokens)) else []
        ends += [min(at + step, len(tokens)) for at in range(len(known), len(tokens), step)]
        self._deltas = [
            OutputDelta(
                start, tokens[start:end],
                [fake_logprobs(token, 1) for token in tokens[max(start, len(known)):end]] if logprobs else [],
                finish if end == len(tokens) else None,
            )
            for start, end in pairwise([0, *ends])
        ]  # fmt: skip
        self.finished = None

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._deltas or self.finished:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    def finish(self, reason):
        self.finished = reason


def joined(deltas, field):
    return [each for delta in deltas for each in getattr(delta, field)]


@pytest.mark.parametrize("stops", [(), ("STOP",), ("va 🦜🌍 ST", "nowhere")])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("merged", [False, True])
async def test_what_follows_is_what_would_have_followed(tokenizer, stops, step, merged):
    """Wherever the stream breaks, and however much more of it is known than the client has."""
    tokens = tokenizer.encode(ANSWER)
    whole = [
        delta
        async for delta in TextGeneration(Scripted(tokens, step=1, stops=stops, logprobs=True), tokenizer)
    ]  # fmt: skip
    for num_delivered in range(len(whole)):
        for num_known in (0, num_delivered, len(tokens)):
            resumption = Resumption(num_delivered, checksum_of(tokens[:num_delivered]), tokens[:num_known])
            scripted = Scripted(
                tokens, step=step, resumption=resumption, stops=stops,
                logprobs=num_known <= num_delivered, merged=merged,
            )  # fmt: skip
            generation = TextGeneration(scripted, tokenizer)
            rest = [delta async for delta in generation]
            following = whole[num_delivered:]
            assert "".join(delta.text for delta in rest) == "".join(delta.text for delta in following)
            for field in ("token_ids", "text_offsets", *(["logprobs"] if num_known <= num_delivered else [])):
                assert joined(rest, field) == joined(following, field)
            assert rest[0].start_index == num_delivered
            assert rest[-1].finish_reason is whole[-1].finish_reason
            assert generation.num_tokens == len(whole)


@pytest.mark.parametrize("step", [1, 100])
async def test_of_a_choice_that_was_delivered_but_for_its_end_the_end_comes(tokenizer, step):
    tokens = tokenizer.encode(ANSWER)
    resumption = Resumption(len(tokens), checksum_of(tokens))
    generation = TextGeneration(Scripted(tokens, step=step, resumption=resumption), tokenizer)
    (end,) = [delta async for delta in generation]
    assert (end.text, end.token_ids, end.finish_reason) == ("", [], FinishReason.LENGTH)


async def test_an_answer_that_is_another_this_time_is_never_continued(tokenizer):
    tokens = tokenizer.encode(ANSWER)
    resumption = Resumption(3, checksum_of([*tokens[:2], 999]))
    with pytest.raises(InvalidRequestError, match="computed again, it is another"):
        await anext(TextGeneration(Scripted(tokens, step=2, resumption=resumption), tokenizer))


async def test_a_choice_that_was_delivered_whole_brings_nothing(tokenizer):
    generation = TextGeneration(Scripted([1, 2], step=1, resumption=Resumption(2, 0, ended=True)), tokenizer)
    assert [delta async for delta in generation] == []
    assert generation.num_tokens == 2
