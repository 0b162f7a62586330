"""All pods, and which of them fit together.

Which pods there are is for a Discovery to say, at any time. A pod that it no longer names gets nothing new, finishes
what this router has on it and is forgotten; named again before, it is kept as it is.

Which model a pod serves it says itself when it is connected, by name. A router that has one model and will have no
other takes every pod for it; else a pod that names none of its models is refused. ModelPods has what those of one model
agree on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Self

from common.cancellation import end_tasks
from common.errors import quoted
from common.pb import pods_pb2
from common.rpc.channel import ChannelOpener, open_channel
from router.discovery import Discovery, Endpoint, Endpoints, Role
from router.metrics import RouterMetrics
from router.placing.index import PrefixIndex
from router.placing.index_metrics import IndexMetrics
from router.pods.config import HealthConfig
from router.pods.health import Outcome, Reason
from router.pods.model_pods import ModelFacts, ModelPods
from router.pods.pod import Pod, PodState
from router.pods.relayed_figures import RelayedFigures

logger = logging.getLogger(__name__)

# Of a role's pods at once. If more seem to fail, the cause is more likely the requests or the network than the pods,
# and the others could not carry the load.
_MAX_EJECTED_SHARE = 0.5


class Cluster:
    """The pods that a Discovery names. A context manager: watches them from entry to exit."""

    def __init__(
        self,
        discovery: Discovery,
        metrics: RouterMetrics,
        index: PrefixIndex,
        opener: ChannelOpener = open_channel,
        health: HealthConfig = HealthConfig(),  # noqa: B008  (frozen)
        *,
        models: Sequence[tuple[str, ...]] = ((),),
        models_change: bool = False,
        needs_prefill_pods: bool = False,
    ) -> None:
        """`index` learns what the pods hold; `opener` makes the channels to them. `models`: the names of each model; if
        there is one, pods need not name it, unless `models_change`: more may be added. `needs_prefill_pods`: decode
        pods may not compute prompts."""
        self.index = index
        metrics.registry.register(IndexMetrics(index))
        self.prefill_pods: list[Pod] = []
        self.decode_pods: list[Pod] = []
        self.by_address: dict[str, Pod] = {}  # the one that is listed, if a leaving one has the same address
        self.models = [ModelPods(names, index, self.by_address) for names in models]
        self._only_model = self.models[0] if len(models) == 1 and not models_change else None
        self._model_by_name = {name: model for model in self.models for name in model.names}
        self._model_of: dict[Pod, ModelPods] = {}  # that it serves, if it is one of ours and known
        self._discovery = discovery
        self._opener = opener
        self._health = health
        self._needs_prefill_pods = needs_prefill_pods
        self._metrics = metrics.pods
        metrics.registry.register(RelayedFigures(lambda: self.pods))
        self._watched: dict[Pod, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # replaced at each change; waiters hold the old one
        self._listeners: list[Callable[[], None]] = []

    @property
    def pods(self) -> list[Pod]:
        """All of them, decode pods first."""
        return [*self.decode_pods, *self.prefill_pods]

    @property
    def can_serve(self) -> bool:
        """True if a request for some model could be answered now."""
        return any(model.can_serve for model in self.models)

    def ready_decode(self) -> list[Pod]:
        """Decode pods that take requests."""
        return [pod for pod in self.decode_pods if pod.state is PodState.READY]

    def ready_prefill(self) -> list[Pod]:
        """Prefill pods that take requests."""
        return [pod for pod in self.prefill_pods if pod.state is PodState.READY]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a pod's state changed."""
        self._listeners.append(listener)

    def add_model(self, names: tuple[str, ...]) -> ModelPods:
        """One more model. Pods with one of these names are its from now on, and no other's."""
        model = ModelPods(names, self.index, self.by_address)
        self.models.append(model)
        self._model_by_name.update(dict.fromkeys(names, model))
        self._judge()
        self.notify()
        return model

    def remove_model(self, model: ModelPods) -> None:
        """Its pods are refused from now on, unless another model has their names by now."""
        self.models.remove(model)
        self._model_by_name = {name: each for name, each in self._model_by_name.items() if each is not model}
        self._judge()
        self.notify()

    def update(self, endpoints: Endpoints) -> None:
        """Replaces the list of pods."""
        known = {Endpoint(pod.role_name, pod.address): pod for pod in self.pods}
        for endpoint, pod in known.items():
            pod.listed = endpoint in endpoints
        for endpoint in endpoints:
            if endpoint not in known:
                known[endpoint] = self._add(endpoint)
            self.by_address[endpoint.address] = known[endpoint]
        self._judge()
        for pod in known.values():
            self._forget_if_done(pod)

    async def __aenter__(self) -> Self:
        self.update(self._discovery.initial)
        self._spawn(self._discovery.follow(self.update), "discovery")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end_tasks(list(self._tasks))

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    def _of_role(self, role: Role) -> list[Pod]:
        return self.prefill_pods if role == "prefill" else self.decode_pods

    def _add(self, endpoint: Endpoint) -> Pod:
        """Watches a pod that has joined."""
        is_prefill = endpoint.role == "prefill"
        role = pods_pb2.POD_ROLE_PREFILL if is_prefill else pods_pb2.POD_ROLE_DECODE
        pod = Pod(role, endpoint.address, self._judge, self.index, self._opener, health=self._health, owner=self)
        pod.on_idle = lambda: self._forget_if_done(pod)
        self._of_role(endpoint.role).append(pod)
        self._assign(pod, self._only_model)
        self._watched[pod] = self._spawn(pod.watch(), f"watch {pod.address}")
        self._show(pod)
        return pod

    def _forget_if_done(self, pod: Pod) -> None:
        """A pod that has left keeps its connection until the requests on it have ended."""
        if pod.listed or pod.num_requests or (watch := self._watched.pop(pod, None)) is None:
            return
        watch.cancel()
        self._of_role(pod.role_name).remove(pod)
        self._assign(pod, None)
        if self.by_address.get(pod.address) is pod:
            del self.by_address[pod.address]
        self._metrics.forget(role=pod.role_name, address=pod.address)
        logger.info("%s pod %s has left", pod.role_name, pod.address)
        self.notify()

    # --- health (PodOwner) ---

    def may_eject(self, pod: Pod, *, is_certain: bool) -> bool:
        """See PodOwner. Never the last of its model that is ready, and only a share of those that are listed; but any
        number of prefill pods that have stopped, since decode pods compute prompts as well."""
        if is_certain and pod in self.prefill_pods and not self._needs_prefill_pods:
            return True
        model = self._model_of.get(pod)
        peers = [each for each in self._of_role(pod.role_name) if each.listed and self._model_of.get(each) is model]
        num_ejected = sum(peer.health.is_ejected for peer in peers if peer is not pod)
        is_last = not any(peer.state is PodState.READY for peer in peers if peer is not pod)
        return not is_last and num_ejected + 1 <= _MAX_EJECTED_SHARE * len(peers)

    def note_ejection(self, pod: Pod, reason: Reason) -> None:
        """See PodOwner."""
        self._metrics.ejections.labels(pod.role_name, pod.address, reason).inc()

    def note_canary(self, pod: Pod, outcome: Outcome) -> None:
        """See PodOwner."""
        self._metrics.canaries.labels(pod.role_name, pod.address, outcome).inc()

    # --- judging ---

    def _judge(self) -> None:
        """Decides which model each pod serves, and which pods fit; called whenever a pod's state may have changed."""
        if self._only_model is None:
            for pod in self.pods:
                if pod.info is not None:
                    self._assign(pod, self._model_by_name.get(pod.info.model_name))
        for model in self.models:
            model.settle_facts()
        addresses: dict[tuple[str, int], str] = {}  # of the pods that are listed, by incarnation
        for pod in self.pods:
            if pod.info is None:
                continue
            pod.fits, pod.refusal = self._verdict(pod, pod.info)
            if pod.listed and pod.fits:
                first = addresses.setdefault((pod.info.pod_id, pod.info.incarnation), pod.address)
                if first != pod.address:  # as a name with A and AAAA records has it
                    pod.fits, pod.refusal = False, f"it is the pod at {first}"
        for model in self.models:
            model.settle_adapters()
        self._report()

    def _verdict(self, pod: Pod, info: pods_pb2.PodInfo) -> tuple[bool | None, str]:
        """Whether it fits (None: it cannot be said yet), and why not."""
        if info.role != pod.role:
            return False, f"it is not a {pod.role_name} pod"
        if violation := pod.violation or _invalid_facts(info):
            return False, violation
        if (model := self._model_of.get(pod)) is None:
            known = ", ".join(self._model_by_name) or "no model"
            return False, f"it serves the model {quoted(info.model_name)}, and this router serves {known}"
        if model.facts is None:
            return None, ""
        mismatch = model.facts.mismatch(ModelFacts.of(info))
        return not mismatch, mismatch

    def _assign(self, pod: Pod, model: ModelPods | None) -> None:
        """Puts the pod among those of `model`; None: it has left, or its model is not served here."""
        before = self._model_of.get(pod)
        if before is model:
            return
        if before is not None:
            before.leave_table(pod)
            before.remove(pod)
            del self._model_of[pod]
        if model is not None:
            self._model_of[pod] = model
            model.add(pod)

    def _report(self) -> None:
        changed = False
        for pod in self.pods:
            state = pod.state
            self._enter_or_leave(pod, state)
            if pod.adapters is not pod.shown_adapters:
                pod.shown_adapters, changed = pod.adapters, True
            if state is not pod.shown:
                changed = True
                self._show(pod)
                log = logger.warning if state in (PodState.REFUSED, PodState.EJECTED) else logger.info
                pod.canaries.wake()
                log("%s pod %s is %s%s", pod.role_name, pod.address, state.value, f": {pod.detail}" * bool(pod.detail))
        if changed:
            self.notify()

    def _show(self, pod: Pod) -> None:
        pod.shown = pod.state
        self._metrics.ready.labels(pod.role_name, pod.address).set(pod.shown is PodState.READY)

    def notify(self) -> None:
        """Tells those who wait that a pod's state has changed, or a model."""
        self._changed.set()
        self._changed = asyncio.Event()
        for model in self.models:
            model.notify()
        for listener in self._listeners:
            listener()

    def _enter_or_leave(self, pod: Pod, state: PodState) -> None:
        """Only ready pods are in the tables that policies choose from."""
        if (model := self._model_of.get(pod)) is None:
            return
        if state is PodState.READY:
            model.enter_table(pod)
        else:
            model.leave_table(pod)


def _invalid_facts(info: pods_pb2.PodInfo) -> str:
    """Which fact that a pod reports is invalid; empty: none."""
    for name in ("block_size", "num_blocks", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(info, name) < 1:
            return f"it reports an invalid {name}: {getattr(info, name)}"
    if any(token_id >= info.vocab_size for token_id in info.eos_token_ids):
        return f"it reports end-of-sequence tokens outside its vocabulary: {list(info.eos_token_ids)[:8]}"
    if not 0 <= info.target_itl_ms < math.inf:
        return f"it reports an invalid target_itl_ms: {info.target_itl_ms}"
    return ""


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
