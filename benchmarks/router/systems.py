"""The routers, each with what stands behind it: one prefill and one decode side, processes of their own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.checkouts import HERE, Checkout
from benchmarks.harness.processes import Child, ChildEndedError, free_port
from benchmarks.router.pace import IDLE
from benchmarks.router.workload import ANSWER, MODEL

_START_S = 300.0  # under a program that counts instructions
_POLL_S = 0.05
_MAX_STREAMS = 4096
OURS = "baton"
RIVAL = "sglang-router"
NO_ROUTER = "no router"


@dataclass(frozen=True, slots=True)
class System:
    """One that runs."""

    name: str
    version: str
    address: str  # of the router
    router: Child
    prefill: str  # address
    decode: str
    decode_side: Child
    grpc_address: str = ""  # of ours

    def set_pace(self, word: str) -> None:
        """See Pace.set."""
        self.decode_side.tell(word)

    def wait_until_idle(self) -> None:
        """Returns when our pods have heard of all requests that clients gave up: as each step of very many requests
        takes long, a pod that steps hears of few. Backends notice it themselves."""
        if self.name == OURS:
            self.decode_side.tell(IDLE)

    def ask_directly(self, load: Child, concurrency: int, count: int) -> Any:
        """One-token answers past the router."""
        if self.name == RIVAL:
            return load.ask("answers", self.decode, concurrency, count)
        return load.ask("pods", self.prefill, self.decode, concurrency, count)


@contextmanager
def baton(
    *, checkout: Checkout = HERE, options: Sequence[str] = (), answer: str = ANSWER, under: Sequence[str] = ()
) -> Iterator[System]:
    """A router of ours, of this checkout, between fake pods that give this answer. `options`: more of its options.
    `under`: see Child. Raises ChildEndedError if it does not start."""
    with ExitStack() as stack:
        sides = [
            stack.enter_context(Child("-m", "benchmarks.router.pods", role, answer)) for role in ("prefill", "decode")
        ]
        prefill, decode = (side.read_line() for side in sides)
        # The knobs of the benchmark, and none for speed: these are the defaults.
        settings = ["--prefill", prefill, "--decode", decode, "--port", "0", "--grpc-port", "0"]
        settings += ["--served-model-name", MODEL, "--remote-prefill", "prefer", "--max-inflight", str(_MAX_STREAMS)]
        command = ("-m", "router", *settings, "--log-level", "warning", *options)
        router = stack.enter_context(
            Child(*command, variables=checkout.variables, directory=checkout.root, under=under)
        )
        words = router.read_ready()
        address = words["http"].removeprefix("http://")
        _wait_until_healthy(address, router)
        version = importlib.metadata.version("baton-llm")
        yield System(OURS, version, address, router, prefill, decode, sides[1], words["grpc"])


@contextmanager
def sglang_router() -> Iterator[System]:
    """The rival between trivial backends. Raises ImportError if it is not installed."""
    version = rival_version()
    if version is None:
        raise ImportError(f"{RIVAL} is not installed")
    with ExitStack() as stack:
        sides = [stack.enter_context(Child("-m", "benchmarks.router.backends", role)) for role in ("prefill", "decode")]
        prefill, decode = (side.read_line() for side in sides)
        port, metrics_port = free_port(), free_port()
        options = ["--pd-disaggregation", "--prefill", f"http://{prefill}", "none", "--decode", f"http://{decode}"]
        options += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        options += ["--prometheus-port", str(metrics_port), "--max-concurrent-requests", str(_MAX_STREAMS)]
        router = stack.enter_context(Child("-m", "sglang_router.launch_router", *options, stdout=subprocess.DEVNULL))
        address = f"127.0.0.1:{port}"
        _wait_until_healthy(address, router, path="/readiness")
        yield System(RIVAL, version, address, router, prefill, decode, sides[1])


@contextmanager
def no_router() -> Iterator[System]:
    """One of the rival's backends alone, in place of a router: it does nothing but send events."""
    with Child("-m", "benchmarks.router.backends", "decode") as side:
        address = side.read_line()
        yield System(NO_ROUTER, importlib.metadata.version("uvloop"), address, side, address, address, side)


def rival_version() -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(RIVAL)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wait_until_healthy(address: str, router: Child, path: str = "/health") -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if router.has_ended:
            raise ChildEndedError("the router has ended before it was ready")
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=_START_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise TimeoutError(f"http://{address}{path} did not answer 200 within {_START_S:g} s")
