"""An answer waits for the log probabilities of its prompt, whichever pod has them, and they are never lost."""

from __future__ import annotations

import asyncio

from common.pb import common_pb2
from router.dispatching import validity
from router.testing import FakeDecodePod, counting_reply
from tests.unit.router.router_cluster import until
from tests.work import LineCounter

PROMPT = [600, 601, 602]
BODY = {"prompt": PROMPT, "max_tokens": 4, "prompt_logprobs": 1, "temperature": 0, "return_token_ids": True}
TOKENS = list(counting_reply(common_pb2.EngineRequest(prompt_token_ids=PROMPT, sampling={"max_tokens": 4})))
EXPECTED = [None, {"601": -0.5}, {"602": -0.5}]


def logprobs_in(answer):
    (choice,) = answer["choices"]
    assert choice["token_ids"] == TOKENS
    return [
        None if entry is None else {key: each["logprob"] for key, each in entry.items()}
        for entry in choice["prompt_logprobs"]
    ]


async def test_they_are_awaited_when_decode_has_ended_first(pair):
    prefill, decode = pair.prefill[0], pair.decode[0]
    prefill.may_answer.clear()
    answering = asyncio.create_task(pair.complete(**BODY))
    await decode.until(lambda: decode.submits and not decode.live)
    assert not answering.done()
    prefill.may_answer.set()
    assert logprobs_in(await answering) == EXPECTED
    assert len(decode.submits) == 1


async def test_the_prompt_is_computed_again_if_they_are_lost(pair):
    prefill, decode = pair.prefill[0], pair.decode[0]
    prefill.may_answer.clear()
    answering = asyncio.create_task(pair.complete(**BODY))
    await decode.until(lambda: decode.submits and not decode.live)
    await prefill.stop()
    assert logprobs_in(await answering) == EXPECTED
    again = decode.submits[-1].request
    assert again.sampling.HasField("prompt_logprobs")
    assert not again.output_token_ids  # or the pod would find nothing left to generate


async def test_a_migrated_request_does_not_ask_for_them_again(start_cluster):
    cluster = await start_cluster(decode=[FakeDecodePod(), FakeDecodePod()])
    first, second = cluster.decode
    for pod in cluster.decode:
        pod.allowed = 2
    answering = asyncio.create_task(cluster.complete(**BODY))
    waits = [asyncio.create_task(pod.until(lambda pod=pod: pod.submits)) for pod in cluster.decode]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    lost, other = (first, second) if first.submits else (second, first)
    running = cluster.router.service._running
    await until(lambda: [len(each._output) for each in running.values()] == [2])
    await other.allow(None)
    await lost.stop()
    assert logprobs_in(await answering) == EXPECTED
    request = other.submits[0].request
    assert not request.sampling.HasField("prompt_logprobs")
    assert len(request.output_token_ids) == 2


async def test_those_of_a_long_prompt_are_taken_bit_by_bit(start_cluster):
    cluster = await start_cluster()
    with LineCounter(validity) as work:
        most_lines, answer = await work.most_in_a_turn(cluster.complete(**{**BODY, "prompt": [600] * 3000}))
    (choice,) = answer["choices"]
    assert [*choice["prompt_logprobs"][1]] == ["600"]
    assert len(choice["prompt_logprobs"]) == 3000
    assert work.num_lines > 3000  # each is checked
    assert most_lines < 300 * work.num_lines / 3000
