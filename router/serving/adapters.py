"""LoRA adapters that operators load and unload while the router runs.

1. All ready pods of the model load the adapter. Unless all of them find the same digest, nothing else happens: an
   adapter without a name is forgotten by itself.
2. All of them give it its name, under one revision. The answer comes once each of them reports it.
3. A pod that joins later, or was not reached, is brought to what the others have, by every router that sees it. So
   routers need not know each other: a name that pods report is served by all.
4. An adapter that is unloaded gets no new requests at once. Pods keep it for a while, and for as long as routers say
   that they have requests with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from common.cancellation import end_tasks
from common.errors import (
    BatonError,
    ConflictError,
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
    make_error,
    quoted,
    shortened,
)
from common.types import AdapterName
from router.fairness.tenant import Tenant
from router.pods.cluster import Cluster
from router.pods.pod import Pod, PodState
from router.requests.bounds import MAX_MODEL_CHARS
from router.serving.administration import by_operator
from router.serving.config import is_model_name
from router.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 4096
_REPORT_TIMEOUT_S = 10.0  # until pods report a name that they have been given
_KEEP_INTERVAL_S = 10.0  # pods are told which adapters are still needed
_RETRY_S = 5.0  # a pod that could not be brought to what others have


_Answer = TypeVar("_Answer")


class AdaptedModels(Protocol):
    """The served models, and which adapters their requests have. Called on the event loop."""

    models: list[ServedModel]

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; None: the only one. Raises UnknownModelError."""

    def running_adapters(self, model: ServedModel) -> set[AdapterName]:
        """The adapters of the requests that run or wait for their turn."""


class Adapters:
    """The adapters of all models. `run` keeps pods in agreement."""

    def __init__(self, cluster: Cluster, service: AdaptedModels) -> None:
        self._service = service
        self._changed = asyncio.Event()
        self._naming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name: one load at a time
        self._bringing: dict[Pod, asyncio.Task[None]] = {}
        self._not_before: dict[Pod, float] = {}  # when a pod that failed is tried again; time.monotonic()
        cluster.on_change(self._changed.set)

    async def load(
        self, name: str, path: str, operator: Tenant, *, base_model: str | None = None, in_place: bool = False
    ) -> None:
        """Loads an adapter into all ready pods of its model. `in_place`: the name may be taken, and stands for this one
        from now on. Raises InvalidRequestError if it cannot be used, ConflictError if the name is taken or pods find
        different weights, OverloadedError if pods have too many, UnavailableError if there is no pod or one fails."""
        model = self._model_for(name, base_model)
        if not 0 < len(path) <= MAX_PATH_CHARS:
            raise InvalidRequestError(f"lora_path must have 1 to {MAX_PATH_CHARS} characters", param="lora_path")
        if not model.pods.can_pool:
            raise UnavailableError(model.pods.explain_pooling())
        digests = await _on_all(_ready(model), lambda pod: pod.load_adapter(path))
        digest = _agreed(digests, path)
        async with self._naming.setdefault(name, asyncio.Lock()):
            known = model.pods.adapters.latest.get(name)
            if known is not None and known.digest and known.digest != digest and (not in_place or known.is_permanent):
                advice = "it is in the pods' settings" if known.is_permanent else "load_inplace replaces them"
                problem = f"lora_name: {quoted(name)} has other weights, from {quoted(known.path)}; {advice}"
                raise ConflictError(problem, param="lora_name")
            if known is None or known.digest != digest:
                wanted = AdapterName(name, _revision_after(known), digest, path)
                await self._give_name(model, wanted, known)
            await self._until_reported(model, name, digest)
        logger.info("adapter %s was loaded from %s, %s", quoted(name), quoted(path), by_operator(operator))

    async def unload(self, name: str, operator: Tenant, *, base_model: str | None = None) -> None:
        """Refuses new requests for an adapter at once, and has the pods forget it. Raises UnknownModelError if there is
        none of this name, ConflictError for one of the pods' settings, UnavailableError if a pod could not be told,
        which is then tried again."""
        models = self._service.models if base_model is None else [self._service.model(base_model)]
        model = next((model for model in models if name in model.pods.adapters.served), None)
        if model is None:
            raise UnknownModelError(f"lora_name: the adapter {quoted(name)} is not loaded", param="lora_name")
        known = model.pods.adapters.served[name]
        if known.is_permanent:
            raise ConflictError(f"lora_name: {quoted(name)} is in the pods' settings", param="lora_name")
        gone = AdapterName(name, _revision_after(known), b"", known.path)
        model.pods.say_adapter(gone)
        await _on_all(_ready(model), lambda pod: pod.name_adapter(gone))
        logger.info("adapter %s was unloaded, %s", quoted(name), by_operator(operator))

    async def run(self) -> None:
        """Brings pods to what the others have, and has them keep what is needed, for ever. Cancel to end."""
        keep_at = time.monotonic() + _KEEP_INTERVAL_S
        try:
            while True:
                self._changed.clear()
                self._bring_all()
                if time.monotonic() >= keep_at:
                    keep_at = time.monotonic() + _KEEP_INTERVAL_S
                    await self._keep_needed()
                await self._wait(min([keep_at, *self._not_before.values()]) - time.monotonic())
        finally:
            await end_tasks(list(self._bringing.values()))

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()

    # --- loading ---

    def _model_for(self, name: str, base_model: str | None) -> ServedModel:
        """The model whose adapter it is to be."""
        if not is_model_name(name):
            raise InvalidRequestError(
                f"lora_name must have 1 to {MAX_MODEL_CHARS} printable characters", param="lora_name"
            )
        models = self._service.models
        if base_model is None and len(models) != 1:
            known = ", ".join(repr(model.name) for model in models)
            raise InvalidRequestError(
                f"base_model_name is required: this router serves {known}", param="base_model_name"
            )
        try:
            model = self._service.model(base_model)
        except UnknownModelError as error:
            raise UnknownModelError(f"base_model_name: {error.message}", param="base_model_name") from error
        if any(name in each.names for each in models):
            raise ConflictError(f"lora_name: {quoted(name)} is the name of a model", param="lora_name")
        if any(name in each.pods.adapters.served for each in models if each is not model):
            raise ConflictError(f"lora_name: {quoted(name)} is an adapter of another model", param="lora_name")
        return model

    async def _give_name(self, model: ServedModel, wanted: AdapterName, before: AdapterName | None) -> None:
        """All ready pods give the name, or it is taken back."""
        try:
            await _on_all(_ready(model), lambda pod: pod.name_adapter(wanted))
        except ConflictError:  # a later change of the name, which holds
            raise
        except BatonError:
            old = AdapterName(wanted.name, 0, b"", wanted.path) if before is None else before
            restored = old._replace(revision=wanted.revision + 1)  # before any other change
            model.pods.say_adapter(restored)
            self._changed.set()  # all pods are brought to it
            raise

    async def _until_reported(self, model: ServedModel, name: str, digest: bytes) -> None:
        def lacking() -> list[str]:
            return [_title(pod) for pod in _ready(model) if not _has(pod, name, digest)]

        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                while lacking():
                    await model.pods.changed()
        except TimeoutError:
            raise UnavailableError(f"{', '.join(lacking())}: the adapter is not there yet") from None

    # --- agreement ---

    def _bring_all(self) -> None:
        """Has a task bring each pod to what the others have that lacks something."""
        now = time.monotonic()
        self._not_before = {pod: at for pod, at in self._not_before.items() if at > now}
        for model in self._service.models:
            for pod in (*model.pods.decode_pods, *model.pods.prefill_pods):
                missing = _missing(pod, model)
                if missing and pod not in self._bringing and pod not in self._not_before:
                    self._bringing[pod] = asyncio.create_task(self._bring(pod, missing), name="adapters")

    async def _bring(self, pod: Pod, names: Sequence[AdapterName]) -> None:
        try:
            for name in names:
                try:
                    if name.digest:
                        await pod.load_adapter(name.path, name.digest)
                    await pod.name_adapter(name)
                except BatonError as error:
                    logger.warning("%s does not take the adapter %s: %s", _title(pod), quoted(name.name), error.message)
                    self._not_before[pod] = time.monotonic() + _RETRY_S
        finally:
            del self._bringing[pod]
            self._changed.set()

    async def _keep_needed(self) -> None:
        """Adapters without a name that requests of this router have stay for another while."""
        for model in self._service.models:
            named = {name.digest for name in model.pods.adapters.served.values()}
            for adapter in self._service.running_adapters(model):
                if adapter.digest not in named:
                    await asyncio.gather(*(_keep(pod, adapter) for pod in _ready(model)))


