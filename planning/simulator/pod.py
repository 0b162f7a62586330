"""A simulated pod: the engine's own scheduler and KV cache, whose steps take as long as a model of the hardware says.

As in the engine, a request that arrives while a step runs is looked at when the step has ended, and figures are
published at the ends of steps.

Drafts make steps that only decode shorter: one that would bring T tokens is simulated as T steps that share its time.
Whoever waits for the tokens gets them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from common.engine.config import SchedulerConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.step import ModelRunnerOutput, Outcome, SchedulerOutput
from common.engine.kv_cache import CacheChange, KVCacheManager, KVGroups
from common.engine.messages import AddRequest, EngineStats, KVTransferParams, RequestOutput, RequestStarted
from common.engine.scheduler.kv_transfers import HandedOver, NoTransfers
from common.engine.scheduler.request import Request
from common.engine.scheduler.scheduler import Scheduler
from common.engine.worker.step_measurement import measure_steps
from common.types import BlockHash, FinishReason, RequestId, SampledToken, SamplingParams, TransferId
from planning.simulator.clock import Clock
from planning.simulator.hardware import Hardware, Step, StepModel

_NO_LIMIT = 10**9
_UNLIKE = 1e-9  # share by which the durations of two steps in a row differ at least, as measured ones do
_WHOLE = 1 - 1e-9
_LAYER = KVGroupSpec(layers=(0,), num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="float32")


class Listener(Protocol):
    """Who waits for a request's leg."""

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """Its prompt has its turn for the first time."""

    def on_tokens(self) -> None:
        """A step has brought tokens."""

    def on_end(self) -> None:
        """All tokens were produced."""


class PodRequest:
    """A request's leg on one pod."""

    def __init__(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        role: Literal["producer", "consumer"] | None = None,
        listener: Listener,
    ) -> None:
        """`token_ids` of prompt and answer. A producer ends after one token; a consumer's KV and first token come by
        `SimulatedPod.deliver`."""
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.role = role
        self.listener = listener
        self.is_delivered = False
        self.num_known = 0  # tokens of prompt and output, so far
        self.num_computed = 0
        self.owed = 0.0  # the part of a step with drafts that has passed

    def message(self, request_id: RequestId) -> AddRequest:
        """Returns the command that adds it to an engine."""
        transfer = None
        if self.role is not None:
            transfer = KVTransferParams(transfer_id=TransferId(request_id), epoch=1, role=self.role)
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=list(self.token_ids[: self.num_prompt_tokens]),
            sampling=SamplingParams(max_tokens=self.num_output_tokens, ignore_eos=True),
            transfer=transfer,
        )

    def is_step_over(self, share: float) -> bool:
        """Whether a step with drafts ends, of which such a share has passed."""
        self.owed += share
        if self.owed < _WHOLE:
            return False
        self.owed -= 1
        return True


