"""A prefill pod writes straight into the blocks that a decode pod has reserved: direct handoffs over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import grpc
import pytest

from common.engine.executor.fake import expected_tokens
from common.pb import common_pb2
from tests.pods import (
    BLOCK_SIZE,
    CHUNK,
    DEADLINE_S,
    FakeRouter,
    RunningPod,
    SlowConnector,
    decode_pod,
    engine_request,
    prefill_pod,
    prompt_of,
    start_prefill,
    wait_for,
)

PROMPT = prompt_of(2 * CHUNK + 5)  # three chunks
EXPECTED = expected_tokens(PROMPT, 8)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


@dataclass
class Cluster:
    prefill: RunningPod
    decode: RunningPod
    router: FakeRouter
    connector: SlowConnector  # of the prefill pod

    def recomputed(self, reason: str) -> float:
        return self.decode.metric("baton_pod_kv_recompute_total", reason=reason)

    async def submit(self, name: str = "a", prompt: list[int] = PROMPT, **options):
        return await self.router.submit(engine_request(name, prompt), prefill_address=self.prefill.address, **options)

    async def start_and_write(self):
        """A handoff whose first save is under way, for as long as the connector is held."""
        self.connector.hold()
        answer = await self.submit()
        call = start_prefill(self.prefill, engine_request("a", PROMPT))
        await wait_for(lambda: self.connector.is_writing)
        return answer, call

    async def num_lent(self) -> int:
        """Blocks of the decode pod that nobody else may have, requests or not."""
        return (await self.decode.integrity()).num_blocks_in_use


@pytest.fixture(params=[(1, 1), (2, 2), (2, 1), (1, 2)], ids=lambda ranks: f"{ranks[0]} to {ranks[1]} ranks")
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    connector = SlowConnector()
    of_prefill, of_decode = request.param
    async with (
        prefill_pod(None, executor={"connector": connector, "num_ranks": of_prefill, "num_kv_heads": 2}) as prefill,
        decode_pod(None, executor={"num_ranks": of_decode, "num_kv_heads": 2}) as decode,
        FakeRouter(decode) as router,
    ):
        yield Cluster(prefill, decode, router, connector)
        connector.let_go()


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


async def test_only_what_decode_lacks_is_written(cluster: Cluster) -> None:
    warm = await cluster.router.submit(engine_request("warm", PROMPT[: 2 * BLOCK_SIZE]))
    await warm.wait_finished()
    answer = await cluster.submit()
    await start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await answer.wait_finished()
    assert answer.tokens == EXPECTED
    assert answer.report is not None
    assert answer.report.num_cached_tokens == 2 * BLOCK_SIZE
    assert answer.report.num_external_tokens == len(PROMPT) - 2 * BLOCK_SIZE
    written = [block for save in cluster.connector.saves for block in save.block_ids]
    assert len(written) == NUM_BLOCKS - 2


async def test_request_aborted_before_anything_is_reserved(cluster: Cluster) -> None:
    admission = cluster.prefill.context.admission
    await cluster.prefill.occupy()
    answer = await cluster.submit()
    await wait_for(lambda: admission.num_open == 2)  # a prefill, and a transfer that the decode pod has opened
    call = start_prefill(cluster.prefill, engine_request("a", PROMPT))
    await wait_for(lambda: admission.num_open == 3)
    await cluster.router.abort("a")
    await answer.wait_finished()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    cluster.prefill.gate.open()
    await cluster.decode.wait_clean()
    assert not cluster.connector.saves


@pytest.mark.parametrize("how", ["abort", "leave", "prefill_failed"])
async def test_blocks_stay_lent_until_the_prefill_pod_is_quiescent(cluster: Cluster, how: str) -> None:
    answer, call = await cluster.start_and_write()
    match how:
        case "abort":
            await cluster.router.abort("a")
            await answer.wait_finished()
        case "leave":
            await cluster.router.leave()
        case "prefill_failed":
            await cluster.router.prefill_failed("a")
            assert (await answer.wait_finished()).tokens == EXPECTED  # while the writes are still going on
    await wait_for(lambda: bool(cluster.connector.cancelled))
    assert await cluster.num_lent() == NUM_BLOCKS
    cluster.connector.let_go()
    await cluster.decode.wait_clean()
    await cluster.prefill.wait_clean()
    with suppress(grpc.aio.AioRpcError):
        await call


async def test_prefill_pod_dies_while_it_writes(caplog: pytest.LogCaptureFixture) -> None:
    connector = SlowConnector()
    async with (
        prefill_pod(None, executor={"connector": connector}, handoff_quarantine_s=0.2) as prefill,
        decode_pod(None) as decode,
        FakeRouter(decode) as router,
    ):
        cluster = Cluster(prefill, decode, router, connector)
        answer, call = await cluster.start_and_write()
        await prefill.kill()
        await answer.wait_finished()
        assert answer.tokens == EXPECTED
        assert cluster.recomputed("handoff_broken") == 1
        await decode.wait_clean()
        assert f"{NUM_BLOCKS} KV blocks are in quarantine" in caplog.text
        connector.let_go()
        with suppress(grpc.aio.AioRpcError):
            await call


async def test_recompute_does_not_wait_for_the_quarantine_which_bounds_handoffs() -> None:
    """Here it outlasts the test: what the lost pod may write to is nobody's, and no more is lent."""
    connector = SlowConnector()
    async with (
        prefill_pod(None, executor={"connector": connector}, handoff_quarantine_s=DEADLINE_S * 10) as prefill,
        decode_pod(None, front={"max_quarantined_share": 0.01}) as decode,
        FakeRouter(decode) as router,
    ):
        cluster = Cluster(prefill, decode, router, connector)
        answer, call = await cluster.start_and_write()
        await prefill.kill()
        assert (await answer.wait_finished()).tokens == EXPECTED
        connector.let_go()  # late writes: the answers below do not show them
        answer = await cluster.submit("b")
        assert (await answer.wait_finished()).tokens == EXPECTED
        assert cluster.recomputed("quarantine_full") == 1
        report = await decode.integrity()
        assert (report.num_blocks_in_use, report.num_transfers, list(report.violations)) == (NUM_BLOCKS, 1, [])
        decode.is_dead = True  # it cannot become clean
        with suppress(grpc.aio.AioRpcError):
            await call


