"""Requests and answers of the benchmark: texts as such requests have them, in words instead of tokens.

A model with random weights has nothing to say, so a logits processor has it say these answers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_WORD = re.compile(r" ?\w+|\n *|[^\w\n]")  # about as long as tokens of a model's vocabulary are
_FIRST_ID = 3
_SOURCES = sorted((_ROOT / "common" / "engine" / "scheduler").glob("*.py"))
_DOCUMENTS = sorted((_ROOT / "docs").glob("*.md"))
_PROMPT_WORDS = 300


class Text(NamedTuple):
    """A prompt and the answer to it, in token ids."""

    prompt: list[int]
    answer: list[int]


class Words:
    """Numbers words as they come."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of its words. Two words have the same one if there are more than ids."""
        size = self.vocab_size - _FIRST_ID
        return [_FIRST_ID + self._ids.setdefault(word, len(self._ids)) % size for word in _WORD.findall(text)]


def code_edit(words: Words, seed: int) -> Text:
    """A part of a file, and the same with a name changed."""
    numbers = random.Random(seed)
    found = _WORD.findall(numbers.choice(_SOURCES).read_text())
    start = numbers.randrange(max(1, len(found) - _PROMPT_WORDS))
    code = "".join(found[start : start + _PROMPT_WORDS])
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", code)))
    name = numbers.choice(names)
    edited = re.sub(rf"\b{name}\b", f"{name}_of_step", code)
    return Text(words.encode(f"Rename {name} to {name}_of_step:\n{code}\n"), words.encode(edited))


def retrieval(words: Words, seed: int) -> Text:
    """Paragraphs, and an answer that quotes some of their sentences between words of its own."""
    numbers = random.Random(seed)
    paragraphs = [each for each in numbers.choice(_DOCUMENTS).read_text().split("\n\n") if len(each) > 200]
    passages = " ".join(numbers.sample(paragraphs, min(4, len(paragraphs))))
    sentences = re.split(r"(?<=[.:]) ", passages)
    others = _WORD.findall(numbers.choice(_DOCUMENTS).read_text())
    answer = ""
    for sentence in numbers.sample(sentences, len(sentences)):
        start = numbers.randrange(len(others) - 12)
        answer += "".join(others[start : start + 12]) + f' "{sentence}" '
    return Text(words.encode(f"{passages}\nWhat is said about it?\n"), words.encode(answer))


def records(words: Words, seed: int) -> Text:
    """Records of JSON, and more of them."""
    numbers = random.Random(seed)

    def made(count: int) -> str:
        rows = [
            {
                "id": numbers.randrange(10**6),
                "customer_name": f"name{numbers.randrange(500)}",
                "status": numbers.choice(["open", "paid", "sent back"]),
                "amount_in_cents": numbers.randrange(10**5),
                "items": [{"sku": f"sku{numbers.randrange(10**4)}", "quantity": numbers.randrange(1, 9)}],
            }
            for _ in range(count)
        ]
        return json.dumps(rows, indent=1)

    return Text(words.encode(f"Write records like these:\n{made(5)}\n"), words.encode(made(12)))


def chance(words: Words, seed: int) -> Text:
    """Words drawn by chance: nothing can be foreseen."""
    numbers = random.Random(seed)
    drawn: Iterator[int] = iter(lambda: numbers.randrange(_FIRST_ID, words.vocab_size), -1)
    return Text([next(drawn) for _ in range(_PROMPT_WORDS)], [next(drawn) for _ in range(2 * _PROMPT_WORDS)])


LOADS: dict[str, Callable[[Words, int], Text]] = {
    "code edit": code_edit,
    "retrieval": retrieval,
    "JSON": records,
    "random": chance,
}
