"""Real processes that find each other in a real registry: pods come and go, the router stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.e2e.cluster import ROOT
from tests.redis_server import running_redis

DEADLINE_S = 120.0


@contextmanager
def process(module: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process of ours, and what its `ready` line says."""
    command = [sys.executable, "-m", module, "--port", "0", "--log-level", "warning", *options]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        word, *facts = child.stdout.readline().split()
        assert word == "ready"
        yield child, dict(fact.split("=", 1) for fact in facts)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()


def ask(url: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object]]:
    """Status and body of an answer of the router."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def test_pods_join_serve_and_leave_while_the_router_stays() -> None:
    with running_redis() as redis:
        registry = ("--registry", redis.url, "--registry-namespace", "e2e")
        pod_options = ("--num-blocks", "256", "--connector", "none", *registry)
        with process("router", "--grpc-port", "0", *registry) as (router, facts):
            url = facts["http"]

            def states() -> dict[str, str]:
                pods = ask(f"{url}/health")[1]["pods"]
                assert isinstance(pods, list)
                return {pod["address"]: pod["state"] for pod in pods}

            def complete() -> object:
                status, answer = ask(
                    f"{url}/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
                )
                assert status == 200, answer
                choices = answer["choices"]
                assert isinstance(choices, list)
                return choices[0]["text"]

            assert ask(f"{url}/health")[0] == 503
            with process("decode_service", *pod_options) as (first, first_facts):
                wait_for(lambda: states() == {first_facts["address"]: "ready"})
                text = complete()
                first.send_signal(signal.SIGTERM)
                assert first.wait(DEADLINE_S) == 0
                wait_for(lambda: states() == {})
            with process("decode_service", *pod_options) as (_, second_facts):
                wait_for(lambda: states() == {second_facts["address"]: "ready"})
                assert complete() == text
            assert router.poll() is None
