"""Figures of pods and of the whole cluster, from two views of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cli.top.answers import ClusterView, Load, Pod, Rank
from cli.top.words import byte_rate, count, percent, plain, rate

READY = "ready"
_DIGITS = re.compile(r"(\d+)")


class PodFigures(NamedTuple):
    """A pod with its rates per second. None: unknown, as there are no two reports of the same start of the pod."""

    pod: Pod
    prompt_rate: float | None
    output_rate: float | None
    kv_rate: float | None  # bytes per second that arrived by handoff

    @property
    def key(self) -> str:
        """Identifies it among all pods."""
        return self.pod.key

    @property
    def kv_use(self) -> float | None:
        """The share of its KV blocks that is in use."""
        load = self.pod.load
        return None if load is None or load.num_blocks <= 0 else 1 - load.num_free_blocks / load.num_blocks

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that its prefix cache had, since its start."""
        load = self.pod.load
        return (
            None
            if load is None or not load.prefix_cache_queries
            else load.prefix_cache_hits / load.prefix_cache_queries
        )

    @property
    def draft_share(self) -> float | None:
        """The share of verified drafts that were right, since its start."""
        load = self.pod.load
        return (
            None
            if load is None or not load.num_verified_drafts
            else load.num_accepted_drafts / load.num_verified_drafts
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step of a request that verified drafts, since the pod's start."""
        load = self.pod.load
        if load is None or not load.num_draft_verifications:
            return None
        return 1 + load.num_accepted_drafts / load.num_draft_verifications


class ClusterFigures(NamedTuple):
    """A view with its rates. Pods are sorted by role and name."""

    view: ClusterView
    pods: list[PodFigures]

    @property
    def summary(self) -> list[str]:
        """Three lines: the pods there are, how busy they are, and the models they serve."""
        pods = [figures.pod for figures in self.pods]
        roles = "".join(
            f"  {role} {_ready(pod for pod in pods if pod.role == role)}"
            for role in ("prefill", "decode")
            if any(pod.role == role for pod in pods)
        )
        queued = sum(model.num_queued for model in self.view.models)
        rates = (
            f"Prompt {rate(_sum(each.prompt_rate for each in self.pods))} tok/s",
            f"Output {rate(_sum(each.output_rate for each in self.pods))} tok/s",
            f"KV handed over {byte_rate(_sum(each.kv_rate for each in self.pods))}",
        )
        models = "   ".join(
            f"{plain(model.name)}: {plain(model.reason) or 'served'}, {count(model.num_queued)} queued"
            + (f", adapters {', '.join(map(plain, model.adapters))}" if model.adapters else "")
            for model in self.view.models
        )
        return [
            f"Pods ready {_ready(pods)}{roles}   Requests {count(self.view.num_under_way)}   Queued {count(queued)}",
            "   ".join(rates),
            models or "No model is served yet.",
        ]


def figures_of(view: ClusterView, before: ClusterView | None) -> ClusterFigures:
    """Returns the figures of a view, with rates since the one before."""
    passed_s = view.at_s - before.at_s if before is not None else 0.0
    loads = {pod.key: pod.load for pod in before.pods} if before is not None and passed_s > 0 else {}
    pods = [_pod_figures(pod, loads.get(pod.key), passed_s) for pod in view.pods]
    pods.sort(key=lambda figures: (figures.pod.role != "prefill", natural(figures.pod.name), figures.pod.address))
    return ClusterFigures(view, pods)


def natural(text: str) -> list[tuple[int, str]]:
    """Returns what sorts decode-2 before decode-10."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() and len(part) < 19 else (-1, part)
        for part in _DIGITS.split(text)
    ]


def changes_between(before: ClusterView, view: ClusterView) -> list[str]:
    """Returns which pods have come and gone, and which have another state and why."""
    old = {pod.key: pod for pod in before.pods}
    new = {pod.key for pod in view.pods}
    changes = []
    for pod in view.pods:
        was = old.get(pod.key)
        if was is None:
            changes.append(f"{_named(pod)} has joined")
        elif was.state != pod.state:
            why = f": {plain(pod.detail)}" if pod.detail else ""
            changes.append(f"{_named(pod)}: {plain(was.state)} to {plain(pod.state)}{why}")
    changes += [f"{_named(pod)} has left" for pod in before.pods if pod.key not in new]
    return changes


def handoff_lines(view: ClusterView) -> list[str]:
    """Returns a line for each pair of pods, the busiest first."""
    names = {pod.address: plain(pod.name) for pod in view.pods}

    def line(prefill: str, decode: str, num_running: int, num_ended: int) -> str:
        pair = f"{names.get(prefill, plain(prefill))} to {names.get(decode, plain(decode))}"
        return f"{pair}: {count(num_running)} now, {count(num_ended)} ended"

    return [line(each.prefill, each.decode, each.num_running, each.num_ended) for each in view.handoffs]


def rank_lines(pod: Pod) -> list[str]:
    """Returns a line for each rank of the pod: what its steps' time went to, since its start."""
    ranks = [] if pod.load is None else pod.load.ranks

    def line(rank: Rank) -> str:
        total = rank.computing_s + rank.delayed_s + rank.waiting_s
        shares = [
            f"{word} {percent(seconds / total if total else None)}"
            for word, seconds in (
                ("computing", rank.computing_s),
                ("waiting", rank.waiting_s),
                ("without a core", rank.delayed_s),
            )
        ]
        engine = f"engine {rank.engine} " if "data_parallel_size" in pod.parallel_sizes else ""
        where = f"{engine}rank {rank.rank}: process {rank.pid}, {plain(rank.device)}, {rank.resident_bytes >> 20:,} MiB"
        return f"{where}, {', '.join(shares)}"

    return [line(rank) for rank in ranks]


def _named(pod: Pod) -> str:
    return plain(pod.name) if pod.pod_id is None else f"{plain(pod.pod_id)} at {plain(pod.address)}"


def _pod_figures(pod: Pod, old: Load | None, passed_s: float) -> PodFigures:
    now = pod.load
    if now is None or old is None:
        return PodFigures(pod, None, None, None)

    def per_second(new: int, old: int) -> float | None:
        return (new - old) / passed_s if new >= old else None  # a lower count means that the pod has restarted

    return PodFigures(
        pod,
        per_second(now.num_prompt_tokens, old.num_prompt_tokens),
        per_second(now.num_generation_tokens, old.num_generation_tokens),
        per_second(now.kv_bytes_loaded, old.kv_bytes_loaded),
    )


def _ready(pods: Iterable[Pod]) -> str:
    states: Sequence[str] = [pod.state for pod in pods]
    return f"{states.count(READY)}/{len(states)}"


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [each for each in rates if each is not None]
    return sum(known) if known else None
