"""The OpenAI-style API from a client's side: whole answers, and streams that it resumes after dropping a connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.e2e.clients.answers import NO_HEADERS, Answer, Choice, Position
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.specs import RequestSpec

EVENT_DEADLINE_S = 150.0  # no event within this time is a failure
_RESUMABLE_HEADER = "x-baton-resumable"
_RESUME_HEADER = "Last-Event-ID"
_MAX_RESUME_TRIES = 5  # while the router still takes the connection that was dropped for alive


class HttpFront:
    """One or more routers by their URLs; a request names them by number."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str], headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._client = client
        self._urls = urls
        self._headers = headers

    async def hear(self, spec: RequestSpec, answer: Answer, progress: Progress) -> None:
        """Sends the request and fills in the answer."""
        answer.choices = [Choice() for _ in range(spec.n)]
        try:
            if spec.stream:
                await self._hear_stream(spec, _Reader(answer, progress))
            else:
                await self._hear_whole(spec, _Reader(answer, progress))
        except httpx.HTTPError as error:
            answer.error = repr(error)

    async def _hear_whole(self, spec: RequestSpec, reader: _Reader) -> None:
        response = await self._client.post(self._url(spec, 0), json=spec.http_body(), headers=self._headers)
        if response.status_code == 200:
            reader.take(response.json())
        else:
            reader.fail(response.status_code, response.json()["error"])

    async def _hear_stream(self, spec: RequestSpec, reader: _Reader) -> None:
        """Over one connection after the other."""
        for connection, num_events in enumerate((*spec.resumes_after, None)):
            if await self._hear_part(spec, self._url(spec, connection), reader, num_events):
                return

    async def _hear_part(self, spec: RequestSpec, url: str, reader: _Reader, num_events: int | None) -> bool:
        """`num_events` at most, over one connection. True if the answer is complete, or ended with an error."""
        for _ in range(_MAX_RESUME_TRIES):
            headers = {**self._headers, _RESUMABLE_HEADER: "1" if spec.resumes_after else "0"}
            if reader.event_id:
                headers[_RESUME_HEADER] = reader.event_id
            async with self._client.stream("POST", url, json=spec.http_body(), headers=headers) as response:
                if response.status_code == 200:
                    return await reader.read(response, num_events)
                error = json.loads(await response.aread())["error"]
            if not (response.status_code == 503 and error["param"] == _RESUME_HEADER):
                break
        reader.fail(response.status_code, error)
        return True

    def _url(self, spec: RequestSpec, connection: int) -> str:
        return f"{self._urls[spec.routers[connection] % len(self._urls)]}{spec.path}"


class _Reader:
    """Puts one answer together, over any number of connections."""

    def __init__(self, answer: Answer, progress: Progress) -> None:
        self.event_id = ""  # of the last event that was read
        self._answer = answer
        self._progress = progress

    async def read(self, response: httpx.Response, num_events: int | None) -> bool:
        """Reads `num_events` at most. True if the answer is complete, or ended with an error."""
        num_read = 0
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                self.event_id = value
            if name != "data":
                continue
            if value == "[DONE]":
                return True
            event = json.loads(value)
            if "error" in event:
                self.fail(response.status_code, event["error"])
                return True
            self.take(event)
            self._progress.advance()
            num_read += 1
            if num_read == num_events:
                return False
        self._answer.error = "the stream ended without [DONE]"
        return True

    def take(self, body: dict[str, Any]) -> None:
        """A whole answer or an event."""
        for each in body["choices"]:
            choice = self._answer.choices[each["index"]]
            message = each.get("delta") or each.get("message") or {}
            choice.text += each["text"] if "text" in each else message["content"]
            choice.finish_reason = each["finish_reason"] or choice.finish_reason
            if each["logprobs"]:
                read = _chat_positions if message else _completion_positions
                choice.positions += read(each["logprobs"])
        if usage := body.get("usage"):
            self._answer.num_prompt_tokens = usage["prompt_tokens"]
            self._answer.num_tokens = usage["completion_tokens"]

    def fail(self, status: int, error: dict[str, Any]) -> None:
        """It ends with this error."""
        self._answer.error = f"status {status}: {error}"
        self._answer.is_unavailable = error["code"] == "unavailable"
        self._answer.is_overload = status == 429


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit of connections, each of which is used once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(EVENT_DEADLINE_S), trust_env=False) as client:
        yield client


def _completion_positions(logprobs: dict[str, Any]) -> list[Position]:
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    rows = zip(*columns, strict=True)
    return [Position(token, logprob, list(top.items()), offset) for token, logprob, top, offset in rows]


def _chat_positions(logprobs: dict[str, Any]) -> list[Position]:
    return [
        Position(_chat_token(each), each["logprob"], [_chat_entry(top) for top in each["top_logprobs"]])
        for each in logprobs["content"]
    ]


def _chat_entry(entry: dict[str, Any]) -> tuple[tuple[str, bytes], float]:
    return _chat_token(entry), entry["logprob"]


def _chat_token(entry: dict[str, Any]) -> tuple[str, bytes]:
    return entry["token"], bytes(entry["bytes"])
