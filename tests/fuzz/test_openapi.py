"""What /openapi.json says is true: of what is asked as it says, and of what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from tests.fuzz.host import DEADLINE_S, Host, profile, sizes
from tests.fuzz.http_strategies import good_chats, good_completions
from tests.fuzz.router_host import budget, check_quiet, router_host
from tests.unit.router.router_cluster import RouterCluster

_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
_OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /v1/route/explain",
    "GET /v1/route/explain",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /readyz",
    "GET /livez",
    "GET /ping",
    "POST /ping",
    "GET /metrics",
    "GET /version",
    "GET /load",
    "GET /v1/load",
    "POST /admin/pods/{address}/drain",
    "POST /admin/pods/{address}/undrain",
    "GET /admin/step_times",
    "GET /v1/cluster",
    "GET /v1/requests",
    "GET /v1/requests/{request_id}",
    "POST /reset_prefix_cache",
    "POST /v1/embeddings",
    "POST /v1/classify",
    "POST /classify",
    "POST /v1/score",
    "POST /score",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
    "POST /pooling",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host[RouterCluster]]:
    with router_host(max_body_bytes=2**20) as host:  # what is generated is not to be refused for its size
        yield host


@pytest.fixture(scope="module")
def operations(host) -> dict[str, Any]:
    document = host.run(asyncio.to_thread(_get, f"{host.value.router.http_url}/openapi.json"))
    schema = schemathesis.openapi.from_dict(document)
    return {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}


def _get(url: str) -> Any:
    return httpx.get(url).json()


def test_every_operation_is_described(operations):
    assert sorted(operations) == sorted(_OPERATIONS)


@pytest.mark.parametrize("label", _OPERATIONS)
@sizes(10, 2000)
def test_answers_are_as_described(host, operations, label, num_examples):
    operation = operations[label]

    @profile(num_examples)
    @given(st.data(), st.sampled_from(GenerationMode))
    def holds(data: st.DataObject, mode: GenerationMode) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        with budget(host):
            host.run(asyncio.to_thread(check, case, host.value.router.http_url))

    holds()
    check_quiet(host)


@pytest.mark.parametrize(("label", "bodies"), [(_OPERATIONS[0], good_completions), (_OPERATIONS[1], good_chats)])
@sizes(20, 2000)
def test_good_answers_are_as_described(host, operations, label, bodies, num_examples):
    @profile(num_examples)
    @given(bodies)
    def holds(body: dict[str, Any]) -> None:
        case = operations[label].Case(body=body, media_type="application/json")
        with budget(host):
            host.run(asyncio.to_thread(check, case, host.value.router.http_url))

    holds()
    check_quiet(host)


def check(case: Case, url: str) -> None:
    response = case.call(base_url=url, headers={"connection": "close"}, timeout=DEADLINE_S)
    case.validate_response(response, checks=_CHECKS)
