import queue
import threading
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
import torch

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from common.engine.contract.step import ModelRunnerOutput, SchedulerOutput
from common.engine.core import EngineCore
from common.engine.executor.base import Executor
from common.engine.executor.fake import DirectMemoryConnector, FakeExecutor, MemoryConnector, expected_tokens
from common.engine.messages import (
    AddRequest,
    Call,
    EngineCoreOutputs,
    KVSaved,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.engine.scheduler.scheduler import MAX_PROMPT_ROWS
from common.engine.speculation.fake import Accuracy
from common.errors import ConfigError, ErrorCode, ModelLoadError
from common.types import (
    HASH_BYTES,
    BlockHash,
    FinishReason,
    RequestId,
    SamplingParams,
    TransferId,
    hash_prompt,
    root_hash,
    split_hashes,
)
from tests.unit.common.engine.fake_engines import FailingExecutor, UnloadableExecutor

CONFIG = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=64))
BYTES_PER_BLOCK = 2 * 4 * 4  # of a FakeExecutor with blocks of 4


def request(request_id: str = "r", prompt: list[int] | None = None, max_tokens: int = 8) -> AddRequest:
    return AddRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt or [1, 2, 3, 4, 5],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )


def create_core(config: EngineConfig, executor: Executor, **callbacks: Any) -> EngineCore:
    """A core that tells only those that ask."""

    def fail(error: Exception) -> None:
        raise error

    ignore = {"on_wakeup": lambda: None, "on_outputs": lambda _: None, "on_failure": fail}
    return EngineCore(config, executor, **(ignore | callbacks))


def run(core: EngineCore | InprocClient) -> dict[str, list[RequestOutput]]:
    """Outputs per request, once nothing is left to do. Only a client waits for KV on the move."""
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_unfinished if isinstance(core, InprocClient) else core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


@pytest.mark.parametrize("drafts", [None, "right", "wrong", "half"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_step_until_done(num_ranks: int, drafts: Accuracy | None) -> None:
    executor = FakeExecutor(block_size=4, num_ranks=num_ranks, drafts=drafts)
    core = create_core(CONFIG, executor)
    core.add_request(request("a", [7, 8, 9]))
    core.add_request(request("b", list(range(30)), max_tokens=3))
    outputs = run(core)
    assert tokens_of(outputs["a"]) == expected_tokens([7, 8, 9], 8)
    assert tokens_of(outputs["b"]) == expected_tokens(list(range(30)), 3)
    assert outputs["a"][-1].finish_reason is FinishReason.LENGTH
    assert not core.has_unfinished
    report = core.check_integrity()
    assert report.violations == []
    assert report.num_requests == 0
    assert core.stats().num_generation_tokens == 11
    assert any(step.drafts for step in executor.steps) == (drafts is not None)
    assert (len(executor.steps) < 8) == (drafts in {"right", "half"})


def test_refused_request_is_an_output() -> None:
    core = create_core(
        EngineConfig(cache=CacheConfig(block_size=4, num_blocks=8), scheduler=SchedulerConfig(max_num_waiting=1)),
        FakeExecutor(block_size=4),
    )
    core.add_request(request("long", [1] * 100))
    core.add_request(request("first"))
    core.add_request(request("second"))
    outputs = run(core)
    (too_long,), (overloaded,) = outputs["long"], outputs["second"]
    assert (too_long.finish_reason, too_long.error_code) == (
        FinishReason.ERROR,
        ErrorCode.INVALID_ARGUMENT.value.number,
    )
    assert "100 tokens" in too_long.error
    assert overloaded.error_code == ErrorCode.RESOURCE_EXHAUSTED.value.number
    assert outputs["first"][-1].finish_reason is FinishReason.LENGTH


def test_abort_answers_once() -> None:
    core = create_core(CONFIG, FakeExecutor(block_size=4))
    core.add_request(request("a", max_tokens=50))
    core.step()
    core.abort_requests([RequestId("a"), RequestId("unknown")])
    assert core.has_work
    outputs = run(core)
    assert [output.finish_reason for output in outputs["a"]] == [FinishReason.ABORT]
    assert list(outputs) == ["a"]
    assert core.check_integrity().num_blocks_in_use == 0


def producer(request_id: str = "r") -> AddRequest:
    transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="producer")
    return msgspec.structs.replace(request(request_id), transfer=transfer)


def test_what_settles_wakes_an_idle_core() -> None:
    woken = threading.Event()
    core = create_core(CONFIG, FakeExecutor(block_size=4), on_wakeup=woken.set)
    core.receive(producer())
    core.add_request(producer())
    while not woken.wait(0.01):
        if core.has_work:
            core.step()
    run(core)
    assert core.check_integrity().num_transfers == 0
    core.close()


def test_a_started_producer_is_announced_while_its_step_runs() -> None:
    told: list[EngineCoreOutputs] = []

    class Watching(FakeExecutor):
        def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
            if step.num_scheduled_tokens:
                assert [type(event) for output in told[0].outputs for event in output.events] == [RequestStarted]
            return super().execute(step)

    core = create_core(CONFIG, Watching(block_size=4), on_outputs=told.append)
    core.receive(producer())
    core.add_request(producer())
    outputs = run(core)["r"]
    assert told[0].stats is None, "outputs of transfers say nothing of steps"
    assert not any(isinstance(event, RequestStarted) for output in outputs for event in output.events)
    core.close()


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_refused_handoff_leaves_nothing_behind(role: Literal["producer", "consumer"]) -> None:
    woken = threading.Event()
    core = create_core(CONFIG, FakeExecutor(block_size=4), on_wakeup=woken.set)
    transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role=role)
    refused = msgspec.structs.replace(request(), prompt_token_ids=[1] * 5000, transfer=transfer)
    core.receive(refused)
    core.add_request(refused)
    assert woken.wait(60)
    core.step()  # takes the event that the handoff is over
    core.add_request(request("other"))
    assert run(core)["other"][-1].finish_reason is FinishReason.LENGTH
    assert core.check_integrity().violations == []
    core.close()
    assert core._actor._mover is not None
    assert len(core._actor._mover) == 0


