"""Streams through the routers of a rehearsal, whose answers are compared with what they should be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx

PROMPTS = ("The capital of France is", "One, two, three,", "Once upon a time there was", "The quick brown fox")
_TIMEOUT_S = 60.0


def complete(url: str, prompt: str, max_tokens: int, key: str = "") -> str:
    """The text of a streamed completion. Raises AssertionError unless it is complete."""
    headers = {"x-api-key": key} if key else {}
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, ended = "", False
    with (
        httpx.Client(verify=False, timeout=_TIMEOUT_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    assert ended, f"cut off after {text!r}"
    return text


class Load:
    """Threads that stream one completion after the other, until the context ends. Failures are raised then."""

    def __init__(
        self, urls: Callable[[], list[str]], expected: dict[str, str], max_tokens: int, num_threads: int, key: str = ""
    ) -> None:
        self._urls = urls
        self._expected = expected
        self._max_tokens = max_tokens
        self._key = key
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,), name="load") for index in range(num_threads)]
        self._answered = threading.Semaphore(0)
        self.failures: list[str] = []
        self.num_answers = 0

    def wait_answers(self, count: int) -> None:
        """Returns after `count` more answers."""
        for _ in range(count):
            assert self._answered.acquire(timeout=_TIMEOUT_S), self.failures

    def _run(self, index: int) -> None:
        turn = index
        while not self._stopping.is_set():
            urls = self._urls()
            prompt = PROMPTS[turn % len(PROMPTS)]
            try:
                text = complete(urls[turn % len(urls)], prompt, self._max_tokens, self._key)
                assert text == self._expected[prompt], f"{text!r} instead of {self._expected[prompt]!r}"
            except (AssertionError, httpx.HTTPError, ZeroDivisionError) as error:
                self.failures.append(f"{prompt!r} at {urls}: {error!r}")
            self.num_answers += 1
            self._answered.release()
            turn += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