async def test_bytes_that_are_not_what_was_written_are_computed_again(cluster: Cluster) -> None:
    answer, call = await cluster.start_and_write()
    cluster.connector.corrupt_next = True
    cluster.connector.let_go()
    assert (await answer.wait_finished()).tokens == EXPECTED
    assert cluster.recomputed("block_corrupt") == 1
    await call


async def test_decode_pod_dies_while_its_blocks_are_written_to(cluster: Cluster) -> None:
    _, call = await cluster.start_and_write()
    cluster.decode.is_dead = True
    await cluster.decode.runtime.stop()
    cluster.connector.let_go()
    await cluster.prefill.wait_clean()
    with suppress(grpc.aio.AioRpcError):
        await call


@pytest.mark.parametrize("seed", range(3))
async def test_many_requests_with_faults_of_every_kind(cluster: Cluster, seed: int) -> None:
    """Whatever is cancelled, refused or corrupted: each answer is right or was aborted, and nothing is left behind."""
    random = Random(seed)
    prompts = {f"r{n}": prompt_of(random.randint(1, 3 * CHUNK), seed=n) for n in range(30)}

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
        fault = random.choice(["none", "none", "refused", "cancelled", "aborted", "slow", "corrupt"])
        answer = await cluster.submit(name, prompts[name])
        leg = asyncio.create_task(prefill_leg(name, fault))
        if fault == "slow":
            cluster.connector.hold()
        cluster.connector.corrupt_next |= fault == "corrupt"
        await asyncio.sleep(random.uniform(0, 0.02))
        cluster.connector.let_go()
        if fault == "aborted":
            await cluster.router.abort(name)
        await answer.wait_finished()
        await leg
        if answer.finish_reason == common_pb2.FINISH_REASON_ABORT:
            assert fault == "aborted"
        else:
            assert answer.tokens == expected_tokens(prompts[name], 8)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(serve(name) for name in prompts))
