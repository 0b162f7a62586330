"""`baton health`: whether one process serves, asked over gRPC as Kubernetes would, for probes without a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import Meta

from cli.exit_codes import EXIT_FAILED, EXIT_UNREACHABLE
from common.config import ArgumentParser, add_arguments, build, epilog_of
from common.errors import ConfigError
from common.rpc.channel import open_blocking_channel
from common.rpc.server import LIVENESS
from common.rpc.tls import ClusterTlsConfig, cluster_tls

ADDRESS_VARIABLE = "BATON_HEALTH_ADDRESS"
DEFAULT_ADDRESS = "127.0.0.1:9000"  # gRPC address of a local router
_EXIT_CODES = {
    0: "it serves",
    EXIT_FAILED: "it answers, but does not serve",
    2: "a wrong option or setting",
    EXIT_UNREACHABLE: "nothing answers at the address",
}
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Probe: which process, and how it is asked."""

    service: Annotated[
        str,
        Meta(description=f"Health service to ask for: {LIVENESS}, whether the process runs; empty: whether it serves."),
    ] = ""
    timeout_s: Annotated[float, Meta(gt=0, le=60, description="Seconds until the probe fails.")] = 3.0
    tls_ca: Annotated[
        str,
        Meta(description="PEM file of the authority that signed the router's certificate for clients (--tls-cert)."),
    ] = ""
    cluster_tls: ClusterTlsConfig = ClusterTlsConfig()


def main(argv: Sequence[str]) -> int:
    """Asks once. Returns the exit code; raises ConfigError."""
    parser = ArgumentParser(
        prog="baton health",
        description="Asks a router or a pod for its health (grpc.health.v1), as a probe of a container does.",
        epilog=epilog_of(
            examples=("baton health 127.0.0.1:8100", f"baton health --service {LIVENESS}"), exit_codes=_EXIT_CODES
        ),
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help=f"gRPC address of the process. (default: ${ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )
    add_arguments(parser, HealthConfig)
    args = parser.parse_args(argv)
    address = args.address or os.environ.get(ADDRESS_VARIABLE, "") or DEFAULT_ADDRESS
    return _ask(address, build(HealthConfig, args))


def _ask(address: str, config: HealthConfig) -> int:
    with _open_channel(address, config) as channel:
        request = health_pb2.HealthCheckRequest(service=config.service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=config.timeout_s)
        except grpc.RpcError as error:
            return _report(address, config, error.code(), error.details() or "")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{address}: {status}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else EXIT_FAILED


def _report(address: str, config: HealthConfig, code: grpc.StatusCode, details: str) -> int:
    if code is grpc.StatusCode.NOT_FOUND:
        raise ConfigError(f"--service: {address} has no health service {config.service!r}", param="service")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = f"no answer within {config.timeout_s:g} s"
    elif details.endswith("Connection refused"):
        details = "connection refused: no process listens there"
    sys.stderr.write(f"baton: error: {address}: {details or code.name}\n")
    return EXIT_UNREACHABLE if code in _UNREACHABLE else EXIT_FAILED


def _open_channel(address: str, config: HealthConfig) -> grpc.Channel:
    """Raises ConfigError if a certificate cannot be used."""
    tls = cluster_tls(config.cluster_tls)
    if tls is not None:
        return tls.open_blocking_channel(address)
    if config.tls_ca:
        try:
            authority = Path(config.tls_ca).read_bytes()
        except OSError as error:
            raise ConfigError(f"--tls-ca: cannot read {config.tls_ca}: {error.strerror}", param="tls_ca") from error
        return open_blocking_channel(address, grpc.ssl_channel_credentials(authority))
    return open_blocking_channel(address)
