"""`baton profile`: a trace of one pod's engine, while it serves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, cast
from urllib.parse import urlsplit

import grpc
import msgspec
from msgspec import Meta

from cli.environment import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, api_key
from cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from cli.router_address import fetch_json
from cli.trace_summary import OperatorTime, summarize
from cli.whole_file import replacing
from common.config import ArgumentParser, add_arguments, build, epilog_of
from common.errors import BatonError, ConfigError, UnreachableError
from common.pb import pods_pb2, pods_pb2_grpc
from common.rpc.channel import open_blocking_channel
from common.rpc.errors import from_rpc_error
from common.rpc.tls import ClusterTlsConfig, cluster_tls
from common.setting_values import show
from deploy.cluster_state import the_cluster

EXIT_CODES = {
    0: "the trace is written",
    EXIT_FAILED: "the router refuses the API key; or the pod refused, or failed meanwhile",
    2: "a wrong option or setting",
    EXIT_UNREACHABLE: "no pod or no router answers",
    EXIT_INTERRUPTED: "interrupted; the profile has ended on the pod, too",
}
_ENVIRONMENT_HELP = f"""\
environment:
  {URL_VARIABLE}      address of the router, unless --url gives one
  {KEY_VARIABLE}  operator's API key of the router"""
_MARGIN_S = 150.0  # beyond the profile itself, for a step that is under way and for sending the trace
_NUM_OPERATORS = 15
_ENDS = {
    pods_pb2.PROFILE_END_STEPS: "it had all steps that were asked for",
    pods_pb2.PROFILE_END_EVENTS: "a trace holds no more events",
}


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile: for how long, and of which pod."""

    seconds: Annotated[float, Meta(gt=0, le=60, description="For how long.")] = 5.0
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None, Meta(description="End after so many steps, if that is sooner.")
    ] = None
    url: Annotated[
        str | None,
        Meta(
            description=f"http://host:port of a router that knows the pod by its name; default: {URL_VARIABLE}, else "
            f"the cluster in the background, else {DEFAULT_URL}."
        ),
    ] = None
    tls_ca: Annotated[str, Meta(description="PEM file of the authority of an https:// URL; default: public ones.")] = ""
    cluster_tls: ClusterTlsConfig = ClusterTlsConfig()


def main(argv: Sequence[str]) -> int:
    """Takes a profile. Returns the exit code; raises BatonError."""
    parser = ArgumentParser(
        prog="baton profile",
        description="Takes a trace of a pod's engine while it serves, with the operators of each step, and prints "
        "where the time went. Steps are slower meanwhile.",
        epilog=epilog_of(
            examples=(
                "baton profile --pod decode-0",
                "baton profile --pod prefill-0 --seconds 20 --steps 50 --out prefill.json.gz",
                "kubectl port-forward pod/baton-decode-0 7000 & baton profile --pod 127.0.0.1:7000",
            ),
            exit_codes=EXIT_CODES,
            more=_ENVIRONMENT_HELP,
        ),
    )
    parser.add_argument(
        "--pod", metavar="NAME|HOST:PORT", help="Name of the pod, as `baton status` shows it, or its gRPC address."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="Where to write. (default: trace-POD.json.gz)")
    add_arguments(parser, ProfileOptions)
    args = parser.parse_args(argv)
    options = build(ProfileOptions, args)
    assert isinstance(options, ProfileOptions)
    address = _address_of(args.pod, options)
    out = args.out or Path(f"trace-{re.sub(r'[^A-Za-z0-9._-]', '-', args.pod)}.json.gz")
    with replacing(out, "out") as file:
        report = _take(address, options, file)
    _print_report(report, out)
    return 0


# -- which pod ---------------------------------------------------------------------------------------------------------


def _address_of(pod: str | None, options: ProfileOptions) -> str:
    """Raises ConfigError if that is no address, or if no pod, or not one only, has that name."""
    if pod is not None and ":" in pod:
        if not _is_address(pod):
            raise ConfigError(f"--pod: expected a name or HOST:PORT, as in [::1]:7000, got {show(pod)}", param="pod")
        return pod
    pods = _pods_of_router(options)
    addresses = {address for name, address in pods if name == pod}
    if len(addresses) != 1:
        names = ", ".join(sorted({name for name, _ in pods})) or "none is connected"
        problem = "which one?" if pod is None else f"no pod is named {pod}" if not addresses else f"{pod} is several"
        raise ConfigError(f"--pod: {problem} (pods: {names})", param="pod")
    return addresses.pop()


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        has_both = bool(parts.hostname and parts.port)
    except ValueError:  # no port, or half an IPv6 address
        return False
    return has_both and parts.netloc == text and "@" not in text and " " not in text


def _pods_of_router(options: ProfileOptions) -> list[tuple[str, str]]:
    """Names and addresses."""
    url = options.url or os.environ.get(URL_VARIABLE, "").strip()
    if not url and (cluster := the_cluster()) is not None:
        return [(pod.name, pod.address) for pod in cluster.pods if pod.role != "router"]
    view = fetch_json(url or DEFAULT_URL, "/v1/cluster", options.tls_ca, api_key())
    try:  # without those that are not connected, which keep the name of a pod that may have moved
        return [(str(pod["pod_id"]), str(pod["address"])) for pod in view["pods"] if pod["version"] is not None]
    except (KeyError, TypeError) as error:
        raise BatonError(f"what answers at {url or DEFAULT_URL} is not a Baton router") from error


# -- the profile -------------------------------------------------------------------------------------------------------


def _take(address: str, options: ProfileOptions, file: BinaryIO) -> pods_pb2.ProfileReport:
    """Writes the trace. Raises BatonError."""
    request = pods_pb2.ProfileRequest(seconds=options.seconds, max_steps=options.steps or 0)
    report, num_bytes = None, 0
    with _open_channel(address, options.cluster_tls) as channel:
        try:
            for event in pods_pb2_grpc.PodStub(channel).Profile(request, timeout=options.seconds + _MARGIN_S):
                if event.HasField("report"):
                    report = event.report
                num_bytes += file.write(event.part)
        except grpc.RpcError as error:
            raise _error_of(error, address) from error
    if report is None or num_bytes != report.num_bytes:
        raise BatonError(f"{address} sent {num_bytes} bytes of a trace, which is not all of it")
    return report


def _open_channel(address: str, config: ClusterTlsConfig) -> grpc.Channel:
    tls = cluster_tls(config)
    return open_blocking_channel(address) if tls is None else tls.open_blocking_channel(address)


def _error_of(error: grpc.RpcError, address: str) -> BatonError:
    failure = from_rpc_error(cast("grpc.Call", error))
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return BatonError(f"{address} is no pod, or one of a version that cannot be profiled")
    if isinstance(failure, UnreachableError):
        reason = failure.message.rpartition(": ")[2]
        return UnreachableError(f"{address} cannot be reached: {reason}. Can it be from here, and is TLS as the pod's?")
    return failure


# -- what is printed ---------------------------------------------------------------------------------------------------


def _print_report(report: pods_pb2.ProfileReport, out: Path) -> None:
    print(
        f"{out}: {report.num_steps:,} steps, {report.num_tokens:,} tokens and {report.num_events:,} events in "
        f"{report.seconds:.2f} s, and {report.paused_s:.2f} s of pauses between parts of the trace"
    )
    if report.ended_by in _ENDS:
        print(f"It ended early: {_ENDS[report.ended_by]}.")
    if not report.num_steps:
        print("No step ran: the engine was idle. Send it requests meanwhile, with `baton bench` for example.")
    print("\nWhere the time went:")
    for field in pods_pb2.PhaseSeconds.DESCRIPTOR.fields:
        seconds = getattr(report.phases, field.name)
        if seconds:
            print(f"  {field.name:<9} {seconds:8.3f} s  {seconds / report.seconds:6.1%}")
    summary = summarize(out)
    _print_operators("Operators by the time that they took themselves:", summary.host)
    _print_operators("On the GPU:", summary.device)
    print("\nOpen it at https://ui.perfetto.dev, which keeps it in the browser, or at chrome://tracing.")


def _print_operators(title: str, operators: list[OperatorTime]) -> None:
    total_us = sum(operator.self_us for operator in operators)
    if not total_us:
        return
    print(f"\n{title}\n  {'share':>6}  {'ms':>10}  {'calls':>8}  {'us/call':>8}  name")
    for operator in operators[:_NUM_OPERATORS]:
        share, mean_us = operator.self_us / total_us, operator.self_us / operator.num_calls
        print(
            f"  {share:6.1%}  {operator.self_us / 1e3:10.2f}  {operator.num_calls:8,}  {mean_us:8.1f}  "
            f"{operator.name[:80]}"
        )
