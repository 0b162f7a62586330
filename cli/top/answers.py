"""Answers of a router to GET /v1/cluster, /v1/requests and /v1/requests/{id}; docs/api.md describes the fields.

Fields that newer routers add are ignored.
"""

from __future__ import annotations

from typing import Literal

import msgspec

_SIZES = {"tensor_parallel_size": "TP", "pipeline_parallel_size": "PP", "data_parallel_size": "DP"}


class Model(msgspec.Struct, frozen=True):
    """A served model. `reason` says why no request for it can be served; empty: one can."""

    name: str
    reason: str
    num_queued: int
    adapters: list[str] = []  # names; a router of an earlier version tells none


class Rank(msgspec.Struct, frozen=True):
    """A rank of one of a pod's engines. Seconds are those of its steps since its start."""

    engine: int
    rank: int
    pid: int
    device: str
    resident_bytes: int
    computing_s: float
    delayed_s: float
    waiting_s: float


class Load(msgspec.Struct, frozen=True):
    """A pod's latest report. Tokens, bytes, queries, hits and drafts count from the pod's start."""

    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    num_blocks: int
    num_free_blocks: int
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    kv_bytes_loaded: int
    num_verified_drafts: int = 0
    num_accepted_drafts: int = 0
    num_draft_verifications: int = 0
    ranks: list[Rank] = []


class Pod(msgspec.Struct, frozen=True):
    """A pod as the router sees it. `detail` says why it is in this state."""

    address: str
    role: Literal["prefill", "decode"]
    pod_id: str | None
    model: str | None
    version: str | None
    state: str
    detail: str
    load: Load | None
    parallel_sizes: dict[str, int] = {}  # by setting
    proposer: str | None = None  # of drafts

    @property
    def key(self) -> str:
        """Identifies it among all pods."""
        return f"{self.role} {self.address}"

    @property
    def name(self) -> str:
        """Its id or, before it is first connected, its address."""
        return self.pod_id or self.address

    @property
    def cut(self) -> str:
        """How its model is cut over ranks: "TP 2 x PP 2"; empty: it is not."""
        sizes = [(_SIZES[name], size) for name, size in self.parallel_sizes.items() if name in _SIZES]
        return " x ".join(f"{letters} {size}" for letters, size in sizes)


class Handoffs(msgspec.Struct, frozen=True):
    """Requests between two pods: those that run, and those that ended in the last 10 s."""

    prefill: str
    decode: str
    num_running: int
    num_ended: int


class ClusterView(msgspec.Struct, frozen=True):
    """The cluster. `at_s` is the router's clock, for rates between two answers."""

    object: Literal["cluster"]
    at_s: float
    num_under_way: int
    models: list[Model]
    pods: list[Pod]
    handoffs: list[Handoffs]


class Request(msgspec.Struct, frozen=True):
    """A request of the last ones. Pods are null without an operator's key."""

    id: str
    model: str
    tenant: str
    status: str
    finish_reason: str | None
    error: str | None
    started_at: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: float | None
    duration_ms: float
    longest_gap_ms: float | None
    prefill_pod: str | None
    decode_pod: str | None
    num_events: int
    num_verified_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def key(self) -> str:
        """Identifies it, also where a client has used an id twice."""
        return f"{self.started_at} {self.id}"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status in ("finished", "failed")


class RequestList(msgspec.Struct, frozen=True):
    """The last requests, the newest first. `max_kept` is 0 where the router keeps none."""

    object: Literal["list"]
    max_kept: int
    data: list[Request]


class Phase(msgspec.Struct, frozen=True):
    """A part of a request's time. `start_ms` is since its arrival."""

    name: str
    where: Literal["router", "prefill", "decode"]
    start_ms: float
    duration_ms: float
    pod: str | None
    attempt: int | None
    reason: str | None


class Event(msgspec.Struct, frozen=True):
    """Something that went otherwise than planned."""

    at_ms: float
    event: str
    reason: str
    pod: str | None


class Gaps(msgspec.Struct, frozen=True):
    """Gaps between deliveries of tokens. The last of `counts` is of those above all of `upper_ms`."""

    upper_ms: list[float]
    counts: list[int]
    longest_ms: float
    longest_at_ms: float
    longest_before_token: int


class Timeline(msgspec.Struct, frozen=True):
    """A request's time, by phase and event."""

    object: Literal["request"]
    request: Request
    phases: list[Phase]
    events: list[Event]
    gaps: Gaps | None
    num_left_out: int
