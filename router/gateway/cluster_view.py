"""The cluster as it is now, for a page or a program that asks every second: GET /v1/cluster."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.pb import pods_pb2
from router.gateway.answers import ClusterHandoffs, ClusterLoad, ClusterModel, ClusterPod, ClusterRank, ClusterView
from router.pods import Pod
from router.service import InferenceService
from router.timelines.timeline import Timeline

CLUSTER_PATH = "/v1/cluster"

_RECENT_S = 10.0
_MAX_PAIRS = 64  # of pods between which KV goes; those with most handoffs
_MAX_WORD_CHARS = 64  # of what a pod says of itself
_MAX_RANKS = 64  # of a pod
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class ClusterEndpoint:
    """For operators where there are keys, as it names pods and shows what all tenants do. The guard above has checked
    the key."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    @property
    def route(self) -> Route:
        """The only one."""
        return Route(CLUSTER_PATH, self._cluster, methods=["GET"])

    async def _cluster(self, request: Request) -> Response:
        view = _with_others(view_of_cluster(self._service), await self._service.peers.clusters())
        return Response(msgspec.json.encode(view), media_type="application/json", headers=_HEADERS)


def view_of_cluster(service: InferenceService) -> ClusterView:
    """What this process sees, and what it does itself."""
    now = time.monotonic()
    return ClusterView(
        object="cluster",
        at_s=now,
        num_under_way=service.num_under_way,
        models=[
            ClusterModel(model.name, model.dispatcher.unavailable_reason, model.gate.num_waiting)
            for model in service.models
        ],
        pods=[_pod(pod) for pod in service.cluster.pods],
        handoffs=_handoffs(service.timelines.newest_first(), now),
    )


def _with_others(own: ClusterView, others: Sequence[ClusterView]) -> ClusterView:
    """What each worker does itself is added up; the pods are as this one sees them."""
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
        model=None if pod.model is None or not pod.model.names else pod.model.names[0],
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
        if not pair[0]:
            continue
        if not timeline.is_over:
            running[pair] += 1
        elif timeline.arrived_at + timeline.duration_s(now) > now - _RECENT_S:
            recent[pair] += 1
    return _most(running, recent)


def _most(running: Counter[tuple[str, str]], ended: Counter[tuple[str, str]]) -> list[ClusterHandoffs]:
    most = (running + ended).most_common(_MAX_PAIRS)
    return [ClusterHandoffs(*pair, num_running=running[pair], num_ended=ended[pair]) for pair, _ in most]