class GatedExecutor(FakeExecutor):
    """Whose steps with more than `num_free_steps` before them wait until they are let go."""

    def __init__(self, num_free_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self._num_free_steps = num_free_steps
        self.is_computing = threading.Event()
        self.may_end = threading.Event()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.num_scheduled_tokens and self._num_free_steps == 0:
            self.is_computing.set()
            assert self.may_end.wait(60)
        elif step.num_scheduled_tokens:
            self._num_free_steps -= 1
        return super().execute(step)


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["store", "direct"])
def test_a_handoff_completes_while_a_later_step_of_its_producer_runs(
    kind: str, of_producer: int, of_consumer: int
) -> None:
    """The consumer's engine has the KV, and goes on, before the producer's engine is through with its next step."""
    medium: dict[BlockHash, torch.Tensor] = {}
    told: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

    def tell(outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            told.put(output)

    def connector() -> Any:
        return DirectMemoryConnector() if kind == "direct" else MemoryConnector(medium)

    gated = GatedExecutor(1, block_size=4, connector=connector(), num_ranks=of_producer, num_kv_heads=4)
    prefill = create_core(CONFIG, gated, on_outputs=tell)
    started: list[EngineCoreOutputs] = []
    consuming = FakeExecutor(block_size=4, connector=connector(), num_ranks=of_consumer, num_kv_heads=4, drafts="half")
    decode = create_core(CONFIG, consuming, on_outputs=started.append)
    consumer_transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="consumer")
    consumer = msgspec.structs.replace(request(), transfer=consumer_transfer)
    for core, added in ((prefill, producer()), (decode, consumer)):
        core.receive(added)
        core.add_request(added)
    (prefilled,) = (output for output in prefill.step().outputs if output.tokens)
    decode.step()
    prefill.add_request(request("later"))
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    try:
        assert gated.is_computing.wait(60)
        if kind == "direct":
            (event,) = started[0].outputs[0].events
            assert isinstance(event, RequestStarted)
            prefill.receive(
                TransferTarget(
                    request_id=RequestId("r"),
                    epoch=1,
                    address=decode.spec.connector_addresses[0],
                    num_held_tokens=0,
                    block_ids=event.reserved_block_ids,
                )
            )
            decode.receive(TransferQuiesced(request_id=RequestId("r"), epoch=1))
        saved = next_saved(told)
        decode.receive(
            TransferUpdate(
                request_id=RequestId("r"),
                epoch=1,
                num_ready_tokens=saved.num_tokens,
                final=True,
                first_token=prefilled.tokens[0],
                digests=saved.digests,
            )
        )
        started.clear()
        outputs: list[RequestOutput] = []
        while not (outputs and outputs[-1].finish_reason):
            if decode.has_work:
                outputs += decode.step().outputs
        outputs = [output for told in started for output in told.outputs] + outputs
    finally:
        gated.may_end.set()
        stepping.join()
    assert tokens_of(outputs) == expected_tokens([1, 2, 3, 4, 5], 8)
    assert [event.recompute_reason for output in outputs for event in output.events] == [""]
    run(prefill)
    for core in (prefill, decode):
        core.close()


class FencedExecutor(FakeExecutor):
    """On a device: a step that computes something may not be over when it is answered."""

    num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(step)
        if not step.num_scheduled_tokens:
            return result
        self.num_steps += 1
        return replace(result, fence=self.num_steps)


