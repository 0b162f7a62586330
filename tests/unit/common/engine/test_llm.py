from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.demo_model import demo_model_path
from common.engine.contract.step import ModelRunnerOutput, SchedulerOutput
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.llm import DEFAULT_MAX_TOKENS, LLM
from common.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
)
from common.tokenization import Tokenizer
from common.types import FinishReason, SamplingParams
from tests.unit.common.engine.fake_engines import FailingExecutor

VOCAB_SIZE = 2048  # of the demo model, whose tokenizer is used
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def fake_llm(**options: object) -> LLM:
    executor = FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE, max_model_len=512)
    return LLM(executor=executor, block_size=4, num_blocks=512, **options)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with fake_llm() as llm:
        yield llm
        report = llm.check_integrity()
        assert report.violations == []
        assert (report.num_requests, report.num_blocks_in_use) == (0, 0)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, vocab_size=VOCAB_SIZE)


def test_text_in_text_out(llm: LLM) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    (completion,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    prompt = tokenizer.encode("The capital of France is")
    assert completion.prompt == "The capital of France is"
    assert completion.prompt_token_ids == prompt
    assert completion.token_ids == answer(prompt, 8)
    assert completion.text == tokenizer.decode([*prompt, *completion.token_ids]).removeprefix(completion.prompt)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logprobs is None


def test_answers_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[n + 1] * (n + 1) for n in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=20 - n, num_logprobs=1) for n in range(20)]
    completions = llm.generate(prompts, params, use_tqdm=False)
    for n, completion in enumerate(completions):
        assert completion.prompt_token_ids == prompts[n]
        assert completion.token_ids == answer(prompts[n], 20 - n)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 20 - n
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].token_ids == answer([5, 6, 7], 8)


def test_more_prompts_than_the_queue_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_llm(max_num_waiting=3, max_num_seqs=2) as llm:
        completions = llm.generate([[n] for n in range(50)], SamplingParams(temperature=0.0, max_tokens=3))
    assert [completion.token_ids for completion in completions] == [answer([n], 3) for n in range(50)]
    progress = capsys.readouterr().err
    assert "50/50" in progress
    assert "tokens/s" in progress


def test_chat(llm: LLM) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    conversation = [{"role": "user", "content": "Hello!"}]
    (completion,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    prompt = tokenizer.encode(tokenizer.render_chat(conversation), add_special_tokens=False)
    assert completion.prompt_token_ids == prompt
    assert completion.token_ids == answer(prompt, 8)
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [each.token_ids for each in both] == [completion.token_ids] * 2


def test_stop_string_ends_the_generation(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    (whole,) = llm.generate("Once", params, use_tqdm=False)
    stop = whole.text[10:14]
    (stopped,) = llm.generate("Once", params, stop=stop, use_tqdm=False)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < 100
    (unstopped,) = llm.generate("Once", params, stop=["never said"], use_tqdm=False)
    assert unstopped.text == whole.text


def test_seed(llm: LLM) -> None:
    def sample(seed: int | None, count: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=8)  # type: ignore[arg-type]
        return [tuple(each.token_ids) for each in llm.generate([[1, 2]] * count, params, use_tqdm=False)]

    assert len(set(sample(None, 8))) == 8
    assert sample(7, 2) == sample(7, 1) * 2
    assert sample(7, 1) != sample(8, 1)


def test_default_parameters(llm: LLM, tmp_path: Path) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3, "max_new_tokens": 9}')
    with fake_llm(generation_config=tmp_path, override_generation_config={"top_k": 4}) as other:
        expected = SamplingParams(temperature=0.5, top_k=4, max_tokens=9)
        assert other.get_default_sampling_params() == expected
        assert len(other.generate([1], use_tqdm=False)[0].token_ids) == 9
    with pytest.raises(ConfigError, match="--generation-config"):
        fake_llm(generation_config=tmp_path / "nowhere")


def test_default_length(llm: LLM) -> None:
    assert len(llm.generate([1], use_tqdm=False)[0].token_ids) == DEFAULT_MAX_TOKENS
    assert len(llm.generate([1] * 500, use_tqdm=False)[0].token_ids) == 12  # what is left of the context


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ("", None, InvalidRequestError, "prompt"),
        ([VOCAB_SIZE], None, InvalidRequestError, "prompt"),
        ([1] * 512, None, PromptTooLongError, "prompt"),
        ([1] * 500, SamplingParams(max_tokens=13), PromptTooLongError, "prompt"),
        ("a", SamplingParams(temperature=3.0), InvalidRequestError, "temperature"),
        ("a", SamplingParams(stop_token_ids=(VOCAB_SIZE,)), InvalidRequestError, "stop_token_ids"),
        ("a", [GREEDY, GREEDY], InvalidRequestError, "params"),
    ],
)
def test_bad_input_starts_nothing(
    llm: LLM, prompt: object, params: object, error: type[InvalidRequestError], param: str
) -> None:
    with pytest.raises(error) as raised:
        llm.generate([prompt] if isinstance(prompt, list) else prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    assert raised.value.param == param
    assert llm._client.stats().num_prompt_tokens == 0


def test_empty_stop_string(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="stop"):
        llm.generate("a", stop="", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 1}, "max_num_seq is not an engine option; did you mean max_num_seqs?"),
        ({"block_size": 0}, "block_size: Expected `int` >= 1"),
        ({"dtype": "float8"}, "dtype: Invalid enum value 'float8'"),
        ({"num_blocks": "many"}, "num_blocks: Expected `int | null`, got `str`"),
    ],
)
def test_bad_option(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(executor=FakeExecutor(), **options)
    assert raised.value.message == message
    assert raised.value.param in options


def test_no_such_model() -> None:
    with pytest.raises(ModelLoadError, match="/nowhere"):
        LLM("/nowhere/at/all")


def test_model_without_tokenizer(tmp_path: Path) -> None:
    shutil.copy(demo_model_path() / "config.json", tmp_path)
    with LLM(tmp_path, executor=FakeExecutor(block_size=4), block_size=4) as llm:
        (completion,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert completion.token_ids == expected_tokens([1, 2, 3], 8)
        assert completion.text == ""
        for attempt in (lambda: llm.generate("text"), lambda: llm.generate([[1]], stop="x")):
            with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
                attempt()


class InterruptingExecutor(FakeExecutor):
    """Ctrl-C in the middle of the third step."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if len(self.steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().execute(step)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As in a terminal: a process started in the background of a shell script ignores SIGINT."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_usable_after_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    with LLM(executor=InterruptingExecutor(block_size=4, vocab_size=VOCAB_SIZE), block_size=4) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], SamplingParams(temperature=0.0, max_tokens=50), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is before
        report = llm.check_integrity()
        assert (report.violations, report.num_requests, report.num_blocks_in_use) == ([], 0, 0)
        assert llm.generate([[3]], GREEDY, use_tqdm=False)[0].token_ids == answer([3], 8)


def test_dead_engine() -> None:
    with LLM(executor=FailingExecutor(block_size=4, vocab_size=VOCAB_SIZE), block_size=4) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="out of device memory"):
                llm.generate("a", use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("a", use_tqdm=False)
