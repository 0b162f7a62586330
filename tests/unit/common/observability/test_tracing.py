"""Trace context, bounded export, and what OTLP makes of spans."""

from __future__ import annotations

import json
import logging
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from prometheus_client import CollectorRegistry

from common.errors import ConfigError, UnavailableError
from common.observability.tracing.config import TracingConfig
from common.observability.tracing.context import TraceContext, begin_trace, continue_trace, read_parent
from common.observability.tracing.exporters import ConsoleExporter, create_exporters
from common.observability.tracing.otlp_json import to_line
from common.observability.tracing.span import Span, SpanEvent, SpanKind
from common.observability.tracing.tracer import Tracer, trace_span_counter

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE_ID}-{SPAN_ID}-01"
RESOURCE = {"service.name": "baton-router", "service.instance.id": "router-0"}


def span_of(name="prefill", **fields):
    context = TraceContext(TRACE_ID, SPAN_ID, parent_id="a" * 16, state="other=1")
    return Span(name=name, context=context, start_ns=1_000, end_ns=3_000_000, **fields)


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "x",
        VALID.upper(),
        VALID[:-1],
        VALID + "-more",
        VALID + "0",
        "ff" + VALID[2:],
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        VALID.replace("4b", "4g"),
        VALID.replace("-", "_"),
        f"{VALID},{VALID}",
        "٠٠" + VALID[2:],
    ],
)
def test_a_bad_traceparent_is_ignored(traceparent):
    assert read_parent(traceparent, "other=1") is None


@pytest.mark.parametrize(
    ("traceparent", "is_sampled"), [(VALID, True), (VALID[:-2] + "00", False), ("01" + VALID[2:-2] + "03-more", True)]
)
def test_a_valid_traceparent_is_continued_if_it_is_sampled(traceparent, is_sampled):
    parent = read_parent(traceparent, "other=1, tenant@vendor=2")
    assert parent == (TRACE_ID, SPAN_ID, is_sampled, "other=1,tenant@vendor=2")
    trace = continue_trace(parent)
    assert (trace is not None) == is_sampled
    if trace is not None:
        assert (trace.trace_id, trace.parent_id) == (TRACE_ID, SPAN_ID)
        assert read_parent(*(value for _, value in trace.metadata)).span_id == trace.span_id != SPAN_ID


@pytest.mark.parametrize("tracestate", ["no member", "UPPER=1", "a=1\r\nx: y", "a=" + "b" * 600, "a=b=c", "k=v," * 33])
def test_a_bad_tracestate_is_dropped_and_the_trace_goes_on(tracestate):
    assert read_parent(VALID, tracestate).state == ""


def test_a_new_trace_is_sampled_by_the_ratio():
    assert begin_trace(0.0) is None
    assert begin_trace(1.0).parent_id == ""
    assert 0 < sum(begin_trace(0.5) is not None for _ in range(200)) < 200


class BlockedExporter:
    name = "blocked"

    def __init__(self):
        self.release = threading.Event()
        self.is_exporting = threading.Event()
        self.fails = False
        self.taken = []

    def export(self, spans):
        self.is_exporting.set()
        assert self.release.wait(30)
        if self.fails:
            raise UnavailableError("no")
        self.taken += spans

    def close(self):
        pass


def test_an_exporter_that_is_stuck_holds_up_nothing_and_drops_are_counted():
    registry, exporter, counter = CollectorRegistry(), BlockedExporter(), trace_span_counter("baton_router")
    registry.register(counter)
    tracer = Tracer([exporter], counter, max_queued=4)

    def num(outcome):
        labels = {"exporter": "blocked", "outcome": outcome}
        return registry.get_sample_value("baton_router_trace_spans_total", labels)

    tracer.export([span_of()])
    assert exporter.is_exporting.wait(30)
    tracer.export([span_of()] * 3)
    tracer.export([span_of()] * 2)  # one too many
    assert (num("exported"), num("dropped")) == (0, 2)
    exporter.release.set()
    tracer.close()
    assert (num("exported"), num("failed"), num("dropped")) == (4, 0, 2)
    assert len(exporter.taken) == 4
    tracer.export([span_of()])
    assert num("dropped") == 3


