import time

import pytest

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.executor.fake import DirectMemoryConnector, FakeExecutor, MemoryConnector, expected_tokens
from common.engine.kv_connector import BlockTransfer, Destination
from common.types import RequestId, SamplingParams, hash_prompt, root_hash

R = RequestId("r")
GREEDY = SamplingParams(temperature=0.0)


def new_request(tokens, blocks, computed=0, sampling=GREEDY):
    return NewRequest(R, list(tokens), len(tokens), sampling, [list(blocks)], computed)


def step(new=(), blocks=None, scheduled=None, **kwargs):
    scheduled = scheduled or {}
    return SchedulerOutput(
        list(new), {each: [ids] for each, ids in (blocks or {}).items()}, scheduled, sum(scheduled.values()), **kwargs
    )


@pytest.fixture(params=[1, 2, 3], ids=lambda num_ranks: f"{num_ranks} ranks")
def num_ranks(request):
    return request.param


DEGREES = [(1, 2), (2, 1), (2, 2), (4, 2), (8, 2), (2, 8)]  # of four KV heads


def started(num_ranks, **kwargs):
    executor = FakeExecutor(block_size=4, available_blocks=16, num_ranks=num_ranks, **kwargs)
    executor.load_model()
    executor.initialize_kv_cache(16)
    return executor


def settled(start, connector, transfer):
    """What becomes of a job."""
    start(transfer)
    give_up = time.monotonic() + 60
    while not (results := connector.poll()):
        assert time.monotonic() < give_up
        time.sleep(0.0005)
    (result,) = results
    return result


def test_chunks_and_decode_generate_the_expected_tokens(num_ranks):
    executor = started(num_ranks)
    prompt = list(range(10))
    assert not executor.execute(step([new_request(prompt, [3, 1])], scheduled={R: 7})).outcomes
    tokens = [executor.execute(step(blocks={R: [2]}, scheduled={R: 3})).outcomes[R][0].token_id]
    for computed in range(10, 13):
        result = executor.execute(step(blocks={R: [9]} if computed == 12 else {}, scheduled={R: 1}))
        tokens.append(result.outcomes[R][0].token_id)
    assert tokens == expected_tokens(prompt, 4)


def test_a_block_shared_by_mistake_changes_the_output(num_ranks):
    executor = started(num_ranks)
    prompt = list(range(8))
    executor.execute(step([new_request(prompt, [1, 1])], scheduled={R: 4}))
    token = executor.execute(step(scheduled={R: 4})).outcomes[R][0]
    assert [token.token_id] != expected_tokens(prompt, 1)


def test_seed_matters_unless_greedy():
    prompt = [5, 6]
    one, two = (expected_tokens(prompt, 8, sampling=SamplingParams(seed=seed)) for seed in (1, 2))
    assert one != two
    greedy = [expected_tokens(prompt, 8, sampling=SamplingParams(temperature=0.0, seed=seed)) for seed in (1, 2)]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 1), *DEGREES])
def test_saved_blocks_can_be_loaded_by_another_executor(of_producer, of_consumer):
    store = {}
    producer, consumer = (
        started(num_ranks, connector=MemoryConnector(store), num_kv_heads=4) for num_ranks in (of_producer, of_consumer)
    )
    saving, loading = (executor.open_connector(lambda: None).connector for executor in (producer, consumer))
    prompt = list(range(8))
    hashes = tuple(hash_prompt(prompt, 4, root_hash()))
    first = producer.execute(step([new_request(prompt, [1, 2])], scheduled={R: 8})).outcomes[R][0].token_id
    saved = settled(saving.start_save, saving, BlockTransfer(1, R, (1, 2), hashes, 4))
    assert saved.num_blocks_ok == 2

    loaded = settled(loading.start_load, loading, BlockTransfer(7, R, (5, 6), hashes, 4))
    assert (loaded.job_id, loaded.num_blocks_ok, loaded.error) == (7, 2, "")
    result = consumer.execute(step([new_request([*prompt, first], [5, 6, 7], computed=8)], scheduled={R: 1}))
    assert [first, result.outcomes[R][0].token_id] == expected_tokens(prompt, 2)

    absent = tuple(hash_prompt([99] * 4, 4, root_hash()))
    missing = settled(loading.start_load, loading, BlockTransfer(8, R, (5,), absent, 4))
    assert (missing.num_blocks_ok, missing.error) == (0, "block_missing")


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 1), *DEGREES])
def test_a_direct_save_writes_into_the_other_executor(of_producer, of_consumer):
    producer, consumer = (
        started(num_ranks, connector=DirectMemoryConnector(), num_kv_heads=4)
        for num_ranks in (of_producer, of_consumer)
    )
    writing, verifying = (executor.open_connector(lambda: None) for executor in (producer, consumer))
    assert writing.facts.address != verifying.facts.address
    prompt = list(range(8))
    hashes = tuple(hash_prompt(prompt, 4, root_hash()))
    save = BlockTransfer(1, R, (1, 2), hashes, 4, Destination(verifying.facts.address, (9, 5)))
    first = producer.execute(step([new_request(prompt, [1, 2])], scheduled={R: 8})).outcomes[R][0].token_id
    saved = settled(writing.connector.start_save, writing.connector, save)
    assert (saved.num_blocks_ok, len(saved.digests)) == (2, 2)

    def load(*digests):
        transfer = BlockTransfer(7, R, (9, 5), hashes, 4, digests=digests)
        loaded = settled(verifying.connector.start_load, verifying.connector, transfer)
        return loaded.num_blocks_ok, loaded.error

    assert load(*saved.digests) == (2, "")
    assert load(saved.digests[0], b"other") == (1, "block_corrupt")
    result = consumer.execute(step([new_request([*prompt, first], [9, 5, 7], computed=8)], scheduled={R: 1}))
    assert [first, result.outcomes[R][0].token_id] == expected_tokens(prompt, 2)

    consumer.close()
    refused = settled(writing.connector.start_save, writing.connector, save)
    assert (refused.num_blocks_ok, refused.error, refused.digests) == (0, "transfer", ())
    producer.close()


def test_no_rank_knows_the_next_token_alone():
    prompt = list(range(8))
    for rank in range(2):
        executor = started(2)
        executor.execute(step([new_request(prompt, [1, 2])], scheduled={R: 4}))
        executor._workers[rank]._worker._kv_cache[1, 0, 0, 0, 3] += 1
        token = executor.execute(step(scheduled={R: 4})).outcomes[R][0].token_id
        assert [token] != expected_tokens(prompt, 1)


def test_ranks_that_disagree_are_an_error():
    executor = started(2)
    executor.execute(step([new_request([1, 2], [1])], scheduled={R: 1}))
    executor._workers[1]._worker._requests[R].sampling = SamplingParams(seed=5)
    with pytest.raises(RuntimeError, match="answers differ"):
        executor.execute(step(scheduled={R: 1}))
