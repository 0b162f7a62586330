"""The cluster as it is now, as operators see it; workers of a router tell each other the same."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec.structs import replace

from common.pb import pods_pb2
from router.pods.pod import Pod
from router.serving.served_model import ServedModel
from router.timelines.book import TimelineBook
from router.timelines.timeline import Timeline
from router.wire.answer_struct import AnswerStruct

_RECENT_S = 10.0
_MAX_PAIRS = 64  # pairs of pods that are listed, those with most handoffs
_MAX_WORD_CHARS = 64  # of what a pod says of itself
_MAX_RANKS = 64  # ranks of a pod that are listed
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class ClusterModel(AnswerStruct):
    """A served model; `reason`: why no request for it can be served, empty if one can. `num_queued`: requests that wait
    in the router. `adapters`: names of its LoRA adapters."""

    name: str
    reason: str
    num_queued: int
    adapters: list[str]


class ClusterRank(AnswerStruct):
    """A rank of one of a pod's engines, and the time of its steps since its start: on a core (computing), without one
    though it could go on (delayed), asleep until others had come as far (waiting)."""

    engine: int
    rank: int
    pid: int
    device: str
    resident_bytes: int
    num_steps: int
    computing_s: float
    delayed_s: float
    waiting_s: float


class ClusterLoad(AnswerStruct):
    """A pod's latest report. Tokens, bytes, preemptions, queries, hits and drafts count from the pod's start.
    `num_draft_verifications`: steps of one request each, which gave a token more than drafts were accepted."""

    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    num_queued_tokens: int
    num_blocks: int
    num_free_blocks: int
    last_step_ms: float
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    kv_bytes_saved: int
    kv_bytes_loaded: int
    num_verified_drafts: int
    num_accepted_drafts: int
    num_draft_verifications: int
    ranks: list[ClusterRank]


class ClusterPod(AnswerStruct):
    """A pod as the router sees it; `detail` says why it is in this state. `num_requests`: of this router. `version`
    and `load` are null while it is not connected; `pod_id` stays that of the last connection, null before the first.
    `parallel_sizes` says how its model is cut over ranks, by setting: {"tensor_parallel_size": 2}; empty: it is not.
    `load.ranks` has at most 64. `proposer` is the method of its setting `speculative`; null: it has none."""

    address: str
    role: Literal["prefill", "decode"]
    pod_id: str | None
    model: str | None
    version: str | None
    state: str
    detail: str
    num_requests: int
    parallel_sizes: dict[str, int]
    proposer: str | None
    load: ClusterLoad | None


class ClusterHandoffs(AnswerStruct):
    """Requests of which `prefill` computes or computed the prompt and `decode` the answer: those that run, and those
    that ended in the last 10 s."""

    prefill: str
    decode: str
    num_running: int
    num_ended: int


class ClusterView(AnswerStruct):
    """Answer of GET /v1/cluster. `at_s`: the router's clock, for rates between two answers. `handoffs` are those of
    requests whose timelines are kept, of at most 64 pairs of pods."""

    object: Literal["cluster"]
    at_s: float
    num_under_way: int
    models: list[ClusterModel]
    pods: list[ClusterPod]
    handoffs: list[ClusterHandoffs]


def view_of_cluster(
    models: Iterable[ServedModel], pods: Iterable[Pod], timelines: TimelineBook, num_under_way: int
) -> ClusterView:
    """Returns this process's view of the cluster, and of its own work."""
    now = time.monotonic()
    return ClusterView(
        object="cluster",
        at_s=now,
        num_under_way=num_under_way,
        models=[
            ClusterModel(
                model.name,
                model.unavailable_reason,
                sum(gate.num_waiting for gate in model.gates),
                sorted(model.pods.adapters.served),
            )
            for model in models
        ],
        pods=[_pod(pod) for pod in pods],
        handoffs=_handoffs(timelines.newest_first(), now),
    )


