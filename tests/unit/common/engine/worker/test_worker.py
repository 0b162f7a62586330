import os
from pathlib import Path

import pytest
import torch

from common.engine.config import (
    CacheConfig,
    EngineConfig,
    KVConnectorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.contract.masks import no_masks
from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.devices.attention import KVSpec
from common.engine.devices.torch.device import TorchDevice
from common.engine.executor.fake import MemoryConnector
from common.engine.executor.inproc import InprocExecutor
from common.engine.kv_connector import BlockTransfer
from common.engine.worker.worker import allocate_kv_cache
from common.errors import ConfigError
from common.types import RequestId, SamplingParams, hash_partial_block, hash_prompt, root_hash
from tests.tiny_models import MAX_MODEL_LEN, prompt_of, reference_generate, tiny_model_dir

BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)
SHARED_STORE = {}


def create_test_connector(name, options):
    if name != "memory":
        raise ConfigError(f"unknown connector {name!r}", param="connector")
    connector = MemoryConnector(SHARED_STORE)
    connector.options = options
    return connector


def config(model="llama", connector=None, cache=None, **scheduler):
    return EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir(model)), num_threads=1),
        cache=cache or CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(**scheduler),
        connector=connector,
    )


def connector_config(name="memory"):
    return KVConnectorConfig(factory=f"{__name__}:create_test_connector", name=name, options={"path": "x"})


@pytest.fixture
def start():
    executors = []

    def start(num_blocks=32, **settings):
        executor = InprocExecutor(config(**settings))
        executors.append(executor)
        facts = executor.load_model()
        executor.initialize_kv_cache(num_blocks)
        return executor, facts

    yield start
    for executor in executors:
        executor.close()
        executor.close()


def test_facts(start):
    _, facts = start()
    assert len(facts.fingerprint) == 32
    assert facts.layout == KVLayout(BLOCK_SIZE, (KVGroupSpec((0, 1, 2), 2, 12, 12, "float32"),))
    assert facts.bytes_per_block == 3 * 2 * 2 * BLOCK_SIZE * 12 * 4
    assert (facts.device, facts.dtype, facts.max_model_len) == ("cpu", "float32", MAX_MODEL_LEN)


@pytest.mark.parametrize("num_blocks", [2, 3, 32])
def test_measured_steps_fit_the_kv_cache(start, num_blocks):
    executor, _ = start(num_blocks)
    longest = min((num_blocks - 1) * BLOCK_SIZE, MAX_MODEL_LEN)  # of the others, block 0 being the null block
    sizes = [num_tokens for num_tokens, _ in executor.measure_steps()]
    assert sizes[0] == 1
    assert max(sizes) <= longest


def test_kv_bytes_follow_the_settings():
    def kv_blocks(cache, **settings):
        facts = InprocExecutor(config(cache=cache, **settings)).load_model()
        return facts.available_kv_bytes / facts.bytes_per_block

    assert kv_blocks(CacheConfig(num_blocks=7)) == 7
    bytes_per_block = 3 * 2 * 2 * 16 * 12 * 4
    assert kv_blocks(CacheConfig(kv_cache_memory=5 * bytes_per_block + 1)) == 5 + 1 / bytes_per_block
    # A tiny model never needs a tenth of this machine: all requests at full length, and the null block.
    assert kv_blocks(CacheConfig(), max_num_seqs=3) == 3 * MAX_MODEL_LEN / 16 + 1


def test_kv_cache_takes_no_memory_until_written():
    spec = KVSpec(24, 8, 128, 128, torch.bfloat16)
    before = resident_bytes()
    kv_cache = allocate_kv_cache(spec, 1000, 16, TorchDevice(ModelConfig()))  # 1.5 GiB
    assert kv_cache.shape == (1000, 24, 2, 8, 16, 128)
    assert not kv_cache[999].any()
    assert resident_bytes() - before < 1 << 28


def test_kv_cache_that_cannot_be_had_is_a_setting_error():
    with pytest.raises(ConfigError, match="KV cache"):
        allocate_kv_cache(KVSpec(24, 8, 128, 128, torch.bfloat16), 10**9, 16, TorchDevice(ModelConfig()))


def test_more_threads_than_the_machine_has_cores_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    model = ModelConfig(model=str(tiny_model_dir("llama")), num_threads=5)
    with pytest.raises(ConfigError, match="--num-threads: 5, but this process has 4 cores"):
        InprocExecutor(EngineConfig(model=model)).load_model()


def test_more_than_one_rank_is_refused():
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 2, but executor inproc has one") as raised:
        InprocExecutor(EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2)))
    assert raised.value.param == "tensor_parallel_size"


def test_each_rank_has_one_device():
    with pytest.raises(ValueError, match="--rank-devices: 1 devices, but --tensor-parallel-size is 2"):
        ParallelConfig(tensor_parallel_size=2, rank_devices=[1])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_handoff_between_two_executors(start):
    SHARED_STORE.clear()
    producer, facts = start(connector=connector_config())
    consumer, peer_facts = start(connector=connector_config())
    assert facts.fingerprint == peer_facts.fingerprint
    prompt = prompt_of(19)
    request_id = RequestId("r")
    full = hash_prompt(prompt, BLOCK_SIZE, root_hash())
    hashes = (*full, hash_partial_block(prompt, BLOCK_SIZE, full, root_hash()))

    new = NewRequest(request_id, prompt, len(prompt), GREEDY, [[4, 5, 6]], 0)
    result = producer.submit(SchedulerOutput([new], {}, {request_id: 19}, 19), no_masks).result()
    tokens = [result.outcomes[request_id][0].token_id]
    saving, loading = (executor.open_connector(lambda: None).connector for executor in (producer, consumer))
    saving.start_save(BlockTransfer(1, request_id, (4, 5, 6), hashes, 3))
    assert [(r.job_id, r.num_blocks_ok) for r in saving.poll()] == [(1, 3)]
    loading.start_load(BlockTransfer(2, request_id, (9, 8, 7), hashes, 3))
    assert [(r.job_id, r.num_blocks_ok) for r in loading.poll()] == [(2, 3)]
    new = NewRequest(request_id, [*prompt, *tokens], len(prompt), GREEDY, [[9, 8, 7]], 19)
    for step in range(5):
        result = consumer.submit(SchedulerOutput([] if step else [new], {}, {request_id: 1}, 1), no_masks).result()
        tokens.append(result.outcomes[request_id][0].token_id)
    assert tokens == reference_generate(tiny_model_dir("llama"), prompt, 6)


def test_connector_errors_are_setting_errors(start):
    with pytest.raises(ConfigError, match="unknown connector"):
        start(connector=connector_config("nothing"))


def test_without_a_connector_none_is_opened(start):
    executor, _ = start()
    assert executor.open_connector(lambda: None) is None
