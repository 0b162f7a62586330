"""deploy/compose as a running project, and traffic through it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from baton import Client
from tests.compose.engine import Engine, run
from tests.compose.images import ROOT
from tests.e2e.reference import PROMPTS, greedy_completion

DIRECTORY = ROOT / "deploy/compose"
URL, GRPC_ADDRESS = "http://127.0.0.1:8000", "127.0.0.1:9000"
UP_DEADLINE_S = 600.0
SETTLE_DEADLINE_S = 300.0
MAX_TOKENS = 160
NUM_STREAMS = 3
_POLL_S = 0.25
_LONG = " ".join(PROMPTS)


class Project:
    """The project under one profile."""

    def __init__(self, engine: Engine, compose: Sequence[str], profile: str, env: dict[str, str]) -> None:
        self.engine = engine
        self.profile = profile
        self._compose = compose
        self._env = {**engine.env, "COMPOSE_PROFILES": profile, **env}
        suffix = "" if profile == "shared-storage" else f"-{profile}"
        self.prefill, self.decode = f"prefill{suffix}", f"decode{suffix}"

    def compose(self, *arguments: str, timeout_s: float = UP_DEADLINE_S) -> str:
        """Runs a command of Compose in the project's directory."""
        return run([*self._compose, *arguments], env=self._env, cwd=DIRECTORY, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str, template: str) -> str:
        """One fact of a container."""
        return self.engine.docker("inspect", "--format", template, container).strip()

    def pid(self, container: str) -> int:
        """Process id, on this machine, of the container's first process."""
        return int(self.inspect(container, "{{.State.Pid}}"))

    def wait_healthy(self, *services: str) -> None:
        """Returns once all containers of the services are healthy."""
        for service in services:
            wait(lambda name=service: self._are_healthy(name), f"{service} is healthy", self.logs)

    def _are_healthy(self, service: str) -> bool:
        found = self.containers(service)
        return bool(found) and all(self._is_healthy(each) for each in found)

    def _is_healthy(self, container: str) -> bool:
        answer = self.engine.docker("inspect", "--format", "{{.State.Health.Status}}", container, check=False)
        return answer.strip() == "healthy"

    def wait_pods(self, role: str, count: int) -> None:
        """Returns once the router has that many ready pods of a role, and no others."""

        def is_so() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                pods = [pod for pod in httpx.get(f"{URL}/health", timeout=5).json()["pods"] if pod["role"] == role]
                return len(pods) == count and all(pod["state"] == "ready" for pod in pods)
            return False

        wait(is_so, f"{count} {role} pods are ready", self.logs)

    def logs(self) -> str:
        """The last lines of all containers, and what the router says of its pods."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{URL}/health", timeout=5).text + self.compose("logs", "--tail", "40")
        return self.compose("logs", "--tail", "40")

    def query(self, expression: str) -> list[float]:
        """Values of a query in Prometheus."""
        answer = httpx.get("http://127.0.0.1:9090/api/v1/query", params={"query": expression}, timeout=10).json()
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]


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


def stream(prompt: str, on_piece: Callable[[], None] = lambda: None) -> str:
    """Streams a completion. Returns its text; raises if it does not end as it should."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces: list[str] = []
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=SETTLE_DEADLINE_S) as response:
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

    def __init__(self, known: Sequence[Prompt]) -> None:
        self._known = known
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
                text = self._over_grpc(prompt.text) if index == 0 else stream(prompt.text, self._count)
            except Exception as error:  # noqa: BLE001  any of them fails the test
                self.problems.append(f"{type(error).__name__}: {error}")
                return
            if text != prompt.answer:
                self.problems.append(f"{prompt.text[:40]!r}: expected {prompt.answer!r}, got {text!r}")
                return
            with self._lock:
                self.num_exact += 1

    def _over_grpc(self, prompt: str) -> str:
        pieces: list[str] = []
        with Client(GRPC_ADDRESS) as client:
            for piece in client.stream(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True):
                pieces.append(piece.text)
                self._count()
        return "".join(pieces)

    def _count(self) -> None:
        with self._lock:
            self.num_pieces += 1


def write_config(directory: Path) -> dict[str, str]:
    """Copies the project's settings so that every prompt is handed over. Returns the environment that names them."""
    for file in (DIRECTORY / "config").iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name == "router.yaml":
            text += "  remote_prefill: prefer\n"
        (directory / file.name).write_text(text, encoding="utf-8")
        (directory / file.name).chmod(0o644)
    directory.chmod(0o755)
    return {"BATON_CONFIG": str(directory), "BATON_THREADS": "1"}