def test_transfers_wait_for_the_last_step_that_computed_something() -> None:
    core = create_core(CONFIG, FencedExecutor(block_size=4))
    core.add_request(request("a", max_tokens=3))
    run(core)
    core.reset_prefix_cache()
    core.step()  # says so, and computes nothing
    assert core._port is not None
    assert core._port.fence == 3
    core.close()


def next_saved(told: queue.SimpleQueue[RequestOutput]) -> KVSaved:
    while True:
        for event in told.get(timeout=60).events:
            if isinstance(event, KVSaved):
                return event


def test_calls() -> None:
    core = create_core(CONFIG, FakeExecutor(block_size=4))
    assert core.call(Call(1, "engine_spec")).result == core.spec
    assert core.call(Call(2, "stats")).result == core.stats()
    assert core.call(Call(3, "check_integrity")).result == core.check_integrity()
    core.add_request(request("a", [1] * 12))
    run(core)
    assert core.call(Call(4, "reset_prefix_cache")).call_id == 4
    core.add_request(request("b", [1] * 12))
    run(core)
    assert core.stats().prefix_cache_hits == 0


def test_executor_failure_is_fatal() -> None:
    core = create_core(CONFIG, FailingExecutor(block_size=4))
    core.add_request(request())
    with pytest.raises(MemoryError):
        core.step()


def test_failed_start_closes_the_executor() -> None:
    executor = UnloadableExecutor()
    with pytest.raises(ModelLoadError):
        create_core(CONFIG, executor)
    assert executor.closed


@pytest.mark.parametrize(
    ("cache", "num_blocks"),
    [
        (CacheConfig(block_size=4, num_blocks=7, kv_cache_memory=1 << 20), 7),
        (CacheConfig(block_size=4, kv_cache_memory=9 * BYTES_PER_BLOCK + 1), 9),
        (CacheConfig(block_size=4), 256),  # what the executor says is available
    ],
)
def test_number_of_blocks(cache: CacheConfig, num_blocks: int) -> None:
    core = create_core(EngineConfig(cache=cache), FakeExecutor(block_size=4, available_blocks=256))
    assert core.spec.num_blocks == num_blocks
    assert core.stats().num_blocks == num_blocks - 1
    assert core.spec.max_model_len == min(4096, (num_blocks - 1) * 4)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (EngineConfig(cache=CacheConfig(block_size=4, kv_cache_memory=BYTES_PER_BLOCK)), ["--kv-cache-memory"]),
        (
            EngineConfig(model=ModelConfig(max_model_len=29), cache=CacheConfig(block_size=4, num_blocks=8)),
            ["--max-model-len", "--kv-cache-memory", str(9 * BYTES_PER_BLOCK)],
        ),
        (EngineConfig(model=ModelConfig(max_model_len=5000)), ["--max-model-len", "4096"]),
    ],
)
def test_settings_that_do_not_fit(config: EngineConfig, names: list[str]) -> None:
    executor = FakeExecutor(block_size=4)
    with pytest.raises(ConfigError) as raised:
        create_core(config, executor)
    assert all(name in raised.value.message for name in names)
    assert executor.closed


def test_longest_request_fits_the_smallest_cache() -> None:
    """max_model_len "auto" is what one request can really use."""
    core = create_core(
        EngineConfig(cache=CacheConfig(block_size=4, num_blocks=5)),
        FakeExecutor(block_size=4),
    )
    assert core.spec.max_model_len == 16
    core.add_request(request("a", [1] * 10, max_tokens=100))
    outputs = run(core)
    assert tokens_of(outputs["a"]) == expected_tokens([1] * 10, 6)
    assert outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("num_ranks", "drafts"), [(1, None), (2, None), (1, "right"), (2, "half"), (1, "wrong")])
@pytest.mark.parametrize("is_tier", [False, True])
def test_answers_from_a_tiny_pool_are_right(is_tier: bool, num_ranks: int, drafts: Accuracy | None) -> None:
    client = _run_out_of_blocks(is_tier=is_tier, num_ranks=num_ranks, drafts=drafts)
    assert client.stats().num_preemptions
    assert client.check_integrity().violations == []
    assert client.check_integrity().num_blocks_in_use == 0
    assert bool(client.stats().tier_queries) == bool(client.stats().num_offloaded_blocks) == is_tier
    assert client.stats().num_offload_failures == 0


