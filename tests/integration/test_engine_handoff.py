"""A prompt prefilled in one engine and decoded in another: the tokens are right, whatever befalls the KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import StoreError
from common.types import BlockHash, FinishReason, RequestId, SamplingParams, hash_partial_block, hash_prompt, root_hash
from tests.integration.handoff_rig import (
    BLOCK_SIZE,
    CHUNK,
    Handoffs,
    check_integrity,
    create_engine,
    faulty_store,
    generate,
)
from tests.tiny_models import TINY_MODELS, prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 5)
MODEL = "llama"
PROMPT = prompt_of(3 * CHUNK + 5)  # six full blocks and a partial one


@pytest.fixture
def open_handoffs(tmp_path: Path) -> Iterator[Callable[..., Handoffs]]:
    """Makes pairs of engines on one directory; at the end all must be sound."""
    opened: list[Handoffs] = []

    def open_pair(
        model: str = MODEL,
        *,
        consumer_seed: int = 0,
        faulty: bool = False,
        consumer_blocks: int = 128,
        device: str = "cpu",
        **options: int,
    ) -> Handoffs:
        path = tmp_path / "kv"
        producer = create_engine(
            tiny_model_dir(model),
            path,
            faulty_name="producer" if faulty else "",
            device=device,
            options=options,
        )
        consumer = create_engine(
            tiny_model_dir(model, seed=consumer_seed),
            path,
            faulty_name="consumer" if faulty else "",
            num_blocks=consumer_blocks,
            device=device,
            options=options,
        )
        opened.append(Handoffs(producer, consumer))
        return opened[-1]

    yield open_pair
    for handoffs in opened:
        handoffs.check_integrity()
        handoffs.close()


def reference(prompt: list[int], model: str = MODEL, *, seed: int = 0) -> list[int]:
    return reference_generate(tiny_model_dir(model, seed=seed), prompt, MAX_TOKENS)


def block_files(tmp_path: Path, prompt: list[int]) -> list[Path]:
    """Files of the prompt's blocks, in order."""
    full = hash_prompt(prompt, BLOCK_SIZE, root_hash())
    hashes: list[BlockHash] = list(full)
    if len(prompt) % BLOCK_SIZE:
        hashes.append(hash_partial_block(prompt, BLOCK_SIZE, full, root_hash()))
    (namespace,) = (tmp_path / "kv").iterdir()
    return [namespace / key.hex()[:2] / f"{key.hex()}.kv" for key in hashes]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model", TINY_MODELS)
def test_tokens_equal_generate_and_colocated(open_handoffs, model, device):
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference(prompt, model) for prompt in prompts]
    handoffs = open_handoffs(model, device=device)

    decoded = handoffs.run(prompts, GREEDY)

    assert [request.token_ids for request in decoded] == expected
    for request, prompt in zip(decoded, prompts, strict=True):
        assert request.finish_reason is FinishReason.LENGTH
        assert request.received is not None
        assert (request.received.num_tokens, request.received.recompute_reason) == (len(prompt), "")
    assert handoffs.consumer.stats().num_prompt_tokens == 0  # nothing was computed twice
    with create_engine(tiny_model_dir(model), None) as colocated:
        assert generate(colocated, prompts, GREEDY) == expected
        check_integrity(colocated)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_length_alone(open_handoffs, length):
    prompt = prompt_of(length, seed=1)
    handoffs = open_handoffs()
    prefilled = handoffs.prefill("r", prompt, GREEDY)
    assert (prefilled.num_saved_tokens, prefilled.failure) == (length, "")
    decoded = handoffs.decode("r")
    assert decoded.token_ids == reference(prompt)
    assert decoded.received is not None
    assert decoded.received.num_tokens == length


def test_seeded_sampling_gives_the_same_tokens(open_handoffs):
    prompts = [prompt_of(length) for length in LENGTHS]
    sampling = SamplingParams(temperature=1.5, top_p=0.95, top_k=50, seed=1234, max_tokens=MAX_TOKENS)
    with create_engine(tiny_model_dir(MODEL), None) as colocated:
        expected = generate(colocated, prompts, sampling)
    assert expected != [reference(prompt) for prompt in prompts]
    assert [request.token_ids for request in open_handoffs().run(prompts, sampling)] == expected


def test_only_what_decode_lacks_is_loaded(open_handoffs):
    handoffs = open_handoffs()
    (first,) = handoffs.run([PROMPT], GREEDY)
    longer = PROMPT[: 4 * BLOCK_SIZE] + prompt_of(BLOCK_SIZE + 3, seed=2)
    (second,) = handoffs.run([longer], GREEDY)
    assert first.received is not None
    assert second.received is not None
    assert first.received.num_tokens == len(PROMPT)
    assert second.received.num_tokens == len(longer) - 4 * BLOCK_SIZE
    assert second.token_ids == reference(longer)


