"""The runner, driven by hand-built steps, equals transformers' greedy generate."""

import functools

import pytest

from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.contract.step import SchedulerOutput
from common.engine.devices.cpu import operators as cpu_operators
from common.engine.devices.cpu import packed_linear
from common.engine.devices.cpu.decode_programs import DecodePrograms
from common.engine.devices.decode_inputs import RecordedStepError
from common.engine.worker.worker import Worker
from common.types import SamplingParams
from tests.tiny_models import TINY_MODELS, prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir
from tests.unit.common.engine.worker.staged_worker import StagedWorker
from tests.unit.common.engine.worker.step_driver import BLOCK_SIZE, NUM_BLOCKS, Driver

SIDES = {
    "auto": {"device": "cpu"},
    "eager": {"device": "cpu", "enforce_eager": True},
    "reference": {"device": "cpu", "cpu_kernels": "reference"},
    "interpreted": {"device": "cpu"},  # Triton's kernels, on the CPU
    "stages": {"device": "cpu"},
    "stages-reference": {"device": "cpu", "cpu_kernels": "reference"},
    "int8": {"device": "cpu", "quantization": "int8"},
    "stages-int8": {"device": "cpu", "quantization": "int8"},
    "gpu": {"device": "cuda", "dtype": "float32"},
    "gpu-eager": {"device": "cuda", "dtype": "float32", "enforce_eager": True},
    "gpu-reference": {"device": "cuda", "dtype": "float32", "gpu_kernels": "reference"},
}
# Fused, with norms of heads; soft caps and windows; sinks; latents.
INTERPRETED = {"llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"}
SOME = {"eager": INTERPRETED, "interpreted": (), "stages": INTERPRETED, "stages-reference": {"llama", "phi3"}}


def sides_of(model):
    for side in SIDES:
        if "int8" not in side and model in SOME.get(side, TINY_MODELS):
            yield pytest.param((model, side), model, marks=[pytest.mark.gpu] * side.startswith("gpu"))


@functools.lru_cache(maxsize=2)
def worker_of(model, side="auto"):
    return start(tiny_model_dir(model), side)


def start(directory, side, num_stages=2):
    config = EngineConfig(
        model=ModelConfig(model=str(directory), num_threads=1, **SIDES[side]),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    worker = StagedWorker(config, num_stages, num_layers=3) if side.startswith("stages") else Worker(config)
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_MIN_WEIGHTS", "_MIN_WEIGHTS_FOR_ONE_TOKEN"):
            patch.setattr(packed_linear, limit, 0)  # these small layers are packed too, as those of real models are
        if side == "interpreted":
            patch.setenv("TRITON_INTERPRET", "1")
        worker.load_model()
        worker.initialize_kv_cache(NUM_BLOCKS)
    return worker


@pytest.fixture
def driver(request):
    driver = Driver(worker_of(*([request.param] if isinstance(request.param, str) else request.param)))
    yield driver
    driver.worker.execute(SchedulerOutput(dropped_request_ids=[*driver.computed]))


def reference(model, prompt, num_tokens):
    return reference_generate(tiny_model_dir(model), prompt, num_tokens)


@pytest.mark.parametrize(
    ("driver", "model"), [side for name in TINY_MODELS for side in sides_of(name)], indirect=["driver"]
)
def test_chunks_and_mixed_batches_equal_generate(driver, model):
    lengths = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 22]
    assert_generates(
        driver, model, lengths, chunks=(5, 1000)
    )  # all at once: decodes mix with chunks of the longest prompt


@pytest.mark.parametrize(
    ("driver", "model"),
    [
        pytest.param((model, "interpreted"), model, marks=[pytest.mark.kernels] * (model != "llama"))
        for model in sorted(INTERPRETED)
    ],
    indirect=["driver"],
)
def test_interpreted_kernels_equal_generate(driver, model):
    assert_generates(driver, model, [1, BLOCK_SIZE + 1, 22], chunks=(9,), num_tokens=4)


def assert_generates(driver, model, lengths, chunks, num_tokens=8):
    """Prompts of `lengths` tokens at once, by each chunk; then the last alone, over blocks that others used before."""
    prompts = {length: prompt_of(length) for length in lengths}
    expected = [reference(model, prompts[length], num_tokens) for length in lengths]

    for chunk in chunks:
        ids = [driver.add(f"{chunk}-{length}", prompts[length]) for length in lengths]
        assert driver.run(ids, num_tokens, chunk=chunk) == expected
        for request_id in ids:
            driver.drop(request_id)

    alone = driver.add("alone", prompts[lengths[-1]])
    assert driver.run([alone], num_tokens, chunk=BLOCK_SIZE) == [expected[-1]]


@pytest.mark.parametrize("driver", ["llama", "qwen3"], indirect=True)
def test_steps_in_parts_compute_the_same(driver, monkeypatch):
    expected = run_mixed(driver, "whole")
    monkeypatch.setattr(cpu_operators, "_ROWS", 4)
    monkeypatch.setattr(cpu_operators, "_MAX_ROWS", 6)
    assert run_mixed(driver, "parts") == expected


def run_mixed(driver, name):
    """Decodes beside chunks of prompts."""
    first = driver.add(f"{name}-0", prompt_of(3))
    driver.run([first], 2)
    ids = [first, *(driver.add(f"{name}-{length}", prompt_of(length)) for length in (1, 11, 23))]
    return driver.run(ids, 6, chunk=9)


