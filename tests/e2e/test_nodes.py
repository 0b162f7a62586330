"""A pod over two machines, which are processes of this one, beside a pod of one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from common.demo_model import DEMO_MODEL_NAME
from deploy.certificates import make_certificates
from tests.e2e.reference import greedy_completion
from tests.unit.common.engine.executor.multiproc.nodes_rig import free_port

MAX_TOKENS = 150
NUM_STREAMS = 8
DEADLINE_S = 120.0


class Machines:
    """A router, a pod of nodes 0 and 1, and another pod."""

    def __init__(self, certificates: Path, stack: contextlib.ExitStack) -> None:
        self._certificates = certificates
        self._stack = stack
        one, two, http, master = (free_port() for _ in range(4))
        nodes = ["--tensor-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={master}"]
        nodes += ["--node-timeout-s=3"]
        self.pod = self._serve("decode", f"--port={one}", "--connector=none", *nodes)
        self.node = self._serve("decode", "--node-rank=1", "--connector=none", *nodes)
        other = self._serve("decode", f"--port={two}", "--connector=none")
        for each in (self.pod, other):
            assert each.stdout is not None
            assert each.stdout.readline().startswith("ready ")
        router = self._serve("router", f"--port={http}", f"--decode=127.0.0.1:{one},127.0.0.1:{two}")
        assert router.stdout is not None
        assert router.stdout.readline().startswith("ready ")
        self.url = f"http://127.0.0.1:{http}"

    def signal_node(self, number: signal.Signals) -> None:
        """To the second machine and its rank."""
        process = psutil.Process(self.node.pid)
        for each in [*process.children(recursive=True), process]:
            each.send_signal(number)

    def _serve(self, role: str, *options: str) -> subprocess.Popen[str]:
        files = {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}.key"}
        tls = [f"--cluster-{name}={self._certificates / file}" for name, file in files.items()]
        command = [sys.executable, "-m", "cli.main", "serve", role, *options, *tls]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.kill()
    process.communicate()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    make_certificates(tmp_path)
    with contextlib.ExitStack() as stack:
        yield Machines(tmp_path, stack)


def prompt_of(number: int) -> str:
    return f"The number {number} is"


async def stream(client: httpx.AsyncClient, url: str, number: int, began: asyncio.Semaphore) -> str:
    request = {"model": DEMO_MODEL_NAME, "prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "temperature": 0}
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not text:
                    began.release()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


@pytest.mark.slow
@pytest.mark.cell(feature="streams go on elsewhere", degrees="2 on 2 machines", fault="a machine gets {fault.name}")
@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_streams_survive_a_machine(machines: Machines, fault: signal.Signals) -> None:
    began = asyncio.Semaphore(0)
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        streams = [asyncio.create_task(stream(client, machines.url, number, began)) for number in range(NUM_STREAMS)]
        for _ in streams:
            await began.acquire()
        machines.signal_node(fault)
        texts = await asyncio.gather(*streams)
    assert texts == [greedy_completion(prompt_of(number), MAX_TOKENS) for number in range(NUM_STREAMS)]
    assert machines.pod.wait(DEADLINE_S) == 1
