"""The attacker's requests: one entry for each attack, in the order of the table."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.neighbours.target import Target

COMPLETIONS, CHATS, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MAX_BODY_BYTES = 8 * 2**20
_MAX_VALUES = 8192  # in tables of tokens


class Request(NamedTuple):
    """One request."""

    path: str
    fields: Mapping[str, Any]  # of the body, without the model
    bytes_per_s: int = 0  # at which the body is sent; 0: as fast as it can be


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One row of the table."""

    sent: str  # for the reader
    request: Callable[[Target, int], Request]  # the request with this number
    at_once: int = 1
    total: int | None = None  # requests in all; None: another one for each that has ended
    leave_after_s: float | None = None  # the client closes the connection then


def _completion(**fields: Any) -> Request:
    defaults = {"prompt": "aaaa", "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "stream": True}
    return Request(COMPLETIONS, {**defaults, **fields})


def _chat(messages: Sequence[Mapping[str, Any]], **fields: Any) -> Request:
    return Request(CHATS, {"messages": messages, "max_tokens": 600, "stream": True, "ignore_eos": True, **fields})


def _biased(target: Target, text: str = "a") -> dict[str, Any]:
    """Lets the answer be this token again and again."""
    return {"logit_bias": {str(target.token_id(text)): 100}, "min_tokens": 300}


def _of_tokens(target: Target, texts: Sequence[str]) -> dict[str, Any]:
    """Draws the answer from the tokens of these texts."""
    token_ids = sorted({token_id for text in texts for token_id in target.encode(text)})
    return {"allowed_token_ids": token_ids, "temperature": 2, "max_tokens": 2000}


def _constrained(kind: str, text: str, *, is_biased: bool) -> Callable[[Target, int], Request]:
    def request(target: Target, _: int) -> Request:
        return _completion(structured_outputs={kind: text}, **(_biased(target) if is_biased else {}))

    return request


def _schema(number: int) -> dict[str, Any]:
    """A schema near the limits of size, of which no two are equal."""
    properties = {f"p{number}_{index}": {"type": "string", "maxLength": 20 + index % 50} for index in range(2000)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _tools(number: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8)}}
    function = {"description": "d" * 300, "parameters": parameters}
    return [{"type": "function", "function": {"name": f"f{number}_{i}", **function}} for i in range(512)]


