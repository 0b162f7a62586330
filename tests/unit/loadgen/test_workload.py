"""Data sets have the lengths, times and common beginnings that were asked for."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest
import tokenizers

from common.demo_model import __file__ as demo_model
from common.errors import BatonError, ConfigError
from loadgen.arrivals import arrival_times
from loadgen.endpoint import Prompt
from loadgen.prompts import WordSource, words_of_endpoint, words_of_tokenizer
from loadgen.samples import Failure, Sample
from loadgen.workload import LoadOptions, build_conversations

WEIGHTS = Path(demo_model).parent / "weights"
WORDS = words_of_tokenizer(WEIGHTS)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_between_arrivals_are_gamma_distributed_at_the_rate(burstiness: float) -> None:
    times = arrival_times(4000, 8.0, burstiness, seed=1)
    assert times[-1] == pytest.approx(500)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert times == arrival_times(4000, 8.0, burstiness, seed=1)
    assert times != arrival_times(4000, 8.0, burstiness, seed=2)


def test_prompts_have_exactly_their_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    options = LoadOptions(input_len=300, output_len=50, range_ratio=0.5, num_prompts=60)
    turns = [turn for each in build_conversations(options, WORDS) for turn in each.turns]
    lengths = [len(tokenizer.encode(turn.text, add_special_tokens=False).ids) for turn in turns]
    assert 150 <= min(lengths) < 200 < 400 < max(lengths) <= 450
    assert lengths == [len(turn.text.split()) for turn in turns]
    assert {25 <= (turn.num_output_tokens or 0) <= 75 for turn in turns} == {True}
    assert len({turn.text[:40] for turn in turns}) == 60
    exact = build_conversations(LoadOptions(input_len=300, num_prompts=1), WORDS)[0].turns[0].text
    assert len(tokenizer.encode(exact, add_special_tokens=False).ids) == 300


def test_prefixes_are_shared(tokenizer: tokenizers.Tokenizer) -> None:
    options = LoadOptions(dataset_name="shared-prefix", input_len=20, prefix_len=100, num_prefixes=3, num_prompts=40)
    texts = [each.turns[0].text.split() for each in build_conversations(options, WORDS)]
    assert {len(words) for words in texts} == {120}
    assert len({tuple(words[:100]) for words in texts}) == 3
    assert len({tuple(words[100:]) for words in texts}) == 40


def test_conversations_have_their_turns() -> None:
    options = LoadOptions(dataset_name="multi-turn", turns=4, think_time_s=2, num_prompts=10, request_rate="2")
    conversations = build_conversations(options, WORDS)
    assert [len(each.turns) for each in conversations] == [4, 4, 2]
    assert [turn.wait_s for turn in conversations[0].turns] == [0, 2, 2, 2]
    assert conversations[-1].start_s == pytest.approx(1.5)


def test_a_trace_keeps_lengths_times_and_common_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 9]},
        {"timestamp": 2000, "input_length": 40, "output_length": 5},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = LoadOptions(dataset_name="trace", dataset_path=str(trace))
    conversations = build_conversations(options, WORDS)
    assert [each.start_s for each in conversations] == [0, 1, 2]
    first, short, last = (each.turns[0] for each in conversations)
    assert [len(turn.text.split()) for turn in (first, short, last)] == [1030, 40, 1100]
    assert [turn.num_output_tokens for turn in (first, short, last)] == [10, 5, 20]
    assert first.text.split()[:1024] == last.text.split()[:1024]
    assert first.text.split()[1024:] != last.text.split()[1024:1030]
    stretched = build_conversations(LoadOptions(dataset_name="trace", dataset_path=str(trace), request_rate="4"), WORDS)
    assert [each.start_s for each in stretched] == pytest.approx([0, 0.25, 0.5])
    at_once = build_conversations(LoadOptions(dataset_name="trace", dataset_path=str(trace), request_rate="inf"), WORDS)
    assert {each.start_s for each in at_once} == {None}


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"prompt": "One", "output_len": 3}) + "\n\n" + json.dumps({"messages": chat}) + "\n")
    options = LoadOptions(dataset_name="file", dataset_path=str(file), output_len=9)
    one, two = (each.turns[0] for each in build_conversations(options, WORDS))
    assert (one.text, one.num_output_tokens) == ("One", 3)
    assert (list(two.messages), two.num_output_tokens) == (chat, 9)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("file", '{"prompt": "a"}\n{', "line 2: Input data was truncated"),
        ("file", "{}", "line 1: needs either prompt or messages"),
        ("file", "", "has no prompt"),
        ("trace", '{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: Expected int >= 1: input_length"),
        ("trace", "", "has no request"),
    ],
)
def test_a_bad_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_conversations(LoadOptions(dataset_name=name, dataset_path=str(file)), WORDS)  # type: ignore[arg-type]
    assert f"--dataset-path: {file}" in caught.value.message
    assert message in caught.value.message


class _Counting:
    """An endpoint with three tokens for a word, and ten for what stands around a prompt."""

    def __init__(self, failure: Failure | None = None) -> None:
        self._failure = failure

    async def ask(self, prompt: Prompt, num_output_tokens: int | None, sample: Sample) -> str:
        assert isinstance(prompt, str)
        assert num_output_tokens == 1
        sample.num_prompt_tokens = 10 + 3 * len(prompt.split())
        sample.failure = self._failure
        return ""

    def conversation(self, said: object, text: str) -> Prompt:
        raise NotImplementedError


async def test_the_endpoint_says_how_many_tokens_a_word_has() -> None:
    words = await words_of_endpoint(_Counting())
    assert words.tokens_per_word == pytest.approx(3)
    assert len(words.words_for(300, "key").split()) == 100
    with pytest.raises(BatonError, match=r"the first request failed \(status 404\): no such model"):
        await words_of_endpoint(_Counting(Failure("status 404", "no such model")))


def test_equal_keys_give_equal_words() -> None:
    source = WordSource(["a", "b", "c"])
    assert source.words_for(50, "x") == source.words_for(50, "x") != source.words_for(50, "y")
