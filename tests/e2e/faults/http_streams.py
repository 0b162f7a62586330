"""HTTP streams as a client of the OpenAI API reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from common.types import SamplingParams
from tests.e2e.faults.traffic import REQUEST_DEADLINE_S

LOGPROB_TOLERANCE = 2e-3  # sums are ordered otherwise in other batches


class HttpJob(NamedTuple):
    """One request, and what it must be answered with."""

    prompt: str
    params: SamplingParams
    text: str
    num_tokens: int
    logprobs: list[float]  # of the chosen tokens; empty: none asked for


class _Answer:
    def __init__(self) -> None:
        self.text = ""
        self.logprobs: list[float] = []
        self.finish_reason = ""
        self.num_tokens = 0

    def take(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]


async def failure_of(client: httpx.AsyncClient, url: str, job: HttpJob, on_news: Callable[[], None]) -> str:
    """Streams the job's answer; what is wrong with it, empty: nothing. `on_news` is called after each event."""
    answer = _Answer()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=_body(job)) as response:
            if response.status_code != 200:
                return f"status {response.status_code}: {await response.aread()!r}"
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    return f"after {answer.text!r}: {event['error']}"
                answer.take(event)
                on_news()
    except httpx.HTTPError as error:
        return f"after {answer.text!r}: {error!r}"
    return _difference(job, answer)


def _difference(job: HttpJob, answer: _Answer) -> str:
    if answer.text != job.text:
        return f"wrong text: {answer.text!r}, expected {job.text!r}"
    if answer.num_tokens != job.num_tokens or answer.finish_reason != "length":
        return f"{answer.num_tokens} tokens, ended by {answer.finish_reason!r}"
    if len(answer.logprobs) != len(job.logprobs):
        return f"{len(answer.logprobs)} logprobs of {len(job.logprobs)} tokens"
    worst = max((abs(one - other) for one, other in zip(answer.logprobs, job.logprobs, strict=True)), default=0.0)
    return f"a logprob is off by {worst}" if worst > LOGPROB_TOLERANCE else ""


def _body(job: HttpJob) -> dict[str, Any]:
    params = job.params
    return {
        "model": "baton-demo",
        "prompt": job.prompt,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "logprobs": 0 if job.logprobs else None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def timeout() -> httpx.Timeout:
    """No event within this time is a failure."""
    return httpx.Timeout(REQUEST_DEADLINE_S)
