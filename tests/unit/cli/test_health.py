"""`baton health` against servers that serve, drain or are gone."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from cli import serve
from cli.main import main
from common.rpc.server import LIVENESS, RpcServer
from common.rpc.tls import ClusterTlsConfig, cluster_tls
from deploy.certificates import make_certificates
from deploy.ports import pick_ports


async def ask(*argv: str) -> int:
    return await asyncio.to_thread(main, ["health", *argv])


async def test_a_process_that_does_not_serve_yet_is_alive_and_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer("127.0.0.1", 0, [])
    async with server:
        assert await ask(server.address) == 1
        assert await ask(server.address, "--service", LIVENESS) == 0
        await server.set_serving(True)
        assert await ask(server.address) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"{server.address}: SERVING"
        assert await ask(server.address, "--service", "liveliness") == 2
        assert "--service: " in capsys.readouterr().err


async def test_the_address_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = pick_ports("127.0.0.1", 1)
    monkeypatch.setenv("BATON_HEALTH_ADDRESS", f"127.0.0.1:{port}")
    assert await ask() == 3
    assert capsys.readouterr().err == f"baton: error: 127.0.0.1:{port}: connection refused: no process listens there\n"
    server = RpcServer("127.0.0.1", port, [])
    async with server:
        await server.set_serving(True)
        assert await ask() == 0


async def test_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    config = ClusterTlsConfig(
        cluster_ca=str(tmp_path / "ca.pem"),
        cluster_cert=str(tmp_path / "decode.pem"),
        cluster_key=str(tmp_path / "decode.key"),
    )
    tls = cluster_tls(config)
    assert tls is not None
    server = RpcServer("127.0.0.1", 0, [], credentials=tls.server_credentials())
    async with server:
        await server.set_serving(True)
        files = ["--cluster-ca", config.cluster_ca, "--cluster-cert", config.cluster_cert, "--cluster-key"]
        assert await ask(server.address, *files, config.cluster_key) == 0
        assert await ask(server.address) == 3


def test_the_first_process_of_a_container_ends_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        serve.main(["--help"])
        assert signal.getsignal(signal.SIGTERM) is before
        monkeypatch.setattr(serve.os, "getpid", lambda: 1)
        serve.main(["--help"])
        assert signal.getsignal(signal.SIGTERM) is serve._exit_at_once
    finally:
        signal.signal(signal.SIGTERM, before)