def with_others(own: ClusterView, others: Sequence[ClusterView]) -> ClusterView:
    """Adds up the workers' own work; the pods are as this one sees them."""
    if not others:
        return own
    views = [own, *others]
    queued = Counter[str]()
    requests = Counter[str]()
    running = Counter[tuple[str, str]]()
    ended = Counter[tuple[str, str]]()
    for view in views:
        queued.update({model.name: model.num_queued for model in view.models})
        requests.update({pod.address: pod.num_requests for pod in view.pods})
        running.update({(each.prefill, each.decode): each.num_running for each in view.handoffs})
        ended.update({(each.prefill, each.decode): each.num_ended for each in view.handoffs})
    return replace(
        own,
        num_under_way=sum(view.num_under_way for view in views),
        models=[replace(model, num_queued=queued[model.name]) for model in own.models],
        pods=[replace(pod, num_requests=requests[pod.address]) for pod in own.pods],
        handoffs=_most(running, ended),
    )


def _pod(pod: Pod) -> ClusterPod:
    info = pod.info
    return ClusterPod(
        address=pod.address,
        role=pod.role_name,
        pod_id=None if pod.pod_id is None else pod.pod_id[:_MAX_WORD_CHARS],
        model=next(iter(pod.model_names), None),
        version=None if info is None else info.version[:_MAX_WORD_CHARS],
        state=pod.state.value,
        detail=pod.detail,
        num_requests=pod.num_requests,
        parallel_sizes={} if info is None else _sizes(info),
        proposer=None if info is None or not info.proposer else info.proposer[:_MAX_WORD_CHARS],
        load=_load(pod),
    )


def _sizes(info: pods_pb2.PodInfo) -> dict[str, int]:
    return {name: info.parallel_sizes[name] for name in _SIZES if info.parallel_sizes.get(name, 1) > 1}


def _load(pod: Pod) -> ClusterLoad | None:
    stats = pod.stats
    if stats is None:
        return None
    return ClusterLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_for_remote_kv=stats.num_waiting_for_remote_kv,
        num_queued_tokens=stats.num_queued_tokens,
        num_blocks=stats.num_blocks,
        num_free_blocks=min(stats.num_free_blocks, stats.num_blocks),
        last_step_ms=1000 * _seconds(stats.last_step_s),
        num_preemptions=stats.num_preemptions,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        kv_bytes_saved=stats.kv_bytes_saved,
        kv_bytes_loaded=stats.kv_bytes_loaded,
        num_verified_drafts=stats.drafts.num_verified,
        num_accepted_drafts=min(stats.drafts.num_accepted, stats.drafts.num_verified),
        num_draft_verifications=stats.drafts.num_verifications,
        ranks=[_rank(each) for each in stats.ranks[:_MAX_RANKS]],
    )


def _rank(rank: pods_pb2.RankStats) -> ClusterRank:
    return ClusterRank(
        engine=rank.engine,
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device[:_MAX_WORD_CHARS],
        resident_bytes=rank.resident_bytes,
        num_steps=rank.num_steps,
        computing_s=_seconds(rank.computing_s),
        delayed_s=_seconds(rank.delayed_s),
        waiting_s=_seconds(rank.waiting_s),
    )


def _seconds(value: float) -> float:
    return value if 0 <= value < math.inf else 0.0


def _handoffs(timelines: Iterable[Timeline], now: float) -> list[ClusterHandoffs]:
    """Between each prefill and decode pod, by the last attempts of requests whose timelines are kept."""
    running: Counter[tuple[str, str]] = Counter()
    recent: Counter[tuple[str, str]] = Counter()
    for timeline in timelines:
        pair = timeline.pods
        if not all(pair):
            continue
        if not timeline.is_over:
            running[pair] += 1
        elif timeline.arrived_at + timeline.duration_s(now) > now - _RECENT_S:
            recent[pair] += 1
    return _most(running, recent)


def _most(running: Counter[tuple[str, str]], ended: Counter[tuple[str, str]]) -> list[ClusterHandoffs]:
    most = (running + ended).most_common(_MAX_PAIRS)
    return [ClusterHandoffs(*pair, num_running=running[pair], num_ended=ended[pair]) for pair, _ in most]