def test_blocks_in_the_store_survive_the_engines(open_handoffs):
    first = open_handoffs()
    first.prefill("r", PROMPT, GREEDY)
    second = open_handoffs()
    second.prefilled.update(first.prefilled)
    second._requests.update(first._requests)
    decoded = second.decode("r")
    assert decoded.token_ids == reference(PROMPT)
    assert second.consumer.stats().num_prompt_tokens == 0
    first.decode("r")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def swap_with_another_prompt(file: Path) -> None:
    other = next(candidate for candidate in file.parents[1].rglob("*.kv") if candidate != file)
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("block", [0, 3, 6])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "block_missing"),
        (flip_a_bit, "block_corrupt"),
        (cut, "block_corrupt"),
        (empty, "block_corrupt"),
        (swap_with_another_prompt, "block_corrupt"),
    ],
)
def test_damaged_block_is_recomputed_and_counted(open_handoffs, tmp_path, damage, reason, block):
    handoffs = open_handoffs()
    handoffs.prefill("r", PROMPT, GREEDY)
    damage(block_files(tmp_path, PROMPT)[block])

    decoded = handoffs.decode("r")

    assert decoded.token_ids == reference(PROMPT)
    assert decoded.received is not None
    assert decoded.received.recompute_reason == reason
    assert decoded.received.num_tokens == block * BLOCK_SIZE
    assert handoffs.consumer.stats().num_prompt_tokens == len(PROMPT) - block * BLOCK_SIZE


def test_everything_lost(open_handoffs, tmp_path):
    handoffs = open_handoffs()
    prompts = [prompt_of(length) for length in LENGTHS]
    for index, prompt in enumerate(prompts):
        handoffs.prefill(f"r{index}", prompt, GREEDY)
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    for index, prompt in enumerate(prompts):
        decoded = handoffs.decode(f"r{index}")
        assert decoded.token_ids == reference(prompt)
        assert decoded.received is not None
        assert decoded.received.recompute_reason == "block_missing"


def test_store_too_small_for_the_prompt(open_handoffs):
    frame_bytes = 192 + 3 * 2 * 2 * BLOCK_SIZE * 12 * 4
    handoffs = open_handoffs(max_bytes=3 * frame_bytes)
    (decoded,) = handoffs.run([PROMPT], GREEDY)
    assert decoded.token_ids == reference(PROMPT)


def test_another_model_never_gets_this_ones_kv(open_handoffs):
    handoffs = open_handoffs(consumer_seed=1)
    first = handoffs.prefill("r", PROMPT, GREEDY).first_token
    assert first is not None
    decoded = handoffs.decode("r")
    assert decoded.received is not None
    assert (decoded.received.num_tokens, decoded.received.recompute_reason) == (0, "block_missing")
    continued = reference_generate(tiny_model_dir(MODEL, seed=1), [*PROMPT, first.token_id], MAX_TOKENS - 1)
    assert decoded.token_ids == [first.token_id, *continued]


def test_a_store_that_takes_nothing(open_handoffs):
    handoffs = open_handoffs(faulty=True)
    faulty_store("producer").fail("write", StoreError("full"))
    (decoded,) = handoffs.run([PROMPT], GREEDY)
    assert handoffs.prefilled[RequestId("r0")].failure == "store_failed"
    assert decoded.token_ids == reference(PROMPT)
    assert decoded.received is not None
    assert (decoded.received.num_tokens, decoded.received.recompute_reason) == (0, "store_failed")


def test_consumer_aborted_with_loads_in_flight(open_handoffs):
    handoffs = open_handoffs(faulty=True)
    handoffs.prefill("r", PROMPT, GREEDY)
    with faulty_store("consumer").gate("read_into") as gate:
        handoffs.start_consumer(RequestId("r"))
        handoffs.step_consumer()
        gate.wait_for_arrival()
        assert handoffs.consumer.check_integrity().num_transfers == 1
        handoffs.consumer.abort_requests([RequestId("r")])
        while handoffs.consumer.has_unfinished:
            handoffs.step_consumer()
        assert handoffs.decoded[RequestId("r")].finish_reason is FinishReason.ABORT
        check_integrity(handoffs.consumer)
    assert generate(handoffs.consumer, [PROMPT], GREEDY) == [reference(PROMPT)]


def test_producer_aborted_with_saves_in_flight(open_handoffs):
    handoffs = open_handoffs(faulty=True)
    request_id = RequestId("r")
    with faulty_store("producer").gate("write") as gate:
        handoffs.start_producer(request_id, PROMPT, GREEDY)
        handoffs.start_consumer(request_id)
        while not handoffs.producer.stats().num_prompt_tokens:  # it first asks what the store keeps
            handoffs.step_producer()
        gate.wait_for_arrival()
        handoffs.producer.abort_requests([request_id])
        while handoffs.producer.has_unfinished:
            handoffs.step_producer()
        check_integrity(handoffs.producer)
    while handoffs.consumer.has_unfinished:
        handoffs.step_consumer()
    decoded = handoffs.decoded[request_id]
    assert decoded.token_ids == reference(PROMPT)
    assert decoded.received is not None
    assert (decoded.received.num_tokens, decoded.received.recompute_reason) == (0, "aborted")


def test_decode_short_of_blocks(open_handoffs):
    """Handoffs wait for blocks and decoding requests preempt each other; every token is still right."""
    prompts = [prompt_of(2 * BLOCK_SIZE + index, seed=3) for index in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    handoffs = open_handoffs(consumer_blocks=17)
    decoded = handoffs.run(prompts, sampling)
    expected = [reference_generate(tiny_model_dir(MODEL), prompt, 30) for prompt in prompts]
    assert [request.token_ids for request in decoded] == expected
