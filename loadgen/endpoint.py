"""An OpenAI endpoint under load: a prompt goes out, what arrives is noted in a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from common.errors import BatonError, UnreachableError
from loadgen.events import AnswerReader, error_in
from loadgen.http_client import HttpClient, RequestFailed
from loadgen.samples import Failure, Sample

Api = Literal["completions", "chat"]
Message = Mapping[str, Any]  # of a chat: role and content
Prompt = str | Sequence[Message]

_PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_LENGTHS: dict[Api, str] = {"completions": "max_tokens", "chat": "max_completion_tokens"}
_MODELS_TIMEOUT_S = 30.0
UNREACHED = frozenset({"connect", "tls", "timeout"})  # kinds of failures without an answer


class Endpoint(Protocol):
    """The receiver of the load, used on the event loop of the run."""

    async def ask(self, prompt: Prompt, num_output_tokens: int | None, sample: Sample) -> str:
        """Sends one request and fills the sample, also if it fails. Returns the answer's text."""

    def conversation(self, said: Sequence[tuple[str, str]], text: str) -> Prompt:
        """Returns the prompt of a turn that follows others, each with its answer."""


class OpenAIEndpoint:
    """A model behind /v1/completions or /v1/chat/completions. Answers are streamed."""

    def __init__(
        self, client: HttpClient, api: Api, model: str, *, timeout_s: float, extra_body: Mapping[str, Any]
    ) -> None:
        """`extra_body`: further fields of each request."""
        self.model = model
        self._client = client
        self._api: Api = api
        self._timeout_s = timeout_s
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra_body}

    @property
    def takes_messages(self) -> bool:
        """Whether prompts may be chats."""
        return self._api == "chat"

    async def ask(self, prompt: Prompt, num_output_tokens: int | None, sample: Sample) -> str:
        """Sends one request and fills the sample, also if it fails. Returns the answer's text."""
        body, reader = self._body(prompt, num_output_tokens), AnswerReader()
        sample.sent_s = self._client.clock()
        try:
            response = await self._client.request(
                "POST", _PATHS[self._api], body, timeout_s=self._timeout_s, on_body=reader.feed
            )
            if response.status != 200:
                raise RequestFailed(f"status {response.status}", error_in(response.body))
            if not reader.is_complete:
                raise RequestFailed("incomplete stream", "the stream ended without a finish_reason or [DONE]")
            if not reader.times:
                raise RequestFailed("no tokens", "the answer has no token")
        except RequestFailed as error:
            sample.failure = Failure(error.kind, error.message)
            return ""
        _note(reader, sample)
        return reader.text

    def conversation(self, said: Sequence[tuple[str, str]], text: str) -> Prompt:
        """Returns the prompt of a turn that follows others, each with its answer."""
        if self._api == "completions":
            return "\n".join([*(part for turn in said for part in turn), text])
        messages = [
            {"role": role, "content": content}
            for turn in said
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*messages, {"role": "user", "content": text}]

    def _body(self, prompt: Prompt, num_output_tokens: int | None) -> bytes:
        fields = dict(self._fixed)
        if self._api == "completions":
            fields["prompt"] = prompt
        else:
            fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if num_output_tokens is not None:
            fields[_LENGTHS[self._api]] = num_output_tokens
        return msgspec.json.encode(fields)


def _note(reader: AnswerReader, sample: Sample) -> None:
    usage = reader.usage
    sample.token_times = reader.times
    sample.has_usage = usage.completion_tokens is not None
    sample.num_output_tokens = len(reader.times) if usage.completion_tokens is None else usage.completion_tokens
    sample.num_prompt_tokens = usage.prompt_tokens or 0
    sample.num_accepted_drafts, sample.num_rejected_drafts = usage.num_accepted_drafts, usage.num_rejected_drafts


async def first_model(client: HttpClient) -> str:
    """Returns the first model that the endpoint serves. Raises UnreachableError or BatonError."""
    try:
        response = await client.request("GET", "/v1/models", timeout_s=_MODELS_TIMEOUT_S)
    except RequestFailed as error:
        raise (UnreachableError if error.kind in UNREACHED else BatonError)(error.message) from error
    if response.status != 200:
        raise BatonError(f"GET /v1/models: status {response.status}: {error_in(response.body)}; --model names a model")
    try:
        models = msgspec.json.decode(response.body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatonError(f"GET /v1/models: the answer is not valid: {error}; --model names a model") from error
    if not models:
        raise BatonError("the endpoint serves no model yet")
    return models[0].id


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]
