"""Traffic through a router, each answer compared with the exact one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import httpx

from baton import Client
from tests.e2e.reference import PROMPTS, greedy_completion

QUESTION = "The capital of France is"
SETTLE_DEADLINE_S = 300.0
MAX_TOKENS = 160
NUM_STREAMS = 3
_POLL_S = 0.25
_LONG = " ".join(PROMPTS)


class Front(NamedTuple):
    """Where a router serves."""

    url: str = "http://127.0.0.1:8000"
    grpc_address: str = "127.0.0.1:9000"

    def has_ready(self, role: str, count: int) -> bool:
        """Whether the router has that many ready pods of a role, and no others."""
        with contextlib.suppress(httpx.HTTPError):
            pods = [pod for pod in httpx.get(f"{self.url}/health", timeout=5).json()["pods"] if pod["role"] == role]
            return len(pods) == count and all(pod["state"] == "ready" for pod in pods)
        return False


LOCAL = Front()


def wait(is_so: Callable[[], bool], what: str, explain: Callable[[], str] = str) -> None:
    """Returns once `is_so`; fails with `what` and an explanation at the deadline."""
    deadline = time.monotonic() + SETTLE_DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {SETTLE_DEADLINE_S:g} s: {what}\n{explain()}"
        time.sleep(_POLL_S)


class Prompt(NamedTuple):
    """A prompt and its exact answer."""

    text: str
    answer: str


def prompts() -> list[Prompt]:
    """Prompts of a hundred tokens and their greedy continuations."""
    texts = [f"{opening} {_LONG}" for opening in PROMPTS[:4]]
    return [Prompt(text, greedy_completion(text, MAX_TOKENS, ignore_eos=True)) for text in texts]


def stream(prompt: str, on_piece: Callable[[], None] = lambda: None, front: Front = LOCAL) -> str:
    """Streams a completion. Returns its text; raises if it does not end as it should."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces: list[str] = []
    with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=SETTLE_DEADLINE_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return "".join(pieces)
            if line.startswith("data: "):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                on_piece()
    raise AssertionError(f"the stream ended early: {''.join(pieces)!r}")


class Traffic:
    """Streams that follow one another, over HTTP and gRPC, each compared with its exact answer."""

    def __init__(self, known: Sequence[Prompt], front: Front = LOCAL) -> None:
        self._known = known
        self._front = front
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.num_pieces = 0
        self.num_exact = 0
        self.problems: list[str] = []

    def wait_progress(self) -> None:
        """Returns once streams have moved on from where they are now, all of them on average."""
        seen = self.num_pieces
        wait(lambda: self.num_pieces >= seen + 20 * NUM_STREAMS or bool(self.problems), "streams move on")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Streams within the context; afterwards the last ones end, and all must have been exact."""
        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="traffic") as pool:
            loops = [pool.submit(self._run, index) for index in range(NUM_STREAMS)]
            try:
                self.wait_progress()
                yield
                self.wait_progress()
            finally:
                self._over.set()
        for each in loops:
            each.result()
        assert not self.problems, "\n".join(self.problems)

    def _run(self, index: int) -> None:
        turn = index
        while not self._over.is_set():
            prompt = self._known[turn % len(self._known)]
            turn += 1
            try:
                text = self._over_grpc(prompt.text) if index == 0 else self._over_http(prompt.text)
            except Exception as error:  # noqa: BLE001  any of them fails the test
                self.problems.append(f"{type(error).__name__}: {error}")
                return
            if text != prompt.answer:
                self.problems.append(f"{prompt.text[:40]!r}: expected {prompt.answer!r}, got {text!r}")
                return
            with self._lock:
                self.num_exact += 1

    def _over_http(self, prompt: str) -> str:
        return stream(prompt, self._count, self._front)

    def _over_grpc(self, prompt: str) -> str:
        pieces: list[str] = []
        with Client(self._front.grpc_address) as client:
            for piece in client.stream(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True):
                pieces.append(piece.text)
                self._count()
        return "".join(pieces)

    def _count(self) -> None:
        with self._lock:
            self.num_pieces += 1


def check_requests(known: Sequence[Prompt], front: Front = LOCAL) -> None:
    """HTTP and gRPC, whole answers and streams."""
    body = {"model": "baton-demo", "prompt": QUESTION, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["text"] == greedy_completion(QUESTION, 16)
    with Client(front.grpc_address) as client:
        assert client.generate(QUESTION, max_tokens=16, temperature=0).text == greedy_completion(QUESTION, 16)
    assert stream(known[0].text, front=front) == known[0].answer
