"""Servers under load over HTTP, in turn, with `baton bench serve` as the client of both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.checkpoints import Checkpoint
from benchmarks.compare.peers import python_of
from benchmarks.harness.checkouts import ROOT
from benchmarks.harness.figures import in_turn
from benchmarks.harness.processes import Child, ChildEndedError, free_port

_READY_S, _RUN_S, _POLL_S = 600.0, 900.0, 0.5
_CLI = ["-m", "cli.main"]
_FIGURES = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms")


class Load(NamedTuple):
    """The clients' load: so many streams at once, and beside them, perhaps, long prompts every so often."""

    name: str
    pods: str  # of Baton: prefill and decode
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    long_prompt_tokens: int = 0
    long_prompts_per_s: float = 0.0
    options: tuple[str, ...] = ()  # of `baton up`


LOADS = (
    Load("colocated, 1 stream 512/64", "0:1", 1, 6, 512, 64),
    Load("colocated, 8 streams 512/64", "0:1", 8, 24, 512, 64),
    Load("the same, `target_itl_ms` 50", "0:1", 8, 24, 512, 64, options=("--target-itl-ms", "50")),
    Load("the same, `target_itl_ms` none", "0:1", 8, 24, 512, 64, options=("--target-itl-ms", "none")),
    Load("1P1D, 8 streams 128/128 beside 2,048 tokens every 2 s", "1:1", 8, 32, 128, 128, 2048, 0.5),
)


class ServingRow(NamedTuple):
    """One load on one model."""

    model: str
    precision: str
    load: str
    figures: dict[str, list[dict[str, float]]]  # by side, one for each repeat


class Server(Child):
    """A server in processes of its own; its URL once it is ready. Raises ChildEndedError."""

    def __init__(self, name: str, checkpoint: Checkpoint, load: Load, log: Path) -> None:
        port = free_port()
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        python = python_of(name)
        assert python is not None
        command = _command(name, checkpoint, load, port)
        with log.open("w") as sink:
            super().__init__(
                *command,
                python=python.path,
                variables=python.variables,
                directory=ROOT,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait(log)
        except ChildEndedError:
            self.__exit__()
            raise

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and not self.has_ended:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:  # noqa: S310
                    if any(model.get("max_model_len") for model in json.load(answer)["data"]):
                        return  # Baton's router knows it from a pod that is ready
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(_POLL_S)
        raise ChildEndedError(f"{self.name} was not ready:\n{log.read_text(errors='replace')[-2000:]}")


def measure_serving(
    model: str,
    precision: str,
    checkpoints: Mapping[str, Checkpoint],
    loads: Sequence[Load],
    repeats: int,
    logs: Path,
) -> Iterator[ServingRow]:
    """All loads; servers of one load run side by side and take turns. Raises ChildEndedError."""
    for load in loads:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(Server(name, checkpoint, load, logs / f"serve-{name}.log"))
                for name, checkpoint in checkpoints.items()
            ]
            figures: dict[str, list[dict[str, float]]] = {name: [] for name in checkpoints}
            for repeat in range(repeats):
                for server in in_turn(servers, repeat):
                    directory = checkpoints[server.name].directory
                    figures[server.name].append(_run(load, server.url, directory, repeat, logs))
        yield ServingRow(model, precision, load.name, figures)


def _run(load: Load, url: str, directory: Path, seed: int, logs: Path) -> dict[str, float]:
    results = logs / "bench.json"
    streams = _bench(url, directory, load.prompt_tokens, load.output_tokens, load.requests, seed)
    streams += ["--max-concurrency", str(load.streams), "--num-warmups", "2", "--json", str(results)]
    with ExitStack() as stack:
        if load.long_prompts_per_s:
            long = _bench(url, directory, load.long_prompt_tokens, 1, 10_000, seed + 1)
            long += ["--request-rate", str(load.long_prompts_per_s), "--burstiness", "1e6"]
            stack.enter_context(Child(*long, directory=ROOT, log=logs / "beside.log", stdout=subprocess.DEVNULL))
        done = subprocess.run(
            [sys.executable, *streams], capture_output=True, text=True, check=False, timeout=_RUN_S, cwd=ROOT
        )
    if done.returncode:
        raise ChildEndedError(f"{' '.join(streams)}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(results.read_text())
    return {name: float(found[name]) for name in _FIGURES}


def _bench(url: str, directory: Path, prompt_tokens: int, output_tokens: int, requests: int, seed: int) -> list[str]:
    return [
        *_CLI, "bench", "serve", "--url", url, "--tokenizer", str(directory), "--ignore-eos", "--seed", str(seed),
        "--input-len", str(prompt_tokens), "--output-len", str(output_tokens), "--num-prompts", str(requests),
    ]  # fmt: skip


def _command(name: str, checkpoint: Checkpoint, load: Load, port: int) -> list[str]:
    directory, dtype, quantization = checkpoint
    if name == "baton":
        prefill, _, decode = load.pods.partition(":")
        return [
            *_CLI, "up", str(directory), "--dtype", dtype, "--prefill", prefill, "--decode", decode,
            "--port", str(port), "--grpc-port", "0", "--log-level", "warning", *load.options,
            *(["--quantization", quantization] if quantization else []),
        ]  # fmt: skip
    return [
        "-m", "vllm.entrypoints.cli.main", "serve", str(directory), "--dtype", dtype,
        "--max-model-len", "4096", "--port", str(port), "--host", "127.0.0.1",
    ]  # fmt: skip