def _words(target: Target, count: int, length: int) -> list[str]:
    """Texts that begin with as many `a` as fit and differ in their last token."""
    ends = [piece for piece in target.letters if piece != "a"]
    return [f"{'a' * (length - len(end))}{end}" for end in (ends * (1 + count // len(ends)))[:count]]


def _filling(context: int, text: str, chars_per_token: int) -> Callable[[Target, int], Request]:
    def request(target: Target, number: int) -> Request:
        prompt = f"{number}" + text * ((target.context - context) * chars_per_token)
        return _completion(prompt=prompt, max_tokens=4, truncate_prompt_tokens=-1)

    return request


def _long_prompt(target: Target, number: int, num_tokens: int) -> list[int]:
    return random.Random(number).choices(range(300, target.vocab_size), k=num_tokens)


_GRAMMARS: Mapping[str, tuple[str, str]] = {
    "EBNF of optionals": ("grammar", 'root ::= (("a"? "a"?){1,40}){1,40} "z"'),
    "regex of gaps": ("regex", "(.*a.{0,500}){4}z"),
    "regex of alternatives": ("regex", "((a|aa|aaa|a?a?a?)*)*z"),
}

ATTACKS: Mapping[str, Attack] = {
    **{
        f"{name}{', biased' * is_biased}, {at_once}": Attack(
            sent=f"`{text}`, {'`a` +100, min_tokens 300, ' * is_biased}{at_once} at once",
            request=_constrained(kind, text, is_biased=is_biased),
            at_once=at_once,
        )
        for name, (kind, text) in _GRAMMARS.items()
        for is_biased in (True, False)
        for at_once in (1, 10)
    },
    "slow regexes, client left": Attack(
        sent="250 of `(.{1,N}x){9}`, each with another N, by a client that leaves after 1 s",
        request=lambda _, number: _completion(structured_outputs={"regex": f"(.{{1,{200 + number}}}x){{9}}"}),
        at_once=250,
        total=250,
        leave_after_s=1.0,
    ),
    "large schemas": Attack(
        sent="JSON schemas of 2,000 bounded strings, 100 KB, each another one, 4 at once",
        request=lambda _, number: _completion(structured_outputs={"json": _schema(number)}),
        at_once=4,
    ),
    "new grammars": Attack(
        sent="small regexes, each another one, 16 at once, 8 tokens",
        request=lambda _, number: _completion(
            structured_outputs={"regex": f"[a-z]{{1,{number + 1}}}(yes|no)"}, max_tokens=8
        ),
        at_once=16,
    ),
    "many choices": Attack(
        sent="n=128 without anything else, 2 at once: the batch is full",
        request=lambda *_: _completion(n=128),
        at_once=2,
    ),
    "long contexts": Attack(
        sent="n=128 after a prompt of 3/4 of the context, 2 at once: the batch is full, and reads much KV",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context * 3 // 4), n=128, max_tokens=1000
        ),
        at_once=2,
    ),
    "drawn": Attack(
        sent="n=128 at temperature 2, top_p 0.999, top_k 1000, min_p 1e-6, 2 at once",
        request=lambda *_: _completion(n=128, temperature=2, top_p=0.999, top_k=1000, min_p=1e-6),
        at_once=2,
    ),
    "log probabilities": Attack(
        sent="n=128 with 20 log probabilities each, 2 at once",
        request=lambda *_: _completion(n=128, logprobs=20, max_tokens=190),  # as many as are allowed
        at_once=2,
    ),
    "log probabilities of prompts": Attack(
        sent="prompt_logprobs 20 of prompts that fill the context, 4 at once",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context - 8), prompt_logprobs=20, stream=False, max_tokens=1
        ),
        at_once=4,
    ),
    "biases": Attack(
        sent="n=128 with a bias for each token of the vocabulary, at most 8,192, 2 at once",
        request=lambda target, _: _completion(
            n=128, logit_bias={str(token_id): token_id % 7 for token_id in range(min(target.vocab_size, _MAX_VALUES))}
        ),
        at_once=2,
    ),
    "allowed tokens": Attack(
        sent="n=128 with all tokens but one allowed, at most 8,192, 2 at once",
        request=lambda target, _: _completion(
            n=128, allowed_token_ids=list(range(1, min(target.vocab_size, _MAX_VALUES)))
        ),
        at_once=2,
    ),
    "bad words": Attack(
        sent="n=32 with 128 bad words of 31 tokens, which the answer follows to the last one, 8 at once",
        request=lambda target, _: _completion(n=32, bad_words=_words(target, 128, 31), **_biased(target)),
        at_once=8,
    ),
    "penalties": Attack(
        sent="n=128 with three penalties after a prompt that half fills the context, 2 at once",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context // 2),
            n=128,
            max_tokens=1000,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.5,
        ),
        at_once=2,
    ),
    "stop texts": Attack(
        sent="n=128 with 16 stop texts of 1,024 characters, which the answer follows to the last one, 2 at once",
        request=lambda target, _: _completion(n=128, stop=_words(target, 16, 1024), **_biased(target)),
        at_once=2,
    ),
    "best of": Attack(
        sent="best_of 128, 2 at once",
        request=lambda *_: _completion(best_of=128, n=1, temperature=1, stream=False),
        at_once=2,
    ),
    "beam search": Attack(
        sent="16 beams after a prompt of 3/4 of the context, 4 at once",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context * 3 // 4),
            n=16,
            use_beam_search=True,
            stream=False,
            max_tokens=200,
        ),
        at_once=4,
    ),
    "many choices of long prompts": Attack(
        sent="n=128 after a prompt that fills the context, 4 at once",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context - 64), n=128, max_tokens=8
        ),
        at_once=4,
    ),
    "many long prompts": Attack(
        sent="bodies of as many prompts that fill the context as fit, 2 at once",
        request=lambda target, number: _completion(
            prompt=[
                _long_prompt(target, 64 * number + index, target.context - 8)
                for index in range(min(64, 260_000 // target.context))
            ],
            max_tokens=1,
        ),
        at_once=2,
    ),
    "prompts of one letter": Attack(
        sent="prompts of one letter that fill the context, 8 at once", request=_filling(16, "a", 8), at_once=8
    ),
    "prompts of white space": Attack(
        sent="prompts of spaces that fill the context, 8 at once", request=_filling(16, " ", 8), at_once=8
    ),
    "prompts of emoji": Attack(
        sent="prompts of emoji that fill the context, 8 at once", request=_filling(16, "\U0001f9d1\u200d", 1), at_once=8
    ),
    "huge prompts": Attack(
        sent="prompts of 7 MB, cut to the context, 4 at once",
        request=lambda *_: _completion(prompt="ab " * 2_400_000, max_tokens=1, truncate_prompt_tokens=-1),
        at_once=4,
    ),
    "huge texts to tokenize": Attack(
        sent="`/tokenize` of 7 MB, 4 at once",
        request=lambda *_: Request(TOKENIZE, {"prompt": "ab " * 2_400_000}),
        at_once=4,
    ),
    "many messages": Attack(
        sent="chats of 4,096 messages, 4 at once",
        request=lambda *_: _chat([{"role": "user", "content": "a"}] * 4096),
        at_once=4,
    ),
    "many parts": Attack(
        sent="a message of 8,000 parts, 4 at once",
        request=lambda *_: _chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 8000}]),
        at_once=4,
    ),
    "many tools": Attack(
        sent="512 tools of 400 KB, 4 at once",
        request=lambda _, number: _chat([{"role": "user", "content": "a"}], tools=_tools(number)),
        at_once=4,
    ),
    "tool calls": Attack(
        sent="n=16 chats whose answers are beginnings of tool calls, 4 at once",
        request=lambda target, number: _chat(
            [{"role": "user", "content": "a"}],
            tools=_tools(number)[:1],
            n=16,
            **_of_tokens(target, ["<tool_call>", "{", '"', "[", ":", "name", "arguments", "</tool_call>", "a"]),
        ),
        at_once=4,
    ),
    "reasoning": Attack(
        sent="n=16 chats whose answers are beginnings of reasoning, 4 at once",
        request=lambda target, _: _chat(
            [{"role": "user", "content": "a"}], n=16, **_of_tokens(target, ["<think>", "</think>", "<", "/", "th", " "])
        ),
        at_once=4,
    ),
    "slow bodies": Attack(
        sent="bodies of 8 MB at 2 KB/s, 64 at once",
        request=lambda *_: Request(COMPLETIONS, {"prompt": "a" * (MAX_BODY_BYTES - 1000)}, bytes_per_s=2048),
        at_once=64,
    ),
    "huge bodies": Attack(
        sent="bodies of 8 MB that are refused, 8 at once",
        request=lambda *_: Request(COMPLETIONS, {"prompt": "a", "suffix": "a" * (MAX_BODY_BYTES - 1000)}),
        at_once=8,
    ),
    "bodies of many values": Attack(
        sent="bodies of 260,000 numbers that are refused, 8 at once",
        request=lambda *_: Request(COMPLETIONS, {"prompt": list(range(260_000))}),
        at_once=8,
    ),
    "cancelled": Attack(
        sent="64 at once that leave after 50 ms",
        request=lambda *_: _completion(),
        at_once=64,
        leave_after_s=0.05,
    ),
    "cancelled choices": Attack(
        sent="n=128 after half a context that leave after 0.3 s, 4 at once",
        request=lambda target, number: _completion(
            prompt=_long_prompt(target, number, target.context // 2), n=128, max_tokens=1000
        ),
        at_once=4,
        leave_after_s=0.3,
    ),
    "short requests": Attack(
        sent="one token after a short prompt, 64 at once",
        request=lambda *_: _completion(max_tokens=1, stream=False),
        at_once=64,
    ),
}


def body_of(request: Request, target: Target) -> bytes:
    """The request's body."""
    return json.dumps({"model": target.model, **request.fields}).encode()
