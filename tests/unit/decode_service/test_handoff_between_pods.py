"""A prefill pod and a decode pod, real gRPC between them: the handoff, and everything that can go wrong with it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import msgspec
import pytest

from common.engine.executor.fake import expected_tokens
from common.pb import common_pb2
from common.types import HASH_BYTES, BlockHash, PromptPositions
from decode_service.handoff import HandoffTimeouts
from tests.pods import (
    BLOCK_SIZE,
    CHUNK,
    DEADLINE_S,
    FakeRouter,
    RunningPod,
    Store,
    decode_pod,
    engine_request,
    prefill_pod,
    prompt_of,
    start_prefill,
    wait_for,
)

PROMPT = prompt_of(2 * CHUNK + 5)  # three chunks
EXPECTED = expected_tokens(PROMPT, 8)


@dataclass
class Cluster:
    store: Store
    prefill: RunningPod
    decode: RunningPod
    router: FakeRouter

    def recomputed(self, reason: str) -> float:
        return self.decode.metric("baton_pod_kv_recompute_total", reason=reason)

    async def submit(self, name: str = "a", prompt: list[int] = PROMPT, **options):
        return await self.router.submit(engine_request(name, prompt), prefill_address=self.prefill.address, **options)

    async def wait_opening(self) -> None:
        """The decode pod's stream has reached the prefill pod; nothing was computed."""
        transfers = self.prefill.front.transfers
        await wait_for(lambda: any(transfer.has_consumer for transfer in transfers._transfers.values()))
        assert self.decode.context.admission.num_open == 1
        assert len(self.decode.context.requests) == 0

    async def advance_to_reserved(self) -> None:
        """From a prefill pod that is occupied until the decode pod loads KV of the first chunk."""
        self.prefill.gate.allow(2)  # the other's chunk, and the first of ours
        await wait_for(lambda: self.decode.connector.loads)


@pytest.fixture(params=[(1, 1), (2, 2), (1, 2), (2, 1)], ids=lambda ranks: f"{ranks[0]} to {ranks[1]} ranks")
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    store: Store = {}
    of_prefill, of_decode = request.param
    async with (
        prefill_pod(store, executor={"num_ranks": of_prefill, "num_kv_heads": 2}) as prefill,
        decode_pod(store, executor={"num_ranks": of_decode, "num_kv_heads": 2}) as decode,
        FakeRouter(decode) as router,
    ):
        yield Cluster(store, prefill, decode, router)


async def test_handoff_brings_all_kv_and_the_first_token(cluster: Cluster) -> None:
    answer = await cluster.submit()
    response = await start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert response.first_token_id == EXPECTED[0]
    assert answer.report is not None
    assert answer.report.num_external_tokens == len(PROMPT)
    assert not answer.report.recompute_reason
    assert cluster.decode.context.stats.latest.num_prompt_tokens == 0
    assert cluster.decode.metric("baton_pod_handoff_total", outcome="delivered") == 1
    await wait_for(lambda: cluster.prefill.metric("baton_pod_handoff_total", outcome="delivered") == 1)


@pytest.mark.parametrize("is_direct", [False, True])
async def test_positions_go_to_both_pods(is_direct: bool) -> None:
    """Those of an image of 20 tokens in the prompt, in three dimensions."""
    text = range(10), range(18, 18 + len(PROMPT) - 30)
    rows = [10 + index // 5 for index in range(20)], [10 + index % 5 for index in range(20)]
    values = [[*text[0], *image, *text[1]] for image in ([10] * 20, *rows)]
    positions = [common_pb2.Positions(values=each) for each in values]
    store: Store | None = None if is_direct else {}
    executor = {"position_dims": 3}
    async with (
        prefill_pod(store, executor=executor) as prefill,
        decode_pod(store, executor=executor) as decode,
        FakeRouter(decode) as router,
    ):
        request = engine_request("a", PROMPT, positions=positions)
        answer = await router.submit(request, prefill_address=prefill.address)
        await start_prefill(prefill, request)
        await answer.wait_finished()
    assert answer.report is not None
    assert (answer.report.num_external_tokens, answer.report.recompute_reason) == (len(PROMPT), "")
    assert answer.tokens == expected_tokens(PROMPT, 8, positions=PromptPositions.of(values)) != EXPECTED


async def test_either_leg_may_come_first_and_many_run_at_once(cluster: Cluster) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (1, 15, 16, 17, 31, 32, 33, 64, 100)}
    for number, (name, prompt) in enumerate(prompts.items()):
        if number % 2:
            await start_prefill(cluster.prefill, engine_request(name, prompt))
            await cluster.submit(name, prompt)
        else:
            await cluster.submit(name, prompt)
            await start_prefill(cluster.prefill, engine_request(name, prompt))
    for name, prompt in prompts.items():
        answer = await cluster.router.answers[name].wait_finished()
        assert answer.tokens == expected_tokens(prompt, 8)
        assert answer.report is not None
        assert answer.report.num_external_tokens == len(prompt)