async def _keep(pod: Pod, adapter: AdapterName) -> None:
    if pod.adapters is not None and adapter.digest in pod.adapters.loaded:
        try:
            await pod.load_adapter(adapter.path, adapter.digest)
        except BatonError as error:
            logger.warning("%s does not keep the adapter %s: %s", _title(pod), quoted(adapter.name), error.message)


def _ready(model: ServedModel) -> list[Pod]:
    return [pod for pod in (*model.pods.decode_pods, *model.pods.prefill_pods) if pod.state is PodState.READY]


def _missing(pod: Pod, model: ServedModel) -> list[AdapterName]:
    """The names that the pod must be told."""
    reported = pod.adapters
    if not pod.fits or reported is None:
        return []
    return [name for name in model.pods.adapters.latest.values() if reported.lacks(name)]


def _has(pod: Pod, name: str, digest: bytes) -> bool:
    known = None if pod.adapters is None else pod.adapters.names.get(name)
    return known is not None and known.digest == digest


async def _on_all(pods: Sequence[Pod], call: Callable[[Pod], Awaitable[_Answer]]) -> dict[str, _Answer]:
    """Returns the answers of all pods. Raises the first error that counts, with the names of the pods that have failed;
    pods that have left meanwhile do not count."""
    answers = await asyncio.gather(*map(call, pods), return_exceptions=True)
    given: dict[str, _Answer] = {}
    failed: dict[str, BatonError] = {}
    for pod, answer in zip(pods, answers, strict=True):
        if isinstance(answer, BatonError):
            if pod.state is PodState.READY:
                failed[_title(pod)] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            given[_title(pod)] = answer
    if failed:
        error = next(iter(failed.values()))
        where = shortened(", ".join(failed), 200)
        raise make_error(error.code, f"{error.message} ({where})", param=error.param) from error
    if not given:
        raise UnavailableError("no pod is ready any more")
    return given


def _agreed(digests: Mapping[str, bytes], path: str) -> bytes:
    """The digest that all pods have found. Raises ConflictError."""
    if len(set(digests.values())) > 1:
        found = ", ".join(f"{digest.hex()[:16]} on {title}" for title, digest in digests.items())
        raise ConflictError(f"lora_path: the pods find different weights in {quoted(path)}: {found}", param="lora_path")
    return next(iter(digests.values()))


def _revision_after(known: AdapterName | None) -> int:
    """Clocks of routers may differ: a change is always later than what it changes."""
    return max(time.time_ns(), 0 if known is None else known.revision + 1)


def _title(pod: Pod) -> str:
    return f"{pod.role_name} pod {pod.address}"
