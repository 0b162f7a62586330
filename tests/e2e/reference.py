"""What `transformers` answers: the measure of every greedy answer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.demo_model import demo_model_path

DEMO_MODEL = demo_model_path()
PROMPTS = [
    "The capital of France is",
    "The capital of Italy is",
    "Once upon a time",
    "Two plus two is",
    "The sun",
    "A dog and a cat",
    "The capital of Japan is Tokyo. The capital of Spain is",
    "Question: what colour is the sky? Answer:",
    "One, two, three, four,",
    "My friend said that the weather in the mountains was so cold that nobody wanted to leave the house, and",
]


@functools.cache
def _model(directory: Path = DEMO_MODEL) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)  # of all
    return tokenizer, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@functools.cache
def greedy_completion(prompt: str, max_tokens: int, *, ignore_eos: bool = False, directory: Path = DEMO_MODEL) -> str:
    """The greedy continuation of `prompt`, special tokens left out, by the demo model or one made of it."""
    tokenizer, _ = _model()
    return _greedy(tokenizer(prompt, return_tensors="pt")["input_ids"], max_tokens, ignore_eos, directory)


@functools.cache
def greedy_chat(message: str, max_tokens: int, *later: str) -> str:
    """The greedy answer to one user message, or to the last of `later`: answers and further messages in turn."""
    tokenizer, _ = _model()
    turns = [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate((message, *later))
    ]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return _greedy(inputs["input_ids"], max_tokens, ignore_eos=False)


def _greedy(prompt_ids: torch.Tensor, max_tokens: int, ignore_eos: bool, directory: Path = DEMO_MODEL) -> str:
    tokenizer, model = _model(directory)
    never = torch.iinfo(torch.int64).max
    eos = never if ignore_eos else model.generation_config.eos_token_id
    with torch.inference_mode():
        output = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return str(tokenizer.decode(output[0, prompt_ids.shape[1] :], skip_special_tokens=True))
