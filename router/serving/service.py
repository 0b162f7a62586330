"""The service behind the fronts: admission, running generations by id, shutting down."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from common.errors import (
    BatonError,
    ErrorCode,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnattainableError,
    UnavailableError,
    UnknownModelError,
    quoted,
)
from common.types import AdapterName, FinishReason
from router.admission.admission import Outlook
from router.admission.appraisal import appraise, longest_of, unplanned_ticket
from router.admission.forecast import forecast
from router.admission.limits import Limits
from router.dispatching.batch import Batch
from router.dispatching.drain import DrainWatch
from router.dispatching.generation import Generation
from router.dispatching.kept import ResumableStreams
from router.dispatching.pooling import PoolingRun
from router.dispatching.text_generation import TextGeneration
from router.fairness.queue import Ticket
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.metrics import RouterMetrics
from router.placing.planner import Plan
from router.pods.cluster import Cluster
from router.pods.model_pods import ModelPods
from router.requests.bounds import MAX_MODEL_CHARS
from router.requests.preprocess import choice_id
from router.requests.request import Draft, GenerationRequest
from router.serving.adapters import Adapters
from router.serving.administration import Administration
from router.serving.cluster_view import ClusterView, view_of_cluster
from router.serving.config import ServingConfig
from router.serving.peers import NoPeers, Peers
from router.serving.served_model import ModelSource, ServedModel
from router.timelines.book import TimelineBook
from router.tracing.tracing import RequestTracing

logger = logging.getLogger(__name__)

_SHUTTING_DOWN = "the router is shutting down"
_MAX_OTHER_VALUES = 4096  # JSON values that a body may have beside its prompt
_REMOVAL_MARGIN_S = 30.0  # beyond the deadline of the last request


_RunningId = tuple[str, str]  # a tenant's name and a request id, which clients choose


class Asked(NamedTuple):
    """The model that a client has named, by itself or by an adapter."""

    model: ServedModel
    adapter: AdapterName | None  # as it is now; None: the model alone

    @property
    def name(self) -> str:
        """The name that answers have."""
        return self.model.name if self.adapter is None else self.adapter.name

    async def prepare(self, draft: Draft) -> GenerationRequest:
        """Raises as ServedModel.prepare does."""
        return await self.model.prepare(draft, self.adapter)


class Run(NamedTuple):
    """Generations that were dispatched."""

    generations: list[TextGeneration]
    queued_s: float  # seconds in the queue


class InferenceService:
    """Serves one or several models. A `model` prepares a draft; then `run` what comes of it."""

    def __init__(
        self,
        config: ServingConfig,
        models: Sequence[ModelSource],
        cluster: Cluster,
        metrics: RouterMetrics,
        peers: Peers | None = None,
    ) -> None:
        """The models in the order of the cluster's. `peers`: other processes that serve the same clients."""
        self.config = config
        self.peers = peers or NoPeers()
        self.cluster = cluster
        self.metrics = metrics
        self.administration = Administration(cluster)
        self.adapters = Adapters(cluster, self)
        self.models: list[ServedModel] = []
        self._models: dict[str, ServedModel] = {}  # by name, aliases included
        self._models_by_id: dict[int, ServedModel] = {}  # includes removed models that may still have requests
        self._removals: dict[int, asyncio.TimerHandle] = {}  # timers after which removed models are forgotten
        self._model_ids = itertools.count()
        for source, pods in zip(models, cluster.models, strict=True):
            self._serve(source, pods)
        cluster.on_change(self._wake_gates)
        self.streams = ResumableStreams(
            window_s=config.survival.resume_window_s,
            max_bytes=config.survival.max_kept_bytes,
            metrics=metrics.survival,
            elsewhere=self.peers.take_over,
        )
        self.timelines = TimelineBook(config.max_timelines)
        self.tracing = RequestTracing(config.tracing, f"{socket.gethostname()}:{os.getpid()}", metrics.trace_spans)
        self._running: dict[_RunningId, Generation] = {}  # includes generations that wait for their turn
        self._leaving = DrainWatch(cluster, config.survival.migrate_on_drain_s, self._running.values())
        cluster.on_change(self._leaving.look)
        self._batches: dict[_RunningId, Batch] = {}  # batch of each running generation
        self._pooling: dict[_RunningId, PoolingRun] = {}  # includes those that wait for their turn
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be served now, of whatever model; empty: some model can be served."""
        if self._draining:
            return _SHUTTING_DOWN
        if not self.models:
            return "no model is served"
        reasons = [model.unavailable_reason for model in self.models]
        if not all(reasons):
            return ""
        if len(reasons) == 1:
            return reasons[0]
        each = zip(self.models, reasons, strict=True)
        return f"no model can be served: {'; '.join(f'{model.name}: {reason}' for model, reason in each)}"

    def asked(self, name: str | None, tenant: Tenant) -> Asked:
        """The model or adapter that a tenant names; without a name, the only model. Raises UnknownModelError if there
        is none that it may use, and InvalidRequestError without a name if there are several."""
        if not name:
            if len(self.models) == 1 and any(map(tenant.may_use, self.models[0].names)):
                return Asked(self.models[0], None)
            problem = f"model is required: this router serves {self._known_models(tenant)}"
            raise InvalidRequestError(problem, param="model")
        if len(name) > MAX_MODEL_CHARS:
            raise InvalidRequestError(f"model must have at most {MAX_MODEL_CHARS} characters", param="model")
        if tenant.may_use(name):
            if (model := self._models.get(name)) is not None:
                return Asked(model, None)
            for model in self.models:
                if (adapter := model.pods.adapters.served.get(name)) is not None:
                    return Asked(model, adapter)
        problem = f"the model {quoted(name)} is not served here; use {self._known_models(tenant)}"
        raise UnknownModelError(problem, param="model")

    def adapters_of(self, model: ServedModel) -> list[AdapterName]:
        """The adapters that requests may name, but for those of which a model has the name."""
        return [each for name, each in model.pods.adapters.served.items() if name not in self._models]

    def model(self, name: str | None) -> ServedModel:
        """Returns the model of this name, or the one whose adapter has it, without regard to a tenant's rights. Raises
        as `asked`."""
        return self.asked(name, Tenant()).model

    def _known_models(self, tenant: Tenant) -> str:
        adapters = [adapter.name for model in self.models for adapter in self.adapters_of(model)]
        return ", ".join(repr(name) for name in (*self._models, *adapters) if tenant.may_use(name)) or "no model"

    @property
    def num_under_way(self) -> int:
        """Generations, and requests that pool, that run or wait for their turn."""
        return len(self._running) + len(self._pooling)

    def cluster_view(self) -> ClusterView:
        """The cluster as this process sees it."""
        return view_of_cluster(self.models, self.cluster.pods, self.timelines, self.num_under_way)

    @property
    def max_request_tokens(self) -> int:
        """Most prompt tokens of one request, over its prompts and choices; one that fits the model may always come."""
        return max(self.config.max_request_tokens, self._max_model_len)

    @property
    def max_body_values(self) -> int:
        """Most JSON values of an HTTP body; the tokens of a prompt that fits the model may always come."""
        return max(self.config.max_body_values, self._max_model_len + _MAX_OTHER_VALUES)

    @property
    def _max_model_len(self) -> int:
        """The longest context of all models."""
        return max((model.max_model_len for model in self.models), default=0)

    def running_adapters(self, model: ServedModel) -> set[AdapterName]:
        """The adapters of the requests that run or wait for their turn."""
        running = [generation.request for generation in self._running.values()]
        running += [run.requests[0] for run in self._pooling.values()]
        return {each.adapter for each in running if each.adapter is not None and each.model_id == model.model_id}

    def model_of(self, request: GenerationRequest) -> ServedModel:
        """The model that prepared the request, which may have been removed since."""
        return self._models_by_id[request.model_id]

    def add_model(self, source: ModelSource) -> None:
        """Serves one more model. A model that has one of its names must have been removed; its requests that still wait
        fail, as their pods serve this one from now on."""
        for model in self._models_by_id.values():
            if set(model.names) & set(source.names):
                for gate in model.gates:
                    gate.fail_all(UnavailableError(f"the model {model.name} was replaced"))
        self._serve(source, self.cluster.add_model(source.names))
        logger.info("the model %s was added: %s", ", ".join(source.names), source.location)

    def remove_model(self, model: ServedModel) -> None:
        """Refuses new requests for the model. Those that came before go on, at most to their deadlines."""
        self.models.remove(model)
        for name in model.names:
            del self._models[name]
        delay_s = self.config.request_timeout_s + _REMOVAL_MARGIN_S
        self._removals[model.model_id] = asyncio.get_running_loop().call_later(delay_s, self._forget, model)
        self.cluster.notify()
        logger.info("the model %s was removed: %s", ", ".join(model.names), model.location)

    def count_prompts(self, requests: Sequence[GenerationRequest]) -> None:
        """Counts the prompts of what is about to run: one request for each, however many choices it has."""
        for request in requests:
            metrics = self.model_of(request).metrics
            metrics.prompt_tokens.inc(len(request.prompt_token_ids))
            metrics.prompt_length.observe(len(request.prompt_token_ids))

    def plan(self, request: GenerationRequest) -> Plan:
        """Plans the request's route as of now. Changes and counts nothing; raises the errors of `run`."""
        return self.model_of(request).dispatcher.plan(request)

    @asynccontextmanager
    async def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Run]:
        """Start generations of one model together when it is their turn; leaving the context ends those that still run.

        Raises OverloadedError if they would have to wait too long, or there is no place to wait in; UnattainableError
        if no pod can keep a limit that they name; UnavailableError if no pod is there for them or the router is
        shutting down; DeadlineExceededError if their deadline passes while they wait; and InvalidRequestError if a
        request id is in use, or they are more than may ever be under way.
        """
        self._check(requests)
        model = self.model_of(requests[0])
        ticket, outlook, plan = _appraise(requests, model)
        generations = [Generation(request, model.dispatcher) for request in requests]
        batch = Batch(generations, ticket, self.metrics, self.timelines, self.tracing)
        with batch, self._registered(batch):
            if plan is not None and len(generations) == 1 and model.gate.passes(ticket):
                generations[0].plan = plan  # still valid: it is dispatched before any load changes
            async with model.gate.admitted(ticket, outlook, lambda: _dispatch(batch, model)) as waited_s:
                while not batch.is_dispatched:
                    await others_turn(ticket.tenant)
                    _dispatch(batch, model)
                yield Run([TextGeneration(generation, model.tokenizer) for generation in generations], waited_s)

    @property
    def max_pooled_at_once(self) -> int:
        """Prompts of a request that are pooled which may be under way at once: those that a full queue still takes."""
        admission = self.config.admission
        return max(1, min(admission.max_inflight, admission.max_queued))

    @asynccontextmanager
    async def pool(
        self, requests: Sequence[GenerationRequest], at_once: int
    ) -> AsyncIterator[tuple[PoolingRun, float]]:
        """Begins to pool prompts of one request when it is its turn, `at_once` of them at a time; leaving the context
        ends what is left. Gives the run, and the seconds in the queue. Raises as `run` does."""
        first = requests[0]
        self._check_running([first])
        model = self.model_of(first)
        ticket, outlook = _appraise_pooling(requests, model, at_once)
        run = PoolingRun(requests, model.dispatcher, self.metrics, ticket)
        serial = self.timelines.keep(run.timeline)
        self._pooling[_running_id(first)] = run
        self._idle.clear()
        try:
            async with model.pooling_gate.admitted(ticket, outlook, run.start) as waited_s:
                yield run, waited_s
        except BatonError as error:
            if not run.is_started:
                run.note_failure(error)
                if isinstance(error, OverloadedError | UnattainableError):
                    self.timelines.drop(serial)  # its client was told why
            raise
        finally:
            await run.close()
            self.tracing.export([first], [run.timeline])
            del self._pooling[_running_id(first)]
            self._note_idle()

    @asynccontextmanager
    async def counted_errors(self) -> AsyncIterator[None]:
        """Counts the error that a request fails with. A client that goes away is counted by its generation."""
        try:
            yield
        except BatonError as error:
            self.count_error(error)
            raise
        except Exception:  # the front logs it and answers with an internal error
            self.metrics.errors.labels(ErrorCode.INTERNAL.label).inc()
            raise

    def count_error(self, error: BatonError) -> None:
        """Counts the error that a front refused a request with."""
        self.metrics.errors.labels(error.code.label).inc()

    def abort(self, request_id: str, tenant: Tenant) -> bool:
        """End a running request of this tenant, or one of its choices; its front gets what there is, with
        FinishReason.ABORT. False: there is none."""
        if (run := self._pooling.get((tenant.name, request_id))) is not None:
            run.fail(RequestCancelledError("the request was aborted"))
            self.model_of(run.requests[0]).pooling_gate.withdraw(run.ticket)
            return True
        batch = self._batches.get((tenant.name, request_id))
        if batch is not None:
            generations: Sequence[Generation] = [self._running[tenant.name, request_id]]
        else:
            batch = self._batches.get((tenant.name, choice_id(request_id, 0)))
            if batch is None or len(batch.generations) == 1:  # that id is another request's, which has one choice
                return False
            generations = batch.generations
        for generation in generations:
            generation.finish(FinishReason.ABORT)
        if batch.is_over:
            self.model_of(batch.generations[0].request).gate.withdraw(batch.ticket)
        return True

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def drain(self, grace_s: float) -> None:
        """Wait until all generations have ended, those that wait for their turn included; end them with an error after
        `grace_s` seconds."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for gate in [gate for model in self._models_by_id.values() for gate in model.gates]:
                gate.fail_all(UnavailableError(_SHUTTING_DOWN))
            for generation in list(self._running.values()):
                generation.fail(UnavailableError(_SHUTTING_DOWN))
            for run in list(self._pooling.values()):
                run.fail(UnavailableError(_SHUTTING_DOWN))

    def close(self) -> None:
        """Release threads and timers. Idempotent."""
        self._leaving.close()
        for removal in self._removals.values():
            removal.cancel()
        for model in self._models_by_id.values():
            model.close()

    def _serve(self, source: ModelSource, pods: ModelPods) -> None:
        model = ServedModel(next(self._model_ids), source, pods, self.config, self.metrics)
        self.models.append(model)
        self._models.update(dict.fromkeys(model.names, model))
        self._models_by_id[model.model_id] = model

    def _forget(self, model: ServedModel) -> None:
        """No request for a removed model can be left."""
        del self._removals[model.model_id], self._models_by_id[model.model_id]
        self.cluster.remove_model(model.pods)
        model.close()
        if all(other.name != model.name for other in self._models_by_id.values()):
            self.metrics.forget_model(model.name)

    def _wake_gates(self) -> None:
        for model in self._models_by_id.values():
            model.wake_gates()

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        self._check_running(requests)
        limit = self.config.admission.max_inflight
        if len(requests) > limit:
            raise InvalidRequestError(f"{len(requests)} generations at once are more than max_inflight, {limit}")

    def _check_running(self, requests: Sequence[GenerationRequest]) -> None:
        if self._draining:
            raise UnavailableError(_SHUTTING_DOWN)
        for request in requests:
            if _running_id(request) in self._running or _running_id(request) in self._pooling:
                raise InvalidRequestError(f"request_id {request.request_id} is running", param="request_id")

    @contextmanager
    def _registered(self, batch: Batch) -> Iterator[None]:
        ids = [_running_id(generation.request) for generation in batch.generations]
        self._running.update(zip(ids, batch.generations, strict=True))
        self._batches.update(dict.fromkeys(ids, batch))
        self._idle.clear()
        try:
            yield
        finally:
            for running_id in ids:
                del self._running[running_id], self._batches[running_id]
            self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_under_way:
            self._idle.set()


def _running_id(request: GenerationRequest) -> _RunningId:
    """Tenants know nothing of each other's ids."""
    return request.terms.tenant.name, request.request_id