def test_what_an_exporter_does_not_take_is_counted_and_logged_once(caplog):
    registry, exporter, counter = CollectorRegistry(), BlockedExporter(), trace_span_counter("baton_pod")
    registry.register(counter)
    exporter.fails = True
    exporter.release.set()
    tracer = Tracer([exporter], counter)
    tracer.export([span_of()])
    tracer.close()
    labels = {"exporter": "blocked", "outcome": "failed"}
    assert registry.get_sample_value("baton_pod_trace_spans_total", labels) == 1
    assert "1 spans were not exported: blocked: no" in caplog.text


def test_otlp_without_its_packages_is_refused_with_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "common.observability.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .* pip install 'baton-llm\[tracing\]'"):
        create_exporters(TracingConfig(otlp_traces_endpoint="http://127.0.0.1:4317"), RESOURCE)


def test_bad_settings_are_named(tmp_path):
    for endpoint in ("127.0.0.1:4317", "http://", "http://host:port", "ftp://host:1"):
        with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
            TracingConfig(otlp_traces_endpoint=endpoint)
    with pytest.raises(ConfigError, match="--traces-file"):
        create_exporters(TracingConfig(traces_file=str(tmp_path / "none" / "file")), RESOURCE)


def test_the_line_of_the_file_and_of_the_console(capsys):
    span = span_of(
        kind=SpanKind.CLIENT,
        attributes={"text": "a\nb", "number": 7, "share": 0.5, "is_on": True, "list": ["x"]},
        events=[SpanEvent("chunk_saved", 2_000, {"baton.num_tokens": 32})],
        error="unavailable",
    )
    line = to_line(RESOURCE, [span])
    assert line.count(b"\n") == 1
    (part,) = json.loads(line)["resourceSpans"]
    (encoded,) = part["scopeSpans"][0]["spans"]
    assert (encoded["traceId"], encoded["parentSpanId"], encoded["kind"]) == (TRACE_ID, "a" * 16, 3)
    assert encoded["attributes"][:4] == [
        {"key": "text", "value": {"stringValue": "a\nb"}},
        {"key": "number", "value": {"intValue": "7"}},
        {"key": "share", "value": {"doubleValue": 0.5}},
        {"key": "is_on", "value": {"boolValue": True}},
    ]
    assert encoded["attributes"][-1] == {"key": "error.type", "value": {"stringValue": "unavailable"}}
    ConsoleExporter(RESOURCE).export([span])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("[router-0] prefill 2.999 ms trace=")


def test_a_collector_gets_what_was_exported():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    got = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802
            got.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        (exporter,) = create_exporters(TracingConfig(otlp_traces_endpoint=f"http://127.0.0.1:{port}"), RESOURCE)
        exporter.export([span_of(kind=SpanKind.SERVER, error="unavailable", attributes={"baton.attempt": 1})])
        exporter.close()
    finally:
        server.stop(None).wait()
    (sent,) = got[0].resource_spans[0].scope_spans[0].spans
    assert (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex()) == (TRACE_ID, SPAN_ID, "a" * 16)
    assert (sent.kind, sent.trace_state, sent.end_time_unix_nano) == (2, "other=1", 3_000_000)
    assert {attribute.key for attribute in sent.attributes} == {"baton.attempt", "error.type"}


def test_over_http_the_path_is_that_of_the_protocol():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, trace_service_pb2.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        config = TracingConfig(otlp_traces_endpoint=endpoint, otlp_traces_protocol="http")
        (exporter,) = create_exporters(config, RESOURCE)
        exporter.export([span_of()])
        exporter.close()
        server.shutdown()
    ((path, request),) = got
    assert path == "/v1/traces"
    assert request.resource_spans[0].scope_spans[0].spans[0].name == "prefill"


class LinesOfRoot(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_a_collector_that_is_gone_is_an_error(monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr("common.observability.tracing.otlp._TIMEOUT_S", 0.05)
    logged = LinesOfRoot()  # caplog also gets what does not propagate
    monkeypatch.setattr(logging.getLogger(), "handlers", [logged])
    for protocol in ("grpc", "http"):
        config = TracingConfig(otlp_traces_endpoint="http://127.0.0.1:1", otlp_traces_protocol=protocol)
        (exporter,) = create_exporters(config, RESOURCE)
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1: \S+"):
            exporter.export([span_of()])
        exporter.close()
    assert not logged.lines, "each batch would have lines of its own"
