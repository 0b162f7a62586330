"""Certificates of both ends, over real connections."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import ConfigError, UnavailableError
from common.rpc.channel import ChannelOpener, ChannelPool, connect, open_channel
from common.rpc.server import RpcServer
from common.rpc.tls import ClusterTls, ClusterTlsConfig, cluster_tls
from deploy.certificates import make_certificates


def settings(directory: Path, role: str, authority: Path | None = None) -> ClusterTlsConfig:
    return ClusterTlsConfig(
        cluster_ca=str((authority or directory) / "ca.pem"),
        cluster_cert=str(directory / f"{role}.pem"),
        cluster_key=str(directory / f"{role}.key"),
    )


def tls_of(directory: Path, role: str, authority: Path | None = None) -> ClusterTls:
    tls = cluster_tls(settings(directory, role, authority))
    assert tls is not None
    return tls


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "theirs")
    return tmp_path / "theirs"


def serve(directory: Path, host: str = "127.0.0.1") -> RpcServer:
    return RpcServer(host, 0, [], credentials=tls_of(directory, "prefill").server_credentials())


async def reached(opener: ChannelOpener, address: str) -> bool:
    async with opener(address) as channel:
        try:
            await connect(channel, 30)
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except UnavailableError:
            return False
        except grpc.aio.AioRpcError:
            return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_members_of_one_cluster_reach_each_other(ours: Path, host: str) -> None:
    async with serve(ours, host) as server, ChannelPool(opener=tls_of(ours, "decode").open_channel) as pool:
        assert await reached(tls_of(ours, "router").open_channel, server.address)
        async with pool.channel(server.address, 30) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)


async def test_who_has_no_certificate_of_the_authority_is_refused(ours: Path, theirs: Path) -> None:
    def without_certificate(address: str) -> grpc.aio.Channel:
        return open_channel(address, grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes()))

    async with serve(ours) as server:
        assert not await reached(open_channel, server.address)
        assert not await reached(without_certificate, server.address)
        assert not await reached(tls_of(theirs, "router", authority=ours).open_channel, server.address)
        assert await reached(tls_of(ours, "router").open_channel, server.address)


async def test_a_server_that_is_not_of_the_cluster_is_refused(ours: Path, theirs: Path) -> None:
    async with RpcServer("127.0.0.1", 0, []) as plain, serve(theirs) as other:
        tls = tls_of(ours, "router")
        assert not await reached(tls.open_channel, other.address)
        async with tls.open_channel(plain.address) as channel:
            with pytest.raises(UnavailableError):
                await connect(channel, 1)


async def test_a_server_must_have_the_name_by_which_it_is_reached(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["pods.example"])
    async with serve(tmp_path) as server:
        named = settings(tmp_path, "router")
        for name, found in (("", True), ("pods.example", True), ("localhost", True), ("other.example", False)):
            config = ClusterTlsConfig(
                cluster_ca=named.cluster_ca,
                cluster_cert=named.cluster_cert,
                cluster_key=named.cluster_key,
                cluster_tls_name=name,
            )
            tls = cluster_tls(config)
            assert tls is not None
            assert await reached(tls.open_channel, server.address) is found


async def test_replaced_files_hold_without_a_restart(ours: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = tls_of(ours, "router")
    async with serve(ours) as server:
        assert await reached(router.open_channel, server.address)
        make_certificates(ours, force=True)  # another authority: nothing of before is valid
        assert await reached(tls_of(ours, "decode").open_channel, server.address)
        assert await reached(router.open_channel, server.address)
        (ours / "prefill.pem").write_text("half a file")
        for _ in range(2):
            assert await reached(router.open_channel, server.address)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "prefill.pem" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"cluster_ca": "a"}, "--cluster-cert: required with --cluster-ca"),
        ({"cluster_ca": "a", "cluster_cert": "b"}, "--cluster-key: required with --cluster-ca"),
        ({"cluster_cert": "a", "cluster_key": "b"}, "--cluster-ca: required with --cluster-cert"),
        ({"cluster_tls_name": "a"}, "--cluster-ca: required with --cluster-tls-name"),
    ],
)
def test_half_a_configuration_names_what_is_missing(given: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        ClusterTlsConfig(**given)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("ca.pem", None, "--cluster-ca: cannot read .*ca.pem: No such file"),
        ("ca.pem", "nonsense", "--cluster-ca: .*ca.pem cannot be used"),
        ("router.pem", None, "--cluster-cert: cannot read .*router.pem"),
        ("router.pem", "nonsense", "--cluster-cert: .*router.pem cannot be used"),
        ("router.key", None, "--cluster-key: cannot read .*router.key"),
        ("router.key", "nonsense", "--cluster-cert: .*router.pem cannot be used"),
        ("router.key", "another", "--cluster-cert: .*router.pem cannot be used: key values mismatch"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(ours: Path, file: str, content: str | None, said: str) -> None:
    if content is None:
        (ours / file).unlink()
    else:
        (ours / file).write_bytes((ours / "decode.key").read_bytes() if content == "another" else content.encode())
    with pytest.raises(ConfigError, match=said):
        cluster_tls(settings(ours, "router"))


def test_without_settings_the_cluster_speaks_plain_text() -> None:
    assert cluster_tls(ClusterTlsConfig()) is None
