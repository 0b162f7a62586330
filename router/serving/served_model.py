"""One of the models that a router serves: its tokenizer, its sampling defaults, its pods and its queue."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import UnavailableError, quoted
from common.generation_config import SamplingDefaults
from common.tokenization import Tokenizer
from common.types import AdapterName, PoolingFacts
from router.admission.admission import Admission
from router.admission.gate import Gate
from router.admission.room import Room
from router.dispatching.dispatcher import Dispatcher
from router.metrics import RouterMetrics
from router.pods.model_pods import ModelPods
from router.replies.reply import ReplyParsing
from router.requests.preprocess import Preprocessor
from router.requests.request import Draft, GenerationRequest
from router.serving.config import ServingConfig


class ModelSource(NamedTuple):
    """The parts of a model that the router has read."""

    names: tuple[str, ...]  # the first is in answers, the others are aliases
    location: str  # directory or hub id; empty: the demo model
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults
    parsing: ReplyParsing


class PoolingPods:
    """The pods as the gate of prompts that are pooled sees them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def room(self) -> Room:
        """See gate.Pods."""
        return self._dispatcher.pooling_room()

    @property
    def unavailable_reason(self) -> str:
        """See gate.Pods."""
        return self._dispatcher.pooling_unavailable_reason


class ServedModel:
    """The path of requests for one model. Close it."""

    def __init__(
        self,
        model_id: int,
        source: ModelSource,
        pods: ModelPods,
        config: ServingConfig,
        metrics: RouterMetrics,
    ) -> None:
        """`model_id` is unique in this process, unlike names; `pods` are those of the cluster that serve it."""
        self.model_id = model_id
        self.name = source.names[0]
        self.names = source.names
        self.location = source.location
        self._pod_wait_s = config.survival.pod_wait_s
        self.tokenizer = source.tokenizer
        self.parsing = source.parsing
        self.pods = pods
        self.metrics = metrics.generations.of(self.name)
        self.preprocessor = Preprocessor(
            source.tokenizer,
            pods,
            self.metrics,
            model_id=model_id,
            timeout_s=config.request_timeout_s,
            kv_failure_policy=config.kv_failure_policy,
            sampling_defaults=source.sampling_defaults,
            max_prompt_tokens=config.max_prompt_tokens,
        )
        self.dispatcher = Dispatcher(pods, config.routing, config.survival, self.metrics, metrics)
        self.gate = Gate(
            Admission(config.admission),
            self.dispatcher,
            metrics.queues.of(self.name),
            pod_wait_s=config.survival.pod_wait_s,
        )
        self.pooling_gate = Gate(
            Admission(config.admission),
            PoolingPods(self.dispatcher),
            metrics.queues.of(self.name),
            pod_wait_s=config.survival.pod_wait_s,
        )
        pods.prefill_table.on_change(self.wake_gates)
        pods.decode_table.on_change(self.wake_gates)

    @property
    def gates(self) -> tuple[Gate, Gate]:
        """The gates of generations and of prompts that are pooled, which do not wait for each other."""
        return self.gate, self.pooling_gate

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer; of a prompt where nothing is generated; 0 while no pod is ready."""
        return self.pods.max_model_len or self.pods.max_pooled_len

    @property
    def pooling_facts(self) -> PoolingFacts:
        """The tasks of the model. Raises UnavailableError without a pod that says so."""
        if not self.pods.can_pool:
            raise UnavailableError(self.pods.explain_pooling())
        return self.pods.pooling

    @property
    def unavailable_reason(self) -> str:
        """Why no request for it can be served now; empty: one can, if only a prompt that is pooled where there are no
        decode pods."""
        reason = self.dispatcher.unavailable_reason
        return "" if not self.pods.decode_pods and self.pods.can_pool else reason

    @property
    def fingerprint(self) -> bytes:
        """The model's fingerprint; empty until a pod has told it."""
        return b"" if self.pods.facts is None else self.pods.facts.fingerprint

    def wake_gates(self) -> None:
        """There may be room now. See Gate."""
        self.gate.wake()
        self.pooling_gate.wake()

    async def _wait_for(self, adapter: AdapterName, *, pools: bool) -> bool:
        wait = self.pods.wait_until_pooling if pools else self.pods.wait_until_ready
        return await wait(self._pod_wait_s, adapter.digest)

    async def prepare(self, draft: Draft, adapter: AdapterName | None = None) -> GenerationRequest:
        """Raises as Preprocessor.prepare does. A pod that has just started gets its adapters, for which this waits."""
        pools = draft.pooling is not None
        could = self.pods.can_pool if pools else self.pods.can_serve
        if adapter is not None and could and not await self._wait_for(adapter, pools=pools):
            raise UnavailableError(f"no pod is ready that has the adapter {quoted(adapter.name)}")
        return await self.preprocessor.prepare(draft, adapter)

    def name_of(self, request: GenerationRequest) -> str:
        """The name of the model in the answer to a request."""
        return self.name if request.adapter is None else request.adapter.name

    def close(self) -> None:
        """Release threads. Idempotent."""
        self.preprocessor.close()
