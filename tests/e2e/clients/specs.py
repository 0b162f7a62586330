"""Requests of every shape, drawn from a seed: what is asked for, through which API, and how the client behaves."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from common.pb import common_pb2, inference_pb2
from common.types import SamplingParams
from tests.e2e.reference import PROMPTS

MAX_TOKENS = 40
SEED_LIMIT = 2**64
SENTENCES = ["The sun is a star. ", "Rain falls on the hills. ", "Tom has a red boat. "]
ODD_TEXTS = ["Ünï¢ødé 日本語 🙂🙃", "\n\n\t", "x", "1 2 3 4 5 6 7 8 9", "<|im_end|>"]
STOP_TEXTS = [" the", "a", "e ", ". ", "ing", "s", " and", "\n", "Tom", "?", "is a", "never in an answer"]
COMMON_TOKENS = range(3, 400)  # of the demo model: characters and short words, so that some end an answer


class Api(enum.Enum):
    """The API that a request uses."""

    HTTP = "http"
    GRPC = "grpc"


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[Message, ...]  # text, token ids or a conversation


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """One request, and how its client behaves."""

    name: str  # tells requests of a run apart
    api: Api
    prompt: Prompt
    params: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    echo: bool = False
    skip_special_tokens: bool = True
    fails_without_kv: bool = False  # kv_failure_policy: fail
    stream: bool = True
    include_usage: bool = True
    leaves_after: int | None = None  # events of the whole run after which the client leaves and never comes back
    resumes_after: tuple[int, ...] = ()  # events after which it drops a connection and resumes its stream over another
    routers: tuple[int, ...] = (0,)  # which router each of its connections goes to

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a conversation."""
        return isinstance(self.prompt[0], Message)

    @property
    def is_told_usage(self) -> bool:
        """True if the answer ends with token counts."""
        return self.include_usage or not self.stream or self.api is Api.GRPC

    @property
    def choice_params(self) -> list[SamplingParams]:
        """Sampling parameters of each choice: seeds count up."""
        seed = self.params.seed
        return [
            self.params if seed is None else _with_seed(self.params, (seed + index) % SEED_LIMIT)
            for index in range(self.n)
        ]

    @property
    def path(self) -> str:
        """Path of the HTTP endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def http_body(self) -> dict[str, Any]:
        """The request as JSON."""
        params = self.params
        body: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": params.seed,
            "min_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "stop": list(self.stops),
            "n": self.n,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "skip_special_tokens": self.skip_special_tokens,
            "kv_failure_policy": self._kv_failure_policy,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": self.include_usage}
        if self.is_chat:
            asked = params.num_logprobs is not None
            messages = [message._asdict() for message in self.prompt]  # type: ignore[union-attr]
            return {**body, "messages": messages, "logprobs": asked, "top_logprobs": params.num_logprobs}
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return {**body, "prompt": prompt, "logprobs": params.num_logprobs, "echo": self.echo}

    def grpc_message(self) -> inference_pb2.GenerateRequest:
        """The request as a message; `echo` and `skip_special_tokens` are not part of that API."""
        params = self.params
        options = inference_pb2.GenerateOptions(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            stop=self.stops,
            ignore_eos=params.ignore_eos,
            num_logprobs=params.num_logprobs,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
        )
        message = inference_pb2.GenerateRequest(
            options=options, cache_salt=self.cache_salt, priority=self.priority, n=self.n
        )
        if self.fails_without_kv:
            message.kv_failure_policy = common_pb2.KV_FAILURE_POLICY_FAIL
        if isinstance(self.prompt, str):
            message.text = self.prompt
        elif self.is_chat:
            messages = [inference_pb2.ChatMessage(**each._asdict()) for each in self.prompt]  # type: ignore[union-attr]
            message.chat.messages.extend(messages)
        else:
            message.tokens.token_ids.extend(self.prompt)  # type: ignore[arg-type]
        return message

    @property
    def _kv_failure_policy(self) -> str | None:
        return "fail" if self.fails_without_kv else None


def random_spec(rng: random.Random, name: str) -> RequestSpec:
    """A request with everything drawn from `rng`."""
    api = rng.choice([Api.HTTP, Api.HTTP, Api.GRPC])
    prompt = _random_prompt(rng)
    params = _random_params(rng)
    is_http = api is Api.HTTP
    stream = rng.random() < 0.7
    leaves = rng.random() < 0.1
    num_resumes = rng.choice([0, 0, 0, 0, 1, 2, 3]) if is_http and stream else 0
    is_completion = not isinstance(prompt[0], Message)
    return RequestSpec(
        name=name,
        api=api,
        prompt=prompt,
        params=params,
        n=rng.choice([1, 1, 1, 2, 3]),
        stops=tuple(rng.sample(STOP_TEXTS, rng.choice([0, 0, 0, 1, 3]))),
        cache_salt=rng.choice(["", "", "a", "b"]),
        priority=rng.randint(-2, 2),
        echo=is_http and is_completion and params.num_logprobs is None and rng.random() < 0.15,
        skip_special_tokens=not is_http or rng.random() < 0.85,
        fails_without_kv=rng.random() < 0.04,
        stream=stream,
        include_usage=rng.random() < 0.8,
        leaves_after=rng.randint(1, 200) if leaves else None,
        resumes_after=tuple(rng.randint(1, 10) for _ in range(num_resumes)),
        routers=tuple(rng.choice([0, 0, 1]) for _ in range(1 + num_resumes)),
    )


def _random_prompt(rng: random.Random) -> Prompt:
    """A few tokens to some twenty blocks; many have their beginning in common."""
    shared = rng.choice(SENTENCES) * rng.choice([0, 0, 1, 4, 12, 40])
    own = f"{rng.randrange(1000)}. " if rng.random() < 0.7 else ""
    text = shared + own + rng.choice([*PROMPTS, *ODD_TEXTS])
    kind = rng.random()
    if kind < 0.2:
        return tuple(rng.choice(COMMON_TOKENS) for _ in range(rng.choice([1, 3, 16, 31, 32, 33, 150])))
    if kind < 0.5:
        turns = [Message("system", "Be brief.")] if rng.random() < 0.3 else []
        if rng.random() < 0.3:
            turns += [Message("user", "Hi!"), Message("assistant", "Hello. How are you?")]
        return (*turns, Message("user", text))
    return text


def _random_params(rng: random.Random) -> SamplingParams:
    """Anything within its range. A quarter of the requests is plain, as those of most clients are."""
    is_plain = rng.random() < 0.25

    def given(default: Any, *values: Any) -> Any:
        return rng.choice(values) if not is_plain and rng.random() < 0.4 else default

    temperature = rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5, 2.0])
    max_tokens = rng.choice([1, 2, rng.randint(3, MAX_TOKENS), rng.randint(3, MAX_TOKENS), MAX_TOKENS])
    return SamplingParams(
        temperature=temperature,
        top_k=given(0, 1, 2, 5, 40, 100_000),
        top_p=given(1.0, 0.05, 0.5, 0.9, 0.99),
        min_p=given(0.0, 0.01, 0.1, 1.0),
        seed=None if temperature == 0.0 and rng.random() < 0.5 else rng.choice([0, 7, rng.randrange(SEED_LIMIT)]),
        max_tokens=max_tokens,
        min_tokens=given(0, 1, rng.randint(0, max_tokens), max_tokens),
        stop_token_ids=tuple(rng.sample(COMMON_TOKENS, given(0, 1, 20, 100))),
        ignore_eos=rng.random() < 0.5,
        num_logprobs=given(None, 0, 1, 5, 20),
        presence_penalty=given(0.0, -2.0, -0.5, 0.5, 2.0),
        frequency_penalty=given(0.0, -2.0, -0.5, 0.5, 2.0),
        repetition_penalty=given(1.0, 0.1, 0.8, 1.2, 2.0),
    )


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)
