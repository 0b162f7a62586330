"""What the fronts call: admission, running generations by id, shutting down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager

from common.errors import BatonError, InvalidRequestError, OverloadedError, UnavailableError
from common.tokenization import Tokenizer
from common.types import FinishReason
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.generation import Generation
from router.metrics import RouterMetrics
from router.output import TextGeneration
from router.pods import Cluster
from router.preprocess import Preprocessor
from router.request import Draft, GenerationRequest
from router.routing import Plan
from router.terms import Tenant

_RETRY_AFTER_S = 1.0
_SHUTTING_DOWN = "the router is shutting down"


_RunningId = tuple[str, str]  # a tenant's name and a request id, which clients choose


class InferenceService:
    """Serves one model. `prepare` a draft, then `run` what comes of it."""

    def __init__(
        self, config: RouterConfig, model_name: str, tokenizer: Tokenizer, cluster: Cluster, metrics: RouterMetrics
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.cluster = cluster
        self.metrics = metrics
        self._preprocessor = Preprocessor(
            tokenizer,
            cluster,
            metrics,
            model_name=model_name,
            timeout_s=config.request_timeout_s,
            kv_failure_policy=config.kv_failure_policy,
        )
        self._dispatcher = Dispatcher(cluster, config, metrics)
        self._running: dict[_RunningId, Generation] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be served now; empty: one can."""
        return _SHUTTING_DOWN if self._draining else self._dispatcher.unavailable_reason

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is the served model or absent."""
        self._preprocessor.check_model(name)

    async def prepare(self, draft: Draft) -> GenerationRequest:
        """See Preprocessor.prepare."""
        request = await self._preprocessor.prepare(draft)
        self.metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        self.metrics.prompt_length.observe(len(request.prompt_token_ids))
        return request

    async def plan(self, draft: Draft) -> tuple[GenerationRequest, Plan]:
        """The request that comes of a draft, and where it would go now. Changes and counts nothing; raises as `prepare`
        and `run` do."""
        request = await self._preprocessor.prepare(draft)
        return request, self._dispatcher.plan(request)

    @contextmanager
    def run(self, requests: Sequence[GenerationRequest]) -> Iterator[list[TextGeneration]]:
        """Start generations together; leaving the context ends those that still run.

        Raises OverloadedError if they would exceed the most at once, UnavailableError if no pod is there for them or
        the router is shutting down, and InvalidRequestError if a request id is in use.
        """
        self._admit(requests)
        with ExitStack() as stack:
            stack.callback(self._forget, requests)
            for request in requests:
                self._running[_running_id(request)] = self._dispatcher.generate(request)
            self._idle.clear()
            generations = [stack.enter_context(self._running[_running_id(request)]) for request in requests]
            yield [TextGeneration(generation, self.tokenizer) for generation in generations]

    @asynccontextmanager
    async def counted_errors(self) -> AsyncIterator[None]:
        """Counts the error that a request fails with. A client that goes away is counted by its generation."""
        try:
            yield
        except BatonError as error:
            self.count_error(error)
            raise

    def count_error(self, error: BatonError) -> None:
        """Counts the error that a front refused a request with."""
        self.metrics.errors.labels(error.code.label).inc()

    def abort(self, request_id: str, tenant: Tenant) -> bool:
        """End a running generation of this tenant; its front gets what there is, with FinishReason.ABORT. False: there
        is none."""
        generation = self._running.get((tenant.name, request_id))
        if generation is None:
            return False
        generation.finish(FinishReason.ABORT)
        return True

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def drain(self, grace_s: float) -> None:
        """Wait until the running generations have ended; end them with an error after `grace_s` seconds."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for generation in list(self._running.values()):
                generation.fail(UnavailableError(_SHUTTING_DOWN))

    def close(self) -> None:
        """Release threads. Idempotent."""
        self._preprocessor.close()

    def _admit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._draining:
            raise UnavailableError(_SHUTTING_DOWN)
        limit = self.config.max_inflight
        if len(self._running) + len(requests) > limit:
            raise OverloadedError(
                f"{len(self._running)} of at most {limit} generations are under way; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        for request in requests:
            if _running_id(request) in self._running:
                raise InvalidRequestError(f"request_id {request.request_id} is running", param="request_id")

    def _forget(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._running.pop(_running_id(request), None)
        if not self._running:
            self._idle.set()


def _running_id(request: GenerationRequest) -> _RunningId:
    """Tenants know nothing of each other's ids."""
    return request.terms.tenant.name, request.request_id
