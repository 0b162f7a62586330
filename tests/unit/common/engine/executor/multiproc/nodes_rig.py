"""Machines of an engine for tests: other processes of this one, over TCP on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from common.engine.config import EngineConfig, NodeTlsConfig
from deploy.certificates import make_certificates
from deploy.ports import pick_ports


def free_port() -> int:
    [port] = pick_ports("127.0.0.1", 1)
    return port


def tls_of(directory: Path, role: str = "decode") -> NodeTlsConfig:
    """A certificate of the authority in the directory, which is made if there is none."""
    if not (directory / "ca.pem").exists():
        make_certificates(directory)
    return NodeTlsConfig(
        authority=str(directory / "ca.pem"),
        certificate=str(directory / f"{role}.pem"),
        key=str(directory / f"{role}.key"),
    )


def on_nodes(config: EngineConfig, directory: Path, nnodes: int = 2, **changes: object) -> EngineConfig:
    """The settings of machine 0."""
    parallel = msgspec.structs.replace(
        config.parallel, nnodes=nnodes, master_addr="127.0.0.1", master_port=free_port(), **changes
    )
    return msgspec.structs.replace(config, parallel=parallel, tls=tls_of(directory))


class NodeProcess:
    """Another machine."""

    def __init__(self, config: EngineConfig, *options: str, number: int = 1) -> None:
        """Knows what an operator would tell it."""
        parallel, tls = config.parallel, config.tls
        assert tls is not None
        given = {
            "nnodes": parallel.nnodes,
            "node-rank": number,
            "tensor-parallel-size": parallel.tensor_parallel_size,
            "pipeline-parallel-size": parallel.pipeline_parallel_size,
            "master-addr": parallel.master_addr,
            "master-port": parallel.master_port,
            "join-timeout-s": parallel.join_timeout_s,
            "node-timeout-s": parallel.node_timeout_s,
            "cluster-ca": tls.authority,
            "cluster-cert": tls.certificate,
            "cluster-key": tls.key,
        }
        arguments = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "decode_service", *arguments, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def signal_all(self, number: signal.Signals) -> None:
        """To the machine and its ranks."""
        for each in [*self.ranks(), psutil.Process(self.process.pid)]:
            os.kill(each.pid, number)

    def end(self) -> str:
        """What it has logged."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.signal_all(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()


@contextlib.contextmanager
def node(config: EngineConfig, *options: str, number: int = 1) -> Iterator[NodeProcess]:
    machine = NodeProcess(config, *options, number=number)
    try:
        yield machine
    finally:
        machine.end()
