"""The pods that serve one model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from common.pb import pods_pb2
from common.types import AdapterName, PoolingFacts
from router.discovery import Role
from router.placing.index import PrefixIndex
from router.placing.policies import PodTable
from router.pods.adapters import AdapterTable
from router.pods.pod import Pod, PodState


class ModelFacts(NamedTuple):
    """The facts on which all pods must agree: the model, its tokens, the hashes of their blocks. The pods of each
    handoff compare how their KV lies."""

    fingerprint: bytes
    block_size: int  # tokens
    vocab_size: int
    kv_dtype: str

    @classmethod
    def of(cls, info: pods_pb2.PodInfo) -> ModelFacts:
        """Returns the facts of one pod."""
        return cls(info.fingerprint, info.block_size, info.vocab_size, info.kv_dtype)

    def mismatch(self, other: ModelFacts) -> str:
        """Why a pod with the facts `other` does not fit; empty: it does."""
        if self.block_size != other.block_size:
            return f"its block_size is {other.block_size}, the cluster's is {self.block_size}"
        if self.vocab_size != other.vocab_size:
            return f"its vocab_size is {other.vocab_size}, the cluster's is {self.vocab_size}"
        if self.kv_dtype != other.kv_dtype:
            return f"its KV is of {other.kv_dtype}, the cluster's of {self.kv_dtype}: see kv_cache_dtype"
        if self.fingerprint != other.fingerprint:
            return (
                f"its model fingerprint {other.fingerprint.hex()[:12]} differs from the cluster's "
                f"{self.fingerprint.hex()[:12]}: other weights, dtype or quantisation"
            )
        return ""


class ModelPods:
    """The pods of one model, and what they agree on. The Cluster puts pods in and takes them out.

    The decode pods decide, or the prefill pods if no decode pod is known: the first to connect sets the facts, which
    stay for as long as one that has them is connected. Every other pod of the model must agree with them or is refused.
    """

    def __init__(self, names: tuple[str, ...], index: PrefixIndex, by_address: Mapping[str, Pod]) -> None:
        """`index` and `by_address` are those of all pods."""
        self.names = names
        self.index = index
        self.by_address = by_address
        self.facts: ModelFacts | None = None  # None until a pod that decides has connected
        self.prefill_table = PodTable()  # ready prefill pods
        self.decode_table = PodTable()
        self.prefill_pods: list[Pod] = []
        self.decode_pods: list[Pod] = []
        self.adapters = AdapterTable()
        self._changed = asyncio.Event()  # replaced at each change; waiters hold the old one

    @property
    def can_serve(self) -> bool:
        """True if a request could be answered now."""
        return any(pod.state is PodState.READY for pod in self.decode_pods)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer that every ready decode pod can take; 0 if none is ready."""
        return min((pod.info.max_model_len for pod in self.ready_decode() if pod.info is not None), default=0)

    @property
    def can_pool(self) -> bool:
        """True if a prompt could be pooled now."""
        return bool(self._ready())

    @property
    def max_pooled_len(self) -> int:
        """Most tokens of a prompt that is pooled, which every pod that may compute it can take; 0 if none is ready."""
        ready = [pod for pod in self.prefill_pods if pod.state is PodState.READY] or self.ready_decode()
        return min((pod.info.max_model_len for pod in ready if pod.info is not None), default=0)

    @property
    def pooling(self) -> PoolingFacts:
        """The tasks of the model, as a connected pod says; nothing but answers, if none is."""
        infos = (pod.info for pod in (*self.decode_pods, *self.prefill_pods) if pod.fits and pod.info is not None)
        return next((_pooling_of(info) for info in infos), PoolingFacts())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens, as a decode pod says; empty if none is ready."""
        return next((tuple(pod.info.eos_token_ids) for pod in self.ready_decode() if pod.info is not None), ())

    def ready_decode(self) -> list[Pod]:
        """Decode pods that take requests."""
        return [pod for pod in self.decode_pods if pod.state is PodState.READY]

    def can_compute(self, adapter: bytes) -> bool:
        """True if a request with this adapter could be answered now; empty: one without any."""
        if not adapter:
            return self.can_serve
        return _any_has(self.ready_decode(), adapter)

    def can_pool_with(self, adapter: bytes) -> bool:
        """True if a prompt with this adapter could be pooled now; empty: one without any."""
        return _any_has(self._ready(), adapter) if adapter else self.can_pool

    async def changed(self) -> None:
        """Returns when the state or the adapters of a pod have changed."""
        await self._changed.wait()

    async def wait_until_ready(self, timeout_s: float, adapter: bytes = b"") -> bool:
        """Wait for a ready decode pod, which has the adapter if one is given; False if there is none after `timeout_s`
        seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.can_compute(adapter):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_until_pooling(self, timeout_s: float, adapter: bytes = b"") -> bool:
        """Wait for a pod that pools, and has the adapter if one is given; False if there is none after `timeout_s`
        seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.can_pool_with(adapter):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def explain(self) -> str:
        """Why nothing can be generated, in one line for clients: it names no pod. Operators have /health."""
        if self.decode_pods or not self.can_pool:
            return "no decode pod is ready: " + _counts(self.decode_pods)
        return "no decode pod is known, so that nothing is generated; prompts can be pooled (/v1/embeddings and others)"

    def explain_pooling(self) -> str:
        """Why no prompt can be pooled."""
        return "no pod is ready: " + _counts([*self.prefill_pods, *self.decode_pods])

    def _ready(self) -> list[Pod]:
        return [pod for pod in (*self.prefill_pods, *self.decode_pods) if pod.state is PodState.READY]

    # --- for the Cluster ---

    def of_role(self, role: Role) -> list[Pod]:
        """The pods of a role, ready or not."""
        return self.prefill_pods if role == "prefill" else self.decode_pods

    def table(self, role: Role) -> PodTable:
        """The ready pods of a role."""
        return self.prefill_table if role == "prefill" else self.decode_table

    def add(self, pod: Pod) -> None:
        """The pod serves this model."""
        self.of_role(pod.role_name).append(pod)
        pod.model_names = self.names
        pod.use_step_times(self.table(pod.role_name).step_times)

    def remove(self, pod: Pod) -> None:
        """The pod has left, or serves another model by now. It is not in the table."""
        self.of_role(pod.role_name).remove(pod)
        pod.model_names = ()

    def enter_table(self, pod: Pod) -> None:
        """The pod may be chosen. Idempotent."""
        table = self.table(pod.role_name)
        for engine in pod.engines:
            if engine.load.row is None:
                engine.load.row = table.add(pod.facts(engine), engine.load.current())
                engine.load.row.hold(engine.adapters)

    def leave_table(self, pod: Pod) -> None:
        """The pod may not be chosen. Idempotent."""
        for engine in pod.known_engines:
            if engine.load.row is not None:
                self.table(pod.role_name).remove(engine.load.row)
                engine.load.row = None

    def settle_facts(self) -> None:
        """Decides again what the pods must agree on."""
        offered = [ModelFacts.of(info) for info in self._deciding_infos()]
        if offered and self.facts not in offered:
            self.facts = offered[0]

    def settle_adapters(self) -> None:
        """Takes what the pods that fit say of their adapters."""
        pods = [*self.decode_pods, *self.prefill_pods]
        self.adapters.settle(pod.adapters for pod in pods if pod.fits and pod.adapters is not None)

    def say_adapter(self, name: AdapterName) -> None:
        """This router has changed the name of an adapter, which holds for requests from now on."""
        self.adapters.say(name)
        self.settle_adapters()

    def notify(self) -> None:
        """A pod's state has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _deciding_infos(self) -> Iterator[pods_pb2.PodInfo]:
        for pod in self.decode_pods or self.prefill_pods:
            if pod.info is not None and pod.info.role == pod.role:
                yield pod.info


def _counts(pods: Sequence[Pod]) -> str:
    states = Counter(pod.state.value for pod in pods)
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none is known"


def _pooling_of(info: pods_pb2.PodInfo) -> PoolingFacts:
    told = info.pooling
    if not told.tasks:
        return PoolingFacts()
    return PoolingFacts(tasks=tuple(told.tasks), embedding_size=told.embedding_size, labels=tuple(told.labels))


def _any_has(pods: Iterable[Pod], adapter: bytes) -> bool:
    return any(adapter in engine.adapters.loaded for pod in pods for engine in pod.engines)
