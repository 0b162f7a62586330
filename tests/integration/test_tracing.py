"""One trace per request, through router, prefill pod and decode pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.observability.tracing.config import TracingConfig
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.channel import open_channel
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.runtime import Router
from router.serving.config import ServingConfig
from router.tracing.config import RouterTracingConfig
from tests.pods import CHUNK, RunningPod, StepGate, decode_pod, prefill_pod, prompt_of, wait_for

TRACE_ID, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
PROMPT = prompt_of(2 * CHUNK + 5)  # three chunks
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@dataclass
class Cluster:
    prefill: RunningPod
    decode: RunningPod
    router: Router
    client: httpx.AsyncClient
    file: Path

    def spans(self) -> list[dict]:
        """All that were exported, each with the name of its process."""
        found = []
        for line in self.file.read_text().splitlines():
            for part in json.loads(line)["resourceSpans"]:
                resource = plain(part["resource"]["attributes"])
                found += [
                    {**span, "process": resource["service.name"], "attributes": plain(span["attributes"])}
                    for span in part["scopeSpans"][0]["spans"]
                ]
        return found

    async def tree(self, *names: str) -> dict[str, dict]:
        """The spans by name, once those with these names are there."""
        await wait_for(lambda: set(names) <= {span["name"] for span in self.spans()})
        return {f"{span['process']}/{span['name']}": span for span in self.spans()}


def plain(attributes: list[dict]) -> dict:
    return {each["key"]: next(iter(each["value"].values())) for each in attributes}


@asynccontextmanager
async def traced_cluster(tmp_path: Path, gate: StepGate | None = None) -> AsyncIterator[Cluster]:
    file = tmp_path / "traces.jsonl"
    settings = {"traces_file": str(file)}
    store: dict = {}
    async with (
        prefill_pod(store, gate=gate, tracing=TracingConfig(**settings)) as prefill,
        decode_pod(store, tracing=TracingConfig(**settings)) as decode,
    ):
        config = RouterConfig(
            port=0, grpc_port=0, shutdown_grace_s=0.0,
            prefill=[prefill.address], decode=[decode.address],
            serving=ServingConfig(
                routing=RoutingConfig(remote_prefill="prefer"),
                tracing=RouterTracingConfig(**settings, traces_sampling_ratio=0.0),
            ),
        )  # fmt: skip
        async with (
            Router(config).running() as router,
            httpx.AsyncClient(base_url=router.http_url, timeout=60) as client,
        ):
            await wait_for(lambda: router.cluster.ready_prefill() and router.cluster.ready_decode())
            yield Cluster(prefill, decode, router, client, file)


async def test_one_trace_from_the_client_through_router_and_both_pods(tmp_path):
    async with traced_cluster(tmp_path) as cluster:
        for headers in ({}, {"traceparent": TRACEPARENT[:-1] + "0"}, {"traceparent": "00-nonsense"}):
            assert (await cluster.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        headers = {"traceparent": TRACEPARENT, "tracestate": "other=1"}
        answer = await cluster.client.post("/v1/completions", json={**BODY, "prompt": PROMPT[::-1]}, headers=headers)
        assert answer.status_code == 200
        spans = await cluster.tree("generation", "prefill_pod", "decode_pod")
    exported = [f"{span['process']}/{span['name']}" for span in cluster.spans()]
    assert sorted(exported) == sorted(spans), "something was exported twice, or of another request"
    assert {span["traceId"] for span in spans.values()} == {TRACE_ID}
    assert {span["traceState"] for span in spans.values()} == {"other=1"}
    by_id = {span["spanId"]: name for name, span in spans.items()}
    parents = {name: by_id.get(span["parentSpanId"], span["parentSpanId"]) for name, span in spans.items()}
    request = next(name for name in spans if name.startswith("baton-router/text_completion "))
    router_parts = (
        "receive", "tokenize", "admission", "route", "first_token", "stream", "detokenize", "prefill_leg", "decode_leg",
    )  # fmt: skip
    assert parents == {
        request: CLIENT_SPAN,
        "baton-router/generation": request,
        **{f"baton-router/{name}": "baton-router/generation" for name in router_parts},
        "baton-prefill/prefill_pod": "baton-router/prefill_leg",
        **{f"baton-prefill/{name}": "baton-prefill/prefill_pod" for name in ("prefill_queue", "prefill", "transfer")},
        "baton-decode/decode_pod": "baton-router/decode_leg",
        **{
            f"baton-decode/{name}": "baton-decode/decode_pod"
            for name in ("decode_queue", "transfer", "first_decode", "decode")
        },
    }
    assert [event["name"] for event in spans["baton-prefill/prefill"]["events"]] == ["chunk_saved"] * 3
    attributes = spans[request]["attributes"]
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (
        str(len(PROMPT)),
        "4",
    )
    for name, span in spans.items():
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]), name
        if span["process"] == "baton-router":  # its spans have one clock
            assert int(spans[request]["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]), name
            assert int(span["endTimeUnixNano"]) <= int(spans[request]["endTimeUnixNano"]), name


async def test_a_prefill_pod_that_is_killed_shows_as_a_recompute(tmp_path):
    gate = StepGate(is_open=False)
    async with traced_cluster(tmp_path, gate) as cluster:
        answer = asyncio.create_task(
            cluster.client.post("/v1/completions", json=BODY, headers={"traceparent": TRACEPARENT})
        )
        await wait_for(lambda: gate.is_holding)
        await cluster.prefill.kill()
        assert (await answer).status_code == 200
        gate.open()
        spans = await cluster.tree("generation", "decode_pod")
    assert spans["baton-router/prefill_leg"]["status"]["code"] == 2
    assert [event["name"] for event in spans["baton-router/generation"]["events"]] == ["prefill_failed", "recompute"]
    recomputed = spans["baton-decode/prefill"]
    assert recomputed["parentSpanId"] == spans["baton-decode/decode_pod"]["spanId"]
    assert recomputed["attributes"]["baton.recompute_reason"]


async def test_over_grpc(tmp_path):
    async with traced_cluster(tmp_path) as cluster, open_channel(cluster.router.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), n=2, options=inference_pb2.GenerateOptions(max_tokens=2)
        )
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Generate(request, metadata=(("traceparent", TRACEPARENT),), timeout=30)
        await cluster.tree("generation", "prefill_pod", "decode_pod")
        await wait_for(lambda: [span["name"] for span in cluster.spans()].count("decode_pod") == 2)
    spans = cluster.spans()
    assert {span["traceId"] for span in spans} == {TRACE_ID}
    assert [span["parentSpanId"] for span in spans].count(CLIENT_SPAN) == 1
    assert [span["name"] for span in spans].count("generation") == 2
    (whole,) = (span for span in spans if span["parentSpanId"] == CLIENT_SPAN)
    assert whole["attributes"]["gen_ai.usage.input_tokens"] == str(len(PROMPT))
    assert whole["attributes"]["gen_ai.usage.output_tokens"] == "4"
    assert len({span["spanId"] for span in spans}) == len(spans)
