"""Answers of a router, made up: many pods, a request with fallbacks, and texts that would like to be markup."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from playwright.async_api import Page, Route

from router.gateway.operators.timelines import RequestList
from router.serving.cluster_view import ClusterView
from router.timelines.views import RequestTimeline

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&lt;b&gt;"


def pod(role: str, number: int, tick: int, **changes: Any) -> dict[str, Any]:
    """A pod that is busier at each tick."""
    is_prefill = role == "prefill"
    load = {
        "num_running": 3 + number % 5,
        "num_waiting": number % 3,
        "num_waiting_for_remote_kv": 0 if is_prefill else number % 2,
        "num_queued_tokens": 512 * (number % 3),
        "num_blocks": 4096,
        "num_free_blocks": 4096 - (number * 517 + tick * 41) % 4096,
        "last_step_ms": 18.0,
        "num_preemptions": 0,
        "num_prompt_tokens": tick * (9200 + 150 * number) if is_prefill else 0,
        "num_generation_tokens": 0 if is_prefill else tick * (410 + 7 * number),
        "prefix_cache_queries": 1000,
        "prefix_cache_hits": 310 + number % 400,
        "kv_bytes_saved": tick * 48_000_000 if is_prefill else 0,
        "kv_bytes_loaded": 0 if is_prefill else tick * 48_000_000,
        "num_verified_drafts": 0 if is_prefill else tick * 400,
        "num_accepted_drafts": 0 if is_prefill else tick * (200 + 3 * number),
        "num_draft_verifications": 0 if is_prefill else tick * 120,
        "ranks": [],
    }
    base = {
        "address": f"10.0.{1 if is_prefill else 2}.{number}:50051",
        "role": role,
        "pod_id": f"{role}-{number}",
        "model": "qwen3-8b",
        "version": "1",
        "state": "ready",
        "detail": "",
        "num_requests": load["num_running"],
        "parallel_sizes": {},
        "proposer": None if is_prefill else "ngram",
        "load": load,
    }
    return base | changes


def cluster(tick: int, pods: list[dict[str, Any]], *, handoffs: int = 4) -> dict[str, Any]:
    prefill = [each["address"] for each in pods if each["role"] == "prefill"]
    decode = [each["address"] for each in pods if each["role"] == "decode"]
    pairs = [(one, other) for other in decode for one in prefill][:handoffs]
    view = {
        "object": "cluster",
        "at_s": 100.0 + tick,
        "num_under_way": sum(each["num_requests"] for each in pods if each["role"] == "decode"),
        "models": [{"name": "qwen3-8b", "reason": "", "num_queued": 2, "adapters": ["polite"]}],
        "pods": pods,
        "handoffs": [
            {"prefill": one, "decode": other, "num_running": 3 - index % 4, "num_ended": 9 + index}
            for index, (one, other) in enumerate(pairs)
        ],
    }
    return _checked(view, ClusterView)


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "id": "chat-4f2a91",
        "model": "qwen3-8b",
        "tenant": "team-a",
        "status": "finished",
        "finish_reason": "stop",
        "error": None,
        "started_at": "2026-11-22T13:38:13.632Z",
        "num_prompt_tokens": 3817,
        "num_cached_tokens": 512,
        "num_output_tokens": 181,
        "num_verified_drafts": 152,
        "num_accepted_drafts": 96,
        "ttft_ms": 612.4,
        "duration_ms": 4210.7,
        "longest_gap_ms": 417.9,
        "prefill_pod": "10.0.1.2:50051",
        "decode_pod": "10.0.2.1:50051",
        "num_events": 2,
    } | changes


def request_list(*requests: dict[str, Any]) -> dict[str, Any]:
    return _checked({"object": "list", "max_kept": 1000, "data": list(requests)}, RequestList)


def timeline(request: dict[str, Any], reason: str = "planned") -> dict[str, Any]:
    prefill, decode = request["prefill_pod"], request["decode_pod"]
    phases = [
        ("receive", "router", 0.0, 1.2, None, None, None),
        ("tokenize", "router", 1.2, 7.9, None, None, None),
        ("admission", "router", 9.1, 84.3, None, None, None),
        ("first_token", "router", 93.4, 519.0, None, None, None),
        ("route", "router", 93.4, 0.2, None, 1, reason),
        ("prefill_queue", "prefill", 94.6, 61.0, prefill, 1, None),
        ("prefill", "prefill", 155.6, 452.1, prefill, 1, None),
        ("decode_queue", "decode", 94.5, 2.2, decode, 1, None),
        ("transfer", "decode", 598.0, 180.0, decode, 1, None),
        ("first_decode", "decode", 778.0, 31.0, decode, 1, None),
        ("decode", "decode", 809.0, 3401.7, decode, 1, None),
        ("stream", "router", 612.4, 3598.3, None, None, None),
    ]
    names = ("name", "where", "start_ms", "duration_ms", "pod", "attempt", "reason")
    uppers = [1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0]
    whole = {
        "object": "request",
        "request": request,
        "phases": [dict(zip(names, phase, strict=True)) for phase in phases],
        "events": [
            {"at_ms": 140.0, "event": "prefill_failed", "reason": "unavailable", "pod": "10.0.1.1:50051"},
            {"at_ms": 141.0, "event": "prefill_retry", "reason": "unavailable", "pod": prefill},
        ],
        "gaps": {
            "upper_ms": uppers,
            "counts": [0, 0, 41, 126, 10, 2, 0, 1, 0],
            "longest_ms": 417.9,
            "longest_at_ms": 2104.0,
            "longest_before_token": 71,
        },
        "num_left_out": 0,
    }
    return _checked(whole, RequestTimeline)


def _checked(answer: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Raises msgspec.ValidationError unless a router could answer so."""
    msgspec.convert(answer, kind)
    return answer


async def answer_with(page: Page, path: str, answer: Callable[[], dict[str, Any]]) -> None:
    """Has the page's requests of this path answered so, by no router."""

    async def fulfil(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(answer()))

    await page.route(lambda url: url.split("?")[0].endswith(path), fulfil)