def _appraise(requests: Sequence[GenerationRequest], model: ServedModel) -> tuple[Ticket, Outlook | None, Plan | None]:
    """Planning takes longer than all the rest here, so it is only done here if it decides on admission. The plan is
    that of the longest request."""
    dispatcher, gate, ticket = model.dispatcher, model.gate, unplanned_ticket(requests)
    if not requests[0].terms.has_limits and gate.passes(ticket):
        return ticket, None, None
    with dispatcher.expecting(gate.backlog_s):
        plan = dispatcher.plan(longest_of(requests))
    ticket, outlook = appraise(requests, plan, dispatcher.estimates, has_prefill_pods=dispatcher.sends_prompts_away)
    return ticket, outlook, plan


def _appraise_pooling(
    requests: Sequence[GenerationRequest], model: ServedModel, at_once: int
) -> tuple[Ticket, Outlook]:
    """A request that pools takes as many places as prompts of it are under way at once."""
    dispatcher, first = model.dispatcher, requests[0]
    ticket = unplanned_ticket(requests)
    ticket.num_requests = min(at_once, len(requests))
    ticket.cost = float(sum(len(request.prompt_token_ids) for request in requests))
    plan = dispatcher.plan_pooling(longest_of(requests))
    limits = Limits(first.deadline - first.arrived_at)
    return ticket, Outlook(limits, forecast(plan, dispatcher.estimates), 0.0)


def _dispatch(batch: Batch, model: ServedModel) -> None:
    with model.dispatcher.expecting(model.gate.backlog_s if batch.ticket.is_local else 0.0):
        batch.dispatch()