async def test_only_what_decode_lacks_is_moved(cluster: Cluster) -> None:
    warm = await cluster.router.submit(engine_request("warm", PROMPT[: 2 * BLOCK_SIZE]))
    await warm.wait_finished()
    answer = await cluster.submit()
    await start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert answer.report is not None
    assert answer.report.num_cached_tokens == 2 * BLOCK_SIZE
    assert answer.report.num_external_tokens == len(PROMPT) - 2 * BLOCK_SIZE


async def test_waiting_for_a_busy_prefill_pod_holds_no_decode_blocks(cluster: Cluster) -> None:
    await cluster.prefill.occupy()
    answer = await cluster.submit()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await cluster.wait_opening()
    assert (await cluster.decode.integrity()).num_blocks_in_use == 0
    cluster.prefill.gate.open()
    await call
    assert (await answer.wait_finished()).tokens == EXPECTED


async def test_decode_reserves_while_the_first_chunk_is_computed(cluster: Cluster) -> None:
    cluster.prefill.gate.shut()
    answer = await cluster.submit()
    await asyncio.gather(
        start_prefill(cluster.prefill, engine_request("a", PROMPT)),
        _open_when_reserved(cluster),
    )
    assert (await answer.wait_finished()).tokens == EXPECTED


async def _open_when_reserved(cluster: Cluster) -> None:
    await wait_for(lambda: cluster.decode.context.stats.latest.num_waiting_for_remote_kv == 1)
    assert (await cluster.decode.integrity()).num_blocks_in_use == -(-len(PROMPT) // BLOCK_SIZE)
    cluster.prefill.gate.open()


@pytest.mark.parametrize("stage", ["opening", "reserved"])
async def test_prefill_pod_dies(cluster: Cluster, stage: str) -> None:
    await cluster.prefill.occupy()
    answer = await cluster.submit()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await cluster.wait_opening()
    if stage == "reserved":
        await cluster.advance_to_reserved()
    await cluster.prefill.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert answer.report is not None
    assert answer.report.recompute_reason == "handoff_broken"
    assert answer.report.num_external_tokens == (CHUNK if stage == "reserved" else 0)
    assert cluster.recomputed("handoff_broken") == 1
    assert cluster.decode.metric("baton_pod_kv_failure_total", reason="handoff_broken", outcome="recomputed") == 1
    assert cluster.decode.metric("baton_pod_handoff_total", outcome="failed") == 1


async def test_prefill_pod_is_not_there(cluster: Cluster) -> None:
    answer = await cluster.router.submit(engine_request("a", PROMPT), prefill_address="127.0.0.1:1")
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert cluster.recomputed("handoff_broken") == 1


@pytest.mark.parametrize("stage", ["opening", "reserved"])
async def test_router_reports_that_the_prefill_leg_failed(cluster: Cluster, stage: str) -> None:
    await cluster.prefill.occupy()
    answer = await cluster.submit()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await cluster.wait_opening()
    if stage == "reserved":
        await cluster.advance_to_reserved()
    await cluster.router.prefill_failed("a", epoch=2)  # of another attempt: ignored
    await (await cluster.router.submit(engine_request("local", prompt_of(3)))).wait_finished()  # by now it was read
    assert cluster.recomputed("prefill_failed") == 0
    await cluster.router.prefill_failed("a")
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert cluster.recomputed("prefill_failed") == 1
    with suppress(grpc.aio.AioRpcError):
        await call


async def test_what_clients_bring_about_is_no_warning_and_the_rest_is_no_flood(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    codes = [common_pb2.ERROR_CODE_INVALID_ARGUMENT] * 3 + [common_pb2.ERROR_CODE_UNAVAILABLE] * 3
    with caplog.at_level(logging.INFO):
        for number, code in enumerate(codes):
            answer = await cluster.submit(f"r{number}")
            await cluster.router.prefill_failed(f"r{number}", code=code)
            assert (await answer.wait_finished()).tokens == EXPECTED
    lines = [record for record in caplog.records if "did not arrive by handoff" in record.message]
    assert [(record.levelname, record.message.split()[-1]) for record in lines] == [
        *[("INFO", "prefill_refused")] * 3,
        ("WARNING", "prefill_failed"),
    ]
    assert (cluster.recomputed("prefill_refused"), cluster.recomputed("prefill_failed")) == (3, 3)


async def test_refused_prefill_leg_leaves_nothing_behind(cluster: Cluster) -> None:
    """The prefill pod never hears of the request, only of the handoff."""
    answer = await cluster.submit()
    await cluster.wait_opening()
    await cluster.router.prefill_failed("a")
    assert (await answer.wait_finished()).tokens == EXPECTED
    await wait_for(lambda: cluster.prefill.context.admission.num_open == 0)


async def test_prefill_fails_after_progress(cluster: Cluster) -> None:
    await cluster.prefill.occupy()
    answer = await cluster.submit()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await cluster.wait_opening()
    await cluster.advance_to_reserved()
    call.cancel()
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert answer.report is not None
    assert answer.report.num_external_tokens == CHUNK
    assert cluster.recomputed("prefill_failed") == 1


async def lose_third_block(cluster: Cluster) -> None:
    """Of the prompt, all of which was computed; the last saves come after the first token. Of several ranks, the first
    one's part."""

    def saved() -> list[BlockHash]:
        return [key for key in list(cluster.store) if len(key) == HASH_BYTES]  # at once: other threads add to it

    await wait_for(lambda: len(saved()) == -(-len(PROMPT) // BLOCK_SIZE))
    cluster.store.pop(saved()[2])


async def test_block_lost_from_the_store_is_recomputed(cluster: Cluster) -> None:
    cluster.prefill.gate.shut()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    cluster.prefill.gate.open()
    await call
    await lose_third_block(cluster)
    answer = await cluster.submit()
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert answer.report is not None
    assert answer.report.num_external_tokens == 2 * BLOCK_SIZE
    assert cluster.recomputed("block_missing") == 1


@pytest.mark.parametrize("stage", ["opening", "reserved", "decoding"])
@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_cancellation_reaches_the_prefill_pod(cluster: Cluster, stage: str, how: str) -> None:
    if stage == "decoding":
        cluster.decode.gate.shut()
    else:
        await cluster.prefill.occupy()
    answer = await cluster.submit()
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    if stage == "opening":
        await cluster.wait_opening()
    elif stage == "reserved":
        await cluster.advance_to_reserved()
    else:
        await answer.wait_tokens(1)
    if how == "abort":
        await cluster.router.abort("a")
        assert (await answer.wait_finished()).finish_reason == common_pb2.FINISH_REASON_ABORT
    else:
        await cluster.router.leave()
    if stage == "decoding":
        await call
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.CANCELLED
    await wait_for(lambda: cluster.decode.context.admission.num_open == 0)


async def test_overdue_request_leaves_its_handoff(cluster: Cluster) -> None:
    answer = await cluster.submit(timeout_s=0.1)
    await answer.wait_finished()
    assert answer.error is not None
    assert answer.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await wait_for(lambda: cluster.prefill.context.admission.num_open == 0)


async def test_closing_decode_pod_takes_leave_of_the_prefill_pod(cluster: Cluster) -> None:
    answer = await cluster.submit()
    await cluster.wait_opening()
    await cluster.decode.runtime.stop()
    cluster.decode.is_dead = True
    assert (await answer.wait_finished()).error is not None
    await wait_for(lambda: cluster.prefill.context.admission.num_open == 0)


async def test_models_that_differ_are_not_mixed() -> None:
    store: Store = {}
    async with prefill_pod(store) as prefill, decode_pod(store) as decode, FakeRouter(decode) as router:
        vars(prefill.context)["spec"] = msgspec.structs.replace(prefill.context.spec, fingerprint=b"another model")
        answer = await router.submit(engine_request("a", PROMPT), prefill_address=prefill.address)
        assert (await answer.wait_finished()).tokens == EXPECTED
        assert decode.metric("baton_pod_kv_recompute_total", reason="incompatible") == 1


async def test_decode_pod_without_connector_computes_by_itself() -> None:
    async with decode_pod({}, connector=None) as decode, FakeRouter(decode) as router:
        answer = await router.submit(engine_request("a", PROMPT), prefill_address="127.0.0.1:1")
        assert (await answer.wait_finished()).tokens == EXPECTED
        assert answer.report is not None
        assert answer.report.recompute_reason == "no_connector"


@pytest.mark.parametrize("stage", ["opening", "reserved"])
async def test_silent_prefill_pod_is_not_waited_for_for_ever(stage: str) -> None:
    store: Store = {}
    waits: dict[str, Any] = {"handoff_queue_timeout_s": 0.2}
    if stage == "reserved":
        waits = {"front": {"timeouts": HandoffTimeouts(queue_s=DEADLINE_S, connect_s=DEADLINE_S, stall_s=0.2)}}
    async with (
        prefill_pod(store) as prefill,
        decode_pod(store, **waits) as decode,
        FakeRouter(decode) as router,
    ):
        await prefill.occupy()
        answer = await router.submit(engine_request("a", PROMPT), prefill_address=prefill.address)
        call = start_prefill(prefill, engine_request("a", PROMPT))
        if stage == "reserved":
            prefill.gate.allow(2)
        await answer.wait_finished()
        assert answer.tokens == EXPECTED
        assert decode.metric("baton_pod_kv_recompute_total", reason="handoff_timeout") == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await call


@pytest.mark.parametrize("seed", range(3))
async def test_many_requests_with_faults_of_every_kind(cluster: Cluster, seed: int) -> None:
    """Whatever is cancelled, refused or lost: each answer is right or was aborted, and nothing is left behind."""
    random = Random(seed)
    prompts = {f"r{n}": prompt_of(random.randint(1, 3 * CHUNK), seed=n) for n in range(30)}
    aborted: set[str] = set()

    async def prefill_leg(name: str, fault: str) -> None:
        if fault == "refused":
            await cluster.router.prefill_failed(name)
            return
        await asyncio.sleep(random.uniform(0, 0.01))
        call = start_prefill(cluster.prefill, engine_request(name, prompts[name]))
        if fault == "cancelled":
            asyncio.get_running_loop().call_later(random.uniform(0, 0.02), call.cancel)
        try:
            await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            await cluster.router.prefill_failed(name)

    async def serve(name: str) -> None:
        fault = random.choice(["none", "none", "refused", "cancelled", "aborted", "lost"])
        answer = await cluster.submit(name, prompts[name])
        leg = asyncio.create_task(prefill_leg(name, fault))
        await asyncio.sleep(random.uniform(0, 0.02))
        if fault == "aborted":
            aborted.add(name)
            await cluster.router.abort(name)
        elif fault == "lost" and cluster.store:
            cluster.store.pop(random.choice(list(cluster.store)), None)
        await answer.wait_finished()
        await leg
        if answer.finish_reason != common_pb2.FINISH_REASON_ABORT:
            assert answer.tokens == expected_tokens(prompts[name], 8)
        else:
            assert name in aborted

    await asyncio.gather(*(serve(name) for name in prompts))


@pytest.mark.parametrize("stage", ["opening", "reserved"])
async def test_request_may_rather_fail_than_be_computed_here(cluster: Cluster, stage: str) -> None:
    await cluster.prefill.occupy()
    answer = await cluster.submit(policy=common_pb2.KV_FAILURE_POLICY_FAIL)
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await cluster.wait_opening()
    if stage == "reserved":
        await cluster.advance_to_reserved()
    await cluster.router.prefill_failed("a")
    await answer.wait_finished()
    assert not answer.tokens
    assert answer.error == common_pb2.Error(
        code=common_pb2.ERROR_CODE_UNAVAILABLE,
        message="the KV did not arrive: prefill_failed",
        param="kv_failure_policy",
    )
    assert cluster.decode.metric("baton_pod_kv_failure_total", reason="prefill_failed", outcome="failed") == 1
    assert cluster.decode.metric("baton_pod_handoff_total", outcome="failed") == 1
    assert cluster.recomputed("prefill_failed") == 0
    with suppress(grpc.aio.AioRpcError):
        await call


async def test_lost_block_fails_a_request_that_may_not_be_recomputed(cluster: Cluster) -> None:
    await start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await lose_third_block(cluster)
    answer = await cluster.submit(policy=common_pb2.KV_FAILURE_POLICY_FAIL)
    await answer.wait_finished()
    assert answer.error is not None
    assert answer.error.message == "the KV did not arrive: block_missing"
    assert not answer.tokens


@pytest.mark.parametrize(("of_pod", "of_request"), [("fail", None), ("recompute", "FAIL"), ("fail", "RECOMPUTE")])
async def test_policy_of_the_request_overrules_that_of_the_pod(of_pod: str, of_request: str | None) -> None:
    policy = common_pb2.KVFailurePolicy.Value(f"KV_FAILURE_POLICY_{of_request or 'UNSPECIFIED'}")
    async with decode_pod({}, kv_failure_policy=of_pod, connector=None) as decode, FakeRouter(decode) as router:
        answer = await router.submit(engine_request("a", PROMPT), prefill_address="127.0.0.1:1", policy=policy)
        await answer.wait_finished()
        if (of_request or of_pod).lower() == "fail":
            assert answer.error is not None
            assert answer.error.message == "the KV did not arrive: no_connector"
        else:
            assert answer.tokens == EXPECTED
