"""The probes of a container, as the kubelet runs them."""

from __future__ import annotations

import http.client
import socket
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.chart import Manifest


def passes(container: Manifest, probe_name: str, address: str) -> bool:
    """Runs a probe of a container once."""
    probe = container[probe_name]
    timeout_s = float(probe.get("timeoutSeconds", 1))
    if "grpc" in probe:
        return _grpc_probe(address, probe["grpc"], timeout_s)
    (kind,) = probe.keys() & {"httpGet", "tcpSocket"}
    port = port_number(container, probe[kind]["port"])
    if kind == "tcpSocket":
        return _tcp_probe(address, port, timeout_s)
    return _http_probe(address, port, probe[kind], timeout_s)


def port_number(container: Manifest, port: str | int) -> int:
    """The number of a port that a probe or a service names."""
    if isinstance(port, int):
        return port
    (number,) = (entry["containerPort"] for entry in container["ports"] if entry["name"] == port)
    return int(number)


def _grpc_probe(address: str, probe: Manifest, timeout_s: float) -> bool:
    with grpc.insecure_channel(f"{address}:{probe['port']}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=probe.get("service", "")), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _tcp_probe(address: str, port: int, timeout_s: float) -> bool:
    try:
        with socket.create_connection((address, port), timeout_s):
            return True
    except OSError:
        return False


def _http_probe(address: str, port: int, probe: Manifest, timeout_s: float) -> bool:
    if probe.get("scheme") == "HTTPS":  # the kubelet does not verify the certificate
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address, port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", probe["path"])
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