class SimulatedPod:
    """One pod. `on_change` is called when a step has ended, and before the next one begins."""

    def __init__(self, hardware: Hardware, clock: Clock, on_change: Callable[[SimulatedPod], None]) -> None:
        self.hardware = hardware
        self.busy_s = 0.0
        self._clock = clock
        self._on_change = on_change
        groups = KVGroups((_LAYER,), hardware.block_size)
        self._kv = KVCacheManager(hardware.num_blocks + 1, groups, enable_prefix_caching=True)  # one is the null block
        self._requests: dict[RequestId, PodRequest] = {}
        self._handoffs = _Handoffs(self._requests)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=hardware.max_num_batched_tokens,
                target_itl_ms=1e3 * hardware.target_itl_s,
                max_num_seqs=hardware.max_num_seqs,
                max_num_waiting=_NO_LIMIT,
            ),
            self._kv,
            max_model_len=hardware.num_blocks * hardware.block_size,
            vocab_size=2**32,
            eos_token_ids=frozenset(),
            transfers=self._handoffs,
            measured_steps=measured_steps(hardware.steps, hardware.max_num_batched_tokens),
        )
        self._arrived: list[PodRequest] = []  # since the step began
        self._is_computing = False
        self._last_step_s = 0.0
        self._numbers = itertools.count()

    @property
    def stats(self) -> EngineStats:
        """The engine's figures now."""
        return self._scheduler.stats()

    def submit(self, request: PodRequest) -> None:
        """Takes a request."""
        self._arrived.append(request)
        self._start_if_idle()

    def deliver(self, request: PodRequest) -> None:
        """The KV of a consumer's prompt is there, and its first token."""
        request.is_delivered = True
        self._handoffs.delivered(request)
        self._start_if_idle()

    def take_cache_change(self) -> CacheChange:
        """Returns the changes of the prefix cache since the last call."""
        return self._scheduler.take_cache_change()

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Counts the leading blocks that are in the prefix cache."""
        return len(self._kv.find_cached_prefix(_Prompt(hashes, self.hardware.block_size)))

    def check(self) -> list[str]:
        """Returns a line for each thing that should be gone; none: all is well."""
        report = self._scheduler.check_integrity()
        held = [f"{report.num_requests} requests"] * bool(report.num_requests)
        return report.violations + held + [f"{report.num_blocks_in_use} blocks"] * bool(report.num_blocks_in_use)

    def _start_if_idle(self) -> None:
        if not self._is_computing:
            self._start()

    def _start(self) -> None:
        """Begins the next step that computes something, if there is one."""
        now, scheduler = self._clock.now, self._scheduler
        for request in self._arrived:
            request_id = RequestId(str(next(self._numbers)))
            self._requests[request_id] = request
            scheduler.add_request(request.message(request_id), now)
        self._arrived.clear()
        self._is_computing = True
        while True:
            step = scheduler.schedule(now)
            self._tell(scheduler.take_urgent_outputs())
            if step.total_num_scheduled_tokens:
                break
            self._tell(scheduler.update(step, ModelRunnerOutput(), 0.0))
            if not scheduler.has_work:
                self._is_computing = False
                return
        outcomes, work = self._run(step)
        step_s, tokens_per_step = self._seconds(work)
        self._clock.after(step_s, lambda: self._end(step, outcomes, step_s, tokens_per_step))

    def _run(self, step: SchedulerOutput) -> tuple[dict[RequestId, Outcome], Step]:
        """Returns the tokens of the step, and what it computes."""
        for new in step.new_requests:
            request = self._requests[new.request_id]
            request.num_known, request.num_computed = len(new.token_ids), new.num_computed_tokens
        outcomes: dict[RequestId, Outcome] = {}
        num_decoding, attended = 0, 0.0
        for request_id, count in step.num_scheduled_tokens.items():
            request = self._requests[request_id]
            if count == 1:
                num_decoding += 1
            else:
                attended += count * (request.num_computed + count / 2)
            request.num_computed += count
            if request.num_computed == request.num_known:
                outcomes[request_id] = [SampledToken(request.token_ids[request.num_known])]
                request.num_known += 1
        prompt_tokens = step.total_num_scheduled_tokens - num_decoding
        num_sequences = len(step.num_scheduled_tokens)
        return outcomes, Step(prompt_tokens, num_decoding, num_sequences, step.num_context_tokens, attended)

    def _seconds(self, step: Step) -> tuple[float, float]:
        """Returns the seconds of a step, and the steps that come to their clients at once: more than one with drafts,
        which it has if it has no prompts and a token takes less time with them."""
        steps, drafts = self.hardware.steps, self.hardware.drafts
        plain_s = steps.seconds(step)
        if step.prompt_tokens or drafts.tokens_per_step == 1:
            return plain_s, 1.0
        drafting_s = steps.seconds(step._replace(num_drafts=step.num_decoding * drafts.per_step))
        token_s = drafting_s / drafts.tokens_per_step
        return (token_s, drafts.tokens_per_step) if token_s < plain_s else (plain_s, 1.0)

    def _end(
        self, step: SchedulerOutput, outcomes: dict[RequestId, Outcome], step_s: float, tokens_per_step: float
    ) -> None:
        self.busy_s += step_s
        self._last_step_s = step_s * (1 + _UNLIKE) if step_s == self._last_step_s else step_s
        outputs = self._scheduler.update(step, ModelRunnerOutput(outcomes), self._last_step_s)
        self._tell(outputs, tokens_per_step)
        self._on_change(self)
        self._start()

    def _tell(self, outputs: Sequence[RequestOutput], tokens_per_step: float = 1.0) -> None:
        for output in outputs:
            request = self._requests[output.request_id]
            for event in output.events:
                if isinstance(event, RequestStarted):
                    request.listener.on_scheduled(event.num_cached_tokens)
            is_over = output.finish_reason is not None
            num_tokens = len(output.tokens)
            if output.start_index == 0 and request.role == "consumer":
                num_tokens -= 1  # the first came from the producer
            if num_tokens > 0 and (tokens_per_step == 1.0 or request.is_step_over(1 / tokens_per_step) or is_over):
                request.listener.on_tokens()
            if is_over:
                assert output.finish_reason in (FinishReason.LENGTH, FinishReason.HANDOFF), output.error
                del self._requests[output.request_id]
                request.listener.on_end()


class _Handoffs(NoTransfers):
    """The consumers of a pod: each waits in the blocks that it has until its KV is delivered."""

    def __init__(self, requests: Mapping[RequestId, PodRequest]) -> None:
        self._requests = requests  # of the pod
        self._waiting: dict[PodRequest, Request] = {}  # that have blocks
        self._events: list[HandedOver] = []

    @property
    def has_events(self) -> bool:  # type: ignore[override]
        """See KVTransfers."""
        return bool(self._events)

    def receive(self, request: Request) -> list[int]:
        """See KVTransfers."""
        leg = self._requests[request.request_id]
        self._waiting[leg] = request
        if leg.is_delivered:
            self.delivered(leg)
        return []

    def delivered(self, leg: PodRequest) -> None:
        """The KV is there; it waits for blocks if the consumer has none yet."""
        if (request := self._waiting.pop(leg, None)) is not None:
            first = SampledToken(leg.token_ids[leg.num_prompt_tokens])
            self._events.append(HandedOver(request.request_id, _NO_LIMIT, first, "", None, may_be_written=False))

    def collect(self) -> Sequence[HandedOver]:
        """See KVTransfers."""
        events, self._events = self._events, []
        return events


class _Prompt:
    """A TokenSequence of full blocks, to be looked up."""

    request_id = RequestId("")
    num_computed_tokens = 0
    num_arriving_tokens = 0
    num_leaving_tokens = None
    reads_cache = True

    def __init__(self, block_hashes: Sequence[BlockHash], block_size: int) -> None:
        self.block_hashes = list(block_hashes)
        self.block_size = block_size

    @property
    def num_tokens(self) -> int:
        """One more than are in the blocks: the last one is never looked up."""
        return len(self.block_hashes) * self.block_size + 1

    def complete_block_hashes(self, block_size: int, num_blocks: int) -> None:
        """See TokenSequence. All are known."""


def measured_steps(model: StepModel, max_num_batched_tokens: int) -> list[tuple[int, float]]:
    """Returns tokens and seconds of the steps that an engine runs before its first request."""
    now = 0.0

    def run(tokens: int) -> None:
        nonlocal now
        now += model.seconds(Step(tokens, 0, 1, 0, tokens**2 / 2))

    return measure_steps(run, max_num_batched_tokens, lambda: now)
