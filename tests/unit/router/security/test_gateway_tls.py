"""TLS between clients and the router."""

from __future__ import annotations

import ssl

import grpc
import httpx
import pytest

from common.errors import ConfigError
from common.pb import inference_pb2, inference_pb2_grpc
from deploy.certificates import make_certificates
from router.config import RouterConfig
from router.runtime import Router
from router.security.config import SecurityConfig


@pytest.fixture
def certificates(tmp_path):
    make_certificates(tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
def security(certificates):
    return SecurityConfig(tls_cert=str(certificates / "router.pem"), tls_key=str(certificates / "router.key"))


@pytest.fixture
async def cluster(start_cluster, security):
    return await start_cluster(security=security)


async def http_status(cluster, certificates):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    async with httpx.AsyncClient(base_url=cluster.router.http_url, verify=context, timeout=30) as client:
        return (await client.get("/v1/models")).status_code


async def models(cluster, certificates):
    credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(cluster.router.grpc_address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return len((await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)).models)


async def test_both_fronts_speak_tls_and_nothing_else(cluster, certificates):
    assert cluster.router.http_url.startswith("https://")
    assert await http_status(cluster, certificates) == 200
    assert await models(cluster, certificates) == 1
    async with httpx.AsyncClient(timeout=30) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(cluster.router.http_url.replace("https", "http") + "/health")
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=30)


async def test_a_renewed_certificate_holds_without_a_restart(cluster, certificates, caplog):
    make_certificates(certificates, force=True)  # of another authority
    cluster.router.security.check()
    assert await http_status(cluster, certificates) == 200
    assert await models(cluster, certificates) == 1
    key = (certificates / "router.key").read_text()
    (certificates / "router.key").write_bytes((certificates / "decode.key").read_bytes())
    cluster.router.security.check()
    assert await http_status(cluster, certificates) == 200
    assert await models(cluster, certificates) == 1
    assert [record.levelname for record in caplog.records if "router.pem cannot be used" in record.getMessage()] == [
        "ERROR"
    ] * 2  # once for each front
    assert key not in caplog.text


def test_half_a_configuration_names_what_is_missing():
    with pytest.raises(ValueError, match="--tls-key: required with --tls-cert"):
        SecurityConfig(tls_cert="a")
    with pytest.raises(ValueError, match="--tls-cert: required with --tls-key"):
        SecurityConfig(tls_key="a")


def test_a_file_that_cannot_be_used_is_named(security, certificates):
    (certificates / "router.key").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"--tls-cert: .*router.pem cannot be used"):
        Router(RouterConfig(decode=["a:1"], security=security))
    (certificates / "router.key").unlink()
    with pytest.raises(ConfigError, match=r"--tls-key: cannot read .*router.key"):
        Router(RouterConfig(decode=["a:1"], security=security))


async def test_a_refusal_arrives_over_tls(cluster, certificates):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    async with httpx.AsyncClient(base_url=cluster.router.http_url, verify=context, timeout=30) as client:
        assert (await client.get("/version", headers={"x": "x" * 100_000})).status_code == 431
