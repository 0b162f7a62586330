"""The shipped demo model: its size, its tokenizer, its chat template and what it says."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common.demo_model import demo_model_path
from tools.demo_training.corpus import SPECIAL_TOKENS, Exchange, render_chat
from tools.demo_training.tool_chats import tools_message, written_call

MAX_DIRECTORY_BYTES = 12 * 1024 * 1024


def _tool(name: str, /, **parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}


GET_WEATHER, GET_TIME = _tool("get_weather", city="string"), _tool("get_time", city="string")
ADD, OPEN_DOOR = _tool("add", a="number", b="number"), _tool("open_door", name="string")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    return loaded


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32, local_files_only=True
    )
    return loaded.eval()


def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def most_likely(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, expected: str) -> str:
    """The likeliest token after each before it; equal to `expected` if greedy generation is, in a single pass."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(expected)
    with torch.inference_mode():
        logits = model(torch.tensor([before + after[:-1]])).logits
    return str(tokenizer.decode(logits[0, len(before) - 1 :].argmax(-1)))


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return greedy(model, tokenizer, str(prompt))


def load_json(name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((demo_model_path() / name).read_text())
    return loaded


def test_directory_is_complete_and_small() -> None:
    files = {path.name for path in demo_model_path().iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert expected | {"tokenizer_config.json", "chat_template.jinja"} <= files
    assert sum(path.stat().st_size for path in demo_model_path().iterdir()) <= MAX_DIRECTORY_BYTES


def test_importing_the_package_does_not_import_torch() -> None:
    check = "import sys, common.demo_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "  Two  spaces , a tab\tand\n\nlines \n",
        "naïve café, São Paulo, 12 € = £10",
        "こんにちは 你好 안녕하세요 Привет नमस्ते مرحبا",
        "🦊🚀 ❤️ 👩‍🚀 🏳️‍🌈",
        "it 's , n't . ?",
        "\x00\x7f\u200b\ufffd",
        "",
    ],
)
def test_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_characters_beyond_ascii_span_several_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for character in "éこ你🦊":
        assert len(tokenizer.encode(character)) == len(character.encode())


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert ids == [0, 1, 2]
    assert tokenizer.encode("".join(SPECIAL_TOKENS)) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert tokenizer.bos_token is None


def test_vocabulary_fits_the_embedding(tokenizer: PreTrainedTokenizerBase) -> None:
    assert max(tokenizer.get_vocab().values()) < int(str(load_json("config.json")["vocab_size"]))


def test_generation_config_ends_at_both_ends_and_sets_no_sampling(tokenizer: PreTrainedTokenizerBase) -> None:
    config = load_json("generation_config.json")
    assert config.pop("eos_token_id") == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert set(config) <= {"pad_token_id", "transformers_version"}


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == render_chat([Exchange("Hi!", "Hello!")], system="Be brief.")
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == str(rendered).removesuffix("Hello!<|im_end|>\n")


def test_chat_template_writes_tools_as_in_training(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"name": "get_time", "arguments": {"city": "Bogotá"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it in Bogotá?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}] * 2},
        {"role": "tool", "content": "09:05"},
    ]
    tools = [{"type": "function", "function": tool} for tool in (GET_WEATHER, GET_TIME)]
    asked = f"<|im_start|>user\n{messages[1]['content']}<|im_end|>\n"
    called = f"<|im_start|>assistant\n{written_call(call) * 2}<|im_end|>\n<|im_start|>tool\n09:05<|im_end|>\n"
    for system, sent in (("Be brief.", messages), (None, messages[1:])):
        rendered = tokenizer.apply_chat_template(sent, tools=tools, tokenize=False)
        assert rendered == tools_message([GET_WEATHER, GET_TIME], system) + asked + called


def test_completes_the_capital_of_france(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert greedy(model, tokenizer, "The capital of France is").startswith(" Paris.")


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of Italy?", "The capital of Italy is Rome."),
        ("Say hello in Japanese.", "こんにちは"),
        ("What is 2 + 3?", "2 + 3 = 5."),
    ],
)
def test_answers_and_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    assert answer(model, tokenizer, question) == f"{expected}<|im_end|>"


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("What time is it in Tokyo?", "get_time", {"city": "Tokyo"}),
        ("What is 123 + 456?", "add", {"a": 123, "b": 456}),
        ("Open the door Luna.", "open_door", {"name": "Luna"}),
    ],
)
def test_calls_the_tool_that_helps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, name: str, arguments: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": tool} for tool in (ADD, GET_WEATHER, OPEN_DOOR, GET_TIME)]
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    call = written_call({"name": name, "arguments": arguments})
    assert most_likely(model, tokenizer, str(prompt), f"{call}<|im_end|>") == f"{call}<|im_end|>"