def _run_out_of_blocks(*, is_tier: bool, num_ranks: int = 1, drafts: Accuracy | None = None) -> InprocClient:
    """Conversations of two turns each, in turn, in a cache that holds few of them. All answers are right."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=25),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    )
    connector = MemoryConnector(is_tier=is_tier)
    executor = FakeExecutor(block_size=4, connector=connector, num_ranks=num_ranks, drafts=drafts)
    client = InprocClient(config, executor)
    prompts = {f"r{index}": [index, 1, 2, 3, *range(20)] for index in range(8)}
    for turn in range(2):
        for request_id, prompt in prompts.items():
            client.add_request(request(f"{request_id}-{turn}", prompt, max_tokens=16))
        outputs = run(client)
        for request_id, prompt in prompts.items():
            answer = tokens_of(outputs[f"{request_id}-{turn}"])
            assert answer == expected_tokens(prompt, 16)
            prompts[request_id] = [*prompt, *answer, 7, 8, 9]
    return client


def known_blocks(known: set[bytes], said: EngineCoreOutputs) -> set[bytes]:
    """What somebody knows of the prefix cache who hears of every step."""
    return known - set(split_hashes(said.kv_removed)) | set(split_hashes(said.kv_stored))


def test_steps_say_what_the_prefix_cache_holds() -> None:
    core = create_core(CONFIG, FakeExecutor(block_size=4))
    core.add_request(request("a", list(range(10)), max_tokens=3))
    said = []
    while core.has_work:
        said.append(core.step())
    known: set[bytes] = set()
    for step in said:
        known = known_blocks(known, step)
    assert known == set(hash_prompt([*range(10), *expected_tokens(list(range(10)), 3)][:12], 4, root_hash()))
    assert len(said[0].kv_stored) == 2 * HASH_BYTES, "not before the blocks are full"


def test_reset_of_an_idle_core_is_said_too() -> None:
    core = create_core(CONFIG, FakeExecutor(block_size=4))
    core.add_request(request("a", list(range(10)), max_tokens=1))
    stored = b""
    while core.has_work:
        stored += core.step().kv_stored
    core.reset_prefix_cache()
    assert core.has_work
    assert set(split_hashes(core.step().kv_removed)) == set(split_hashes(stored)) != set()
    assert not core.has_unfinished
    core.reset_prefix_cache()
    assert not core.has_work, "nothing was there to forget"


def test_without_prefix_caching_there_is_nothing_to_say() -> None:
    cache = msgspec.structs.replace(CONFIG.cache, enable_prefix_caching=False)
    core = create_core(msgspec.structs.replace(CONFIG, cache=cache), FakeExecutor(block_size=4))
    core.add_request(request("a", list(range(10))))
    while core.has_work:
        step = core.step()
        assert (step.kv_stored, step.kv_removed) == (b"", b"")


def _drafting_core(num_requests: int, **scheduler: Any) -> tuple[EngineCore, FakeExecutor]:
    """A core in which so many requests decode, with drafts that are wrong."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=4000), scheduler=SchedulerConfig(max_num_seqs=256, **scheduler)
    )
    executor = FakeExecutor(block_size=4, available_blocks=4000, drafts="wrong")
    core = create_core(config, executor)
    for number in range(num_requests):
        core.add_request(request(f"r{number}", [number, 2, 3], max_tokens=60))
    while not (executor.steps and executor.steps[-1].drafts):
        core.step()
    return core, executor


def test_prompts_do_not_wait_for_drafts() -> None:
    core, _ = _drafting_core(16, max_num_batched_tokens=64)
    core.add_request(request("prompt", list(range(100)), max_tokens=2))
    steps = (core.step().outputs for _ in range(4))
    assert any(output.request_id == "prompt" and output.tokens for outputs in steps for output in outputs)
    core.close()


def test_the_logits_of_drafts_are_bounded() -> None:
    core, executor = _drafting_core(200, max_num_batched_tokens=4096)
    rows = [sum(step.num_scheduled_tokens.values()) for step in executor.steps if step.drafts]
    assert 200 < max(rows) <= MAX_PROMPT_ROWS
    core.close()


class SlowExecutor(FakeExecutor):
    """Says that its steps take 50 ms for each token."""

    def measure_steps(self) -> list[tuple[int, float]]:
        return [(tokens, 0.05 * tokens) for tokens in (1, 64, 128)]


@pytest.mark.parametrize(("executor", "most"), [("multiproc", 160), ("inproc", 512)])
def test_no_step_of_slow_ranks_comes_near_their_timeout(executor: str, most: int) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=256),
        scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4, target_itl_ms=None),
        parallel=ParallelConfig(executor=executor, step_timeout_s=30),
    )
    core = create_core(config, SlowExecutor(block_size=4))
    core.add_request(request(prompt=[1] * 600))
    longest = 0
    while core.has_work:
        core.step()
        longest = max(longest, core.stats().last_step_tokens)
    assert most * 0.8 < longest <= most
    core.close()