@pytest.mark.parametrize("driver", ["llama"], indirect=True)
def test_arrivals_and_departures_do_not_disturb_running_requests(driver):
    first = driver.add("first", prompt_of(9))
    driver.run([first], 3)
    second = driver.add("second", prompt_of(30))
    driver.step({second: 7, first: 1})
    driver.step({first: 1, second: 23})
    driver.drop(first)
    third = driver.add("third", prompt_of(2))
    assert driver.run([second, third], 6) == [
        reference("llama", prompt_of(30), 6),
        reference("llama", prompt_of(2), 6),
    ]
    assert driver.outputs[first] == reference("llama", prompt_of(9), 5)


@pytest.mark.parametrize("driver", ["llama"], indirect=True)
def test_a_step_of_the_same_shape_may_be_of_another_request(driver):
    stays, goes = driver.add("stays", prompt_of(9)), driver.add("goes", prompt_of(7))
    driver.run([stays, goes], 3)
    driver.drop(goes)
    driver.outputs.pop(goes)
    again = driver.add("goes", prompt_of(1))  # under its id; one token each, as in the step before
    assert driver.run([stays, again], 6) == [
        reference("llama", prompt_of(9), 6),
        reference("llama", prompt_of(1), 6),
    ]


def test_a_recorded_step_that_fails_is_counted_and_computed_again(monkeypatch):
    worker = worker_of.__wrapped__("llama")
    driver = Driver(worker)

    def fail(_, inputs):
        blocks, offsets = inputs.attention.slot_mapping // BLOCK_SIZE, inputs.attention.slot_mapping % BLOCK_SIZE
        worker._kv_cache[blocks, :, :, :, offsets] = 100
        raise RecordedStepError("it computes something else")

    monkeypatch.setattr(DecodePrograms, "run", fail)
    assert worker.num_failed_recordings == 0
    assert driver.run([driver.add("a", prompt_of(9))], 8) == [reference("llama", prompt_of(9), 8)]
    assert worker.num_failed_recordings == 1


def test_decode_steps_of_stages_are_recorded_and_what_they_pass_on_stays(tmp_path):
    config = tiny_config("LlamaConfig", hidden_size=64, intermediate_size=128)  # as wide as kernels take them
    random_model(config).save_pretrained(tmp_path)
    driver = Driver(start(tmp_path, "stages", num_stages=3))
    prompts = [prompt_of(length) for length in (3, 9)]
    answers = driver.run([driver.add(f"{len(prompt)}", prompt) for prompt in prompts], 12)
    assert answers == [reference_generate(tmp_path, prompt, 12) for prompt in prompts]
    for worker in driver.worker.stages:
        assert (2, False, False) in worker._runner._recorded._steps
    assert driver.worker.num_failed_recordings == 0
    sent = [each for links in driver.worker.links for each in links.sent]
    assert sent
    assert all(hidden.equal(copy) for hidden, copy in sent)


@pytest.mark.parametrize("model", ["llama", "gemma2"])  # fused; with weights of the output layer that are tied
def test_stages_with_int8_weights_say_what_one_says(model):
    prompts = [prompt_of(length) for length in (1, 9, 22)]
    answers = []
    for side in ("int8", "stages-int8"):
        driver = Driver(worker_of.__wrapped__(model, side))
        answers.append(driver.run([driver.add(f"{len(prompt)}", prompt) for prompt in prompts], 12, chunk=5))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("driver", ["qwen3"], indirect=True)
def test_preempted_request_resumes_where_it_was(driver):
    prompt = prompt_of(10)
    request_id = driver.add("r", prompt)
    driver.run([request_id], 4)
    driver.drop(request_id)
    driver.add("r", prompt, output=driver.outputs[request_id])
    assert driver.run([request_id], 8) == [reference("qwen3", prompt, 8)]


@pytest.mark.parametrize("driver", ["llama", pytest.param(("llama", "gpu"), marks=pytest.mark.gpu)], indirect=True)
def test_seeded_sampling_does_not_depend_on_the_batch(driver):
    kinds = [{"top_p": 0.95}, {}, {"presence_penalty": 1.0}, {"temperature": 0.0}, {}]

    def sampled(names, chunk, driver=driver):
        ids = [
            driver.add(
                f"{name}-{chunk}-{len(names)}",
                prompt_of(5 + name),
                SamplingParams(**{"temperature": 1.3, "seed": name, **kinds[name]}),
            )
            for name in names
        ]
        outputs = driver.run(ids, 12, chunk=chunk)
        for request_id in ids:
            driver.drop(request_id)
        return outputs

    together = sampled(range(5), 1000)
    assert [sampled([name], 3)[0] for name in range(5)] == together
    assert sampled([1, 4], 1000) == [together[1], together[4]]
    assert sampled(range(5), 1000, Driver(worker_of("llama", "reference"))) == together
    assert len(set(map(tuple, together))) == 5


@pytest.mark.parametrize(
    "driver",
    [
        "llama",
        pytest.param(("llama", "interpreted"), marks=pytest.mark.kernels),
        pytest.param(("llama", "gpu"), marks=pytest.mark.gpu),
    ],
    indirect=True,
)
def test_garbage_of_an_earlier_owner_does_not_leak(driver):
    kv_cache = driver.worker._runner._kv_cache
    kv_cache[1:] = float("nan")
    ids = [driver.add("a", prompt_of(6)), driver.add("b", prompt_of(21))]
    outputs = driver.run(ids, 10, chunk=9)
    kv_cache.zero_()
    assert outputs == [reference("llama", prompt_of(6), 10), reference("llama", prompt_of(21), 10)]
