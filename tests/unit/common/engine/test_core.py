import msgspec
import pytest

from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.core import EngineCore
from common.engine.executor.fake import FakeExecutor, MemoryConnector, expected_tokens
from common.engine.messages import (
    AddRequest,
    Call,
    EngineCoreOutputs,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
)
from common.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from common.errors import ConfigError, ErrorCode, ModelLoadError
from common.types import (
    HASH_BYTES,
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


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    """Outputs per request, once nothing is left to do."""
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


def test_step_until_done() -> None:
    core = EngineCore(CONFIG, FakeExecutor(block_size=4))
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


def test_refused_request_is_an_output() -> None:
    core = EngineCore(
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
    core = EngineCore(CONFIG, FakeExecutor(block_size=4))
    core.add_request(request("a", max_tokens=50))
    core.step()
    core.abort_requests([RequestId("a"), RequestId("unknown")])
    assert core.has_work
    outputs = run(core)
    assert [output.finish_reason for output in outputs["a"]] == [FinishReason.ABORT]
    assert list(outputs) == ["a"]
    assert core.check_integrity().num_blocks_in_use == 0


def test_settled_transfer_wakes_an_idle_core() -> None:
    wakeups: list[bool] = []
    settled = []

    class Executor(FakeExecutor):
        def initialize_kv_cache(self, num_blocks, on_transfer_settled):
            settled.append(on_transfer_settled)
            return super().initialize_kv_cache(num_blocks, on_transfer_settled)

    core = EngineCore(CONFIG, Executor(block_size=4), on_wakeup=lambda: wakeups.append(True))
    assert not core.has_work
    settled[0]()
    settled[0]()
    assert wakeups == [True]  # one wake-up is enough
    assert core.has_work
    core.step()
    assert not core.has_work


def test_a_started_producer_is_announced_while_its_step_runs() -> None:
    told: list[EngineCoreOutputs] = []

    class Watching(FakeExecutor):
        def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
            if step.num_scheduled_tokens:
                assert [type(event) for output in told[0].outputs for event in output.events] == [RequestStarted]
            return super().execute(step)

    core = EngineCore(CONFIG, Watching(block_size=4), on_urgent_news=told.append)
    transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="producer")
    core.add_request(msgspec.structs.replace(request(), transfer=transfer))
    outputs = run(core)["r"]
    assert len(told) == 1
    assert not any(isinstance(event, RequestStarted) for output in outputs for event in output.events)


def test_calls() -> None:
    core = EngineCore(CONFIG, FakeExecutor(block_size=4))
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
    core = EngineCore(CONFIG, FailingExecutor(block_size=4))
    core.add_request(request())
    with pytest.raises(MemoryError):
        core.step()


def test_failed_start_closes_the_executor() -> None:
    executor = UnloadableExecutor()
    with pytest.raises(ModelLoadError):
        EngineCore(CONFIG, executor)
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
    core = EngineCore(EngineConfig(cache=cache), FakeExecutor(block_size=4, available_blocks=256))
    assert core.spec.num_blocks == num_blocks
    assert core.stats().num_blocks == num_blocks - 1
    assert core.spec.max_model_len == min(4096, (num_blocks - 1) * 4)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (EngineConfig(cache=CacheConfig(block_size=4, kv_cache_memory=BYTES_PER_BLOCK)), ["kv_cache_memory"]),
        (
            EngineConfig(model=ModelConfig(max_model_len=29), cache=CacheConfig(block_size=4, num_blocks=8)),
            ["max_model_len", "kv_cache_memory", str(9 * BYTES_PER_BLOCK)],
        ),
        (EngineConfig(model=ModelConfig(max_model_len=5000)), ["max_model_len", "4096"]),
    ],
)
def test_settings_that_do_not_fit(config: EngineConfig, names: list[str]) -> None:
    executor = FakeExecutor(block_size=4)
    with pytest.raises(ConfigError) as raised:
        EngineCore(config, executor)
    assert all(name in raised.value.message for name in names)
    assert executor.closed


def test_longest_request_fits_the_smallest_cache() -> None:
    """max_model_len "auto" is what one request can really use, whatever the watermark."""
    core = EngineCore(
        EngineConfig(cache=CacheConfig(block_size=4, num_blocks=5), scheduler=SchedulerConfig(watermark=0.5)),
        FakeExecutor(block_size=4),
    )
    assert core.spec.max_model_len == 16
    core.add_request(request("a", [1] * 10, max_tokens=100))
    outputs = run(core)
    assert tokens_of(outputs["a"]) == expected_tokens([1] * 10, 6)
    assert outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_tier", [False, True])
def test_answers_from_a_tiny_pool_are_right(is_tier: bool) -> None:
    core = _run_out_of_blocks(is_tier=is_tier)
    assert core.stats().num_preemptions
    assert core.check_integrity().violations == []
    assert core.check_integrity().num_blocks_in_use == 0
    assert bool(core.stats().tier_hits) == is_tier


def test_a_tier_saves_computing() -> None:
    without, with_tier = (_run_out_of_blocks(is_tier=is_tier).stats() for is_tier in (False, True))
    assert with_tier.num_prompt_tokens < without.num_prompt_tokens
    assert with_tier.num_offloaded_blocks
    assert with_tier.num_offload_failures == 0


def _run_out_of_blocks(*, is_tier: bool) -> EngineCore:
    """Conversations of two turns each, in turn, in a cache that holds few of them. All answers are right."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=25),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    )
    core = EngineCore(config, FakeExecutor(block_size=4, connector=MemoryConnector(is_tier=is_tier)))
    prompts = {f"r{index}": [index, 1, 2, 3, *range(20)] for index in range(8)}
    for turn in range(2):
        for request_id, prompt in prompts.items():
            core.add_request(request(f"{request_id}-{turn}", prompt, max_tokens=16))
        outputs = run(core)
        for request_id, prompt in prompts.items():
            answer = tokens_of(outputs[f"{request_id}-{turn}"])
            assert answer == expected_tokens(prompt, 16)
            prompts[request_id] = [*prompt, *answer, 7, 8, 9]
        assert not core.has_unfinished
    return core


def known_blocks(known: set[bytes], said: EngineCoreOutputs) -> set[bytes]:
    """What somebody knows of the prefix cache who hears of every step."""
    return known - set(split_hashes(said.kv_removed)) | set(split_hashes(said.kv_stored))


def test_steps_say_what_the_prefix_cache_holds() -> None:
    core = EngineCore(CONFIG, FakeExecutor(block_size=4))
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
    core = EngineCore(CONFIG, FakeExecutor(block_size=4))
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
    core = EngineCore(msgspec.structs.replace(CONFIG, cache=cache), FakeExecutor(block_size=4))
    core.add_request(request("a", list(range(10))))
    while core.has_work:
        step = core.step()
        assert (step.kv_stored, step.kv_removed) == (b"", b"")
