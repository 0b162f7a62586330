"""The scheduler: one rule, no phases.

A request has `num_tokens` known tokens, of which `num_computed_tokens` have their KV here and `num_scheduled_tokens`
have it or get it from a step in flight. Each step gives tokens to requests, under a token budget, so that the last
number catches up with the first; when it does, one more token is sampled. Prefill, chunked prefill, prefix hits,
decoding, resumed and handed-over requests are that rule with other numbers.

A step:

1. requests whose blocks are filled already, by a handoff or from a tier below, take a slot in the batch;
2. requests that decode get a token each. One that finds no free block preempts the last in order, itself at worst;
3. consumers reserve blocks for their prompts. They need neither slot nor budget, and wait for their KV;
4. prompts get what `PromptRoom` leaves: beside streams as much as keeps the step within its time, else one after the
   other. Those that have begun and those that wait for blocks and a slot take turns by order. A request of which a tier
   below keeps more than is here takes blocks and waits until they are restored.

The order is the priority, then the time of arrival plus the time that the prompt takes: a short prompt passes a longer
one that came before it, but only within the time that the longer one takes itself. So only a finite number
of others can pass each request.

KVTransfers moves KV in and out of blocks.

No deadlock: the first request in order can preempt all others of the batch; what else holds blocks depends on no other
request's blocks and ends by itself: handoffs, restores, and pinned blocks. No starvation: blocks are given in order (a
consumer may pass the first waiting prompt, but leaves it the blocks that it needs), and a step's budget is never
smaller than the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from common.engine.config import SchedulerConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import RequestGrammar
from common.engine.contract.step import NOTHING_ASKED, Asked, ModelRunnerOutput, NewRequest, Outcome, SchedulerOutput
from common.engine.kv_cache import CacheChange, KVCacheManager
from common.engine.messages import (
    AddRequest,
    EngineStats,
    IntegrityReport,
    RequestOutput,
)
from common.engine.scheduler.adapters import AdapterPlaces
from common.engine.scheduler.admissible import Limits
from common.engine.scheduler.draft_depth import DraftDepth
from common.engine.scheduler.grammars import Grammars, NoGrammars
from common.engine.scheduler.integrity import overwritten
from common.engine.scheduler.kv_transfers import HandedOver, Kept, KVTransfers, NoTransfers, Restored
from common.engine.scheduler.lifecycle import Lifecycle
from common.engine.scheduler.request import Request, RequestStatus
from common.engine.scheduler.step_drafts import StepDrafts
from common.engine.scheduler.step_plan import StepPlan
from common.errors import ConfigError, InvalidRequestError, OverloadedError
from common.step_budget import (
    MIN_AUTO_TARGET_S,
    MIN_PREFILL_TOKENS,
    PromptRoom,
    auto_target_s,
    knee_tokens,
    measured_knee,
    prefill_work,
)
from common.step_times import StepTimes
from common.types import PoolingFacts, RequestId

# Requests restored ahead of a slot in the batch, as a share of its slots: enough that a slot never waits for a restore,
# not so many that they crowd out those that run.
AHEAD_SHARE = 4
# Of a step, for log probabilities of prompts: 128 MiB of logits in float32, and so many tokens, whose values a front
# converts in a few milliseconds.
MAX_PROMPT_LOGITS = 2**25
MAX_PROMPT_ROWS = 512
# Of the KV blocks, held back at admission so that running requests can grow for some steps before one is preempted.
WATERMARK = 0.01


class Scheduler:
    """Owns the requests of an engine. Called by EngineCore on its one thread: any number of `add_request` and
    `abort_requests`, then `schedule` and, with the runner's answer, `update`. Times are monotonic seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        transfers: KVTransfers | None = None,
        grammars: Grammars | None = None,
        measured_steps: Sequence[tuple[int, float]] = (),
        min_prefill_tokens: int = MIN_PREFILL_TOKENS,
        watermark: float = WATERMARK,
        max_concurrent_batches: int = 1,
        most_asked: Asked = NOTHING_ASKED,
        adapters: AdapterPlaces | None = None,
        pooling: PoolingFacts = PoolingFacts(),  # noqa: B008  (frozen)
    ) -> None:
        """`measured_steps` and `max_concurrent_batches`: see Executor; `most_asked`: see DraftDepth. Raises ConfigError
        if one request may outgrow the KV cache."""
        if kv.num_blocks_for(max_model_len) > kv.num_blocks:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit {kv.num_blocks} KV blocks of {kv.block_size} tokens",
                param="max_model_len",
            )
        self._config = config
        self._kv = kv
        self._block_size = kv.block_size
        self._num_groups = len(kv.groups)
        self._limits = Limits(max_model_len, vocab_size, eos_token_ids, pooling)
        self._transfers = NoTransfers() if transfers is None else transfers
        self._grammars = NoGrammars() if grammars is None else grammars
        # Each request of the batch gets at least one token per step.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._watermark_blocks = int(watermark * kv.num_blocks)
        self._min_prefill_tokens = min_prefill_tokens
        self._max_concurrent_batches = max_concurrent_batches
        self._max_prompt_rows = max(1, min(MAX_PROMPT_LOGITS // vocab_size, MAX_PROMPT_ROWS))
        self.target_itl_s = _target_s(config.target_itl_ms, measured_steps, has_connector=transfers is not None)

        self._adapters = AdapterPlaces(most=1) if adapters is None else adapters
        self._lifecycle = Lifecycle(kv, self._transfers, self._grammars, self._adapters)
        self._places = self._lifecycle.places
        self._running = self._places.running
        self._drafts = StepDrafts(
            kv,
            self._lifecycle,
            DraftDepth(self._max_num_running, measured_steps, most_asked),
            max_rows=self._max_prompt_rows,
            max_tokens=config.max_num_batched_tokens,
            has_model=most_asked != NOTHING_ASKED,
        )
        measured_work = [(prefill_work(tokens, 0), seconds) for tokens, seconds in measured_steps]
        self._step_times = StepTimes.measured(config.max_num_batched_tokens, measured_work)
        self._knee = measured_knee(measured_steps)
        self._forgets_outputs = False  # in the next step
        self._num_arrivals = 0
        self._last_step_tokens = 0
        self._last_step_s = 0.0  # of one with tokens: others do not show the model's speed

    # ---------------------------------------------------------------- from the client

    def add_request(self, message: AddRequest, now: float) -> None:
        """Queue a request. Raises InvalidRequestError, PromptTooLongError or OverloadedError; then nothing has
        changed."""
        if message.request_id in self._places.live or self._transfers.knows(message.request_id):
            raise InvalidRequestError(f"request {message.request_id} exists already", param="request_id")
        self._limits.check(message)
        self._adapters.check(message.adapter)
        if self._places.num_waiting >= self._config.max_num_waiting:
            raise OverloadedError(f"{self._places.num_waiting} requests are waiting already")
        request = Request(
            message,
            added_at=now,
            max_model_len=self._limits.max_model_len,
            eos=self._limits.eos_token_ids,
            pools_every_token=self._limits.pooling.needs_every_token(message.pooling),
        )
        request.order = (
            message.priority if self._config.policy == "priority" else 0,
            now + self._prompt_s(request),
            self._num_arrivals,
        )
        self._num_arrivals += 1
        self._lifecycle.add(request)

    def _prompt_s(self, request: Request) -> float:
        """Seconds that what is not cached of the prompt takes to compute here."""
        if request.awaits_handoff:
            return 0.0
        num_cached = len(self._kv.find_cached_prefix(request)) * self._block_size
        return self._step_times.line.token_s * prefill_work(request.num_tokens - num_cached, num_cached)

    def abort_requests(self, request_ids: Sequence[RequestId]) -> list[RequestOutput]:
        """End requests now; one output with FinishReason.ABORT for each that was live. Blocks in transfer stay
        pinned until the transport no longer touches them."""
        live = [self._places.live.get(request_id) for request_id in request_ids]
        return [self._lifecycle.abort(request) for request in live if request is not None and not request.is_finished]

    # ---------------------------------------------------------------- the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step."""
        plan = StepPlan(self._config.max_num_batched_tokens, self._max_prompt_rows)
        self._collect(now)
        self._start_ready(now)
        prompts = self._schedule_decoding(plan)
        if prompts or self._places.has_waiting:
            self._lifecycle.is_stalled = False
            last = self._admit_consumers(now)
            self._schedule_prompts(prompts, last, plan, now)
            if last is not None and self._may_reserve(last):
                self._lifecycle.is_stalled = False  # what it left blocks for waits for a tier now
        self._drafts.plan(plan, self._step_times)
        return self._build(plan)

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Decide the step after the one that runs, before its outcome is known: one more token for each request that
        goes on. None if anything else is to be decided. Results of requests that have ended by then are not used."""
        running = self._running
        if self._has_more_to_decide or not all(self._samples_simply(request) for request in running):
            return None
        going_on = [request for request in running if request.num_tokens + 1 < request.max_num_tokens]
        num_grown = sum(request.num_tokens % self._block_size == 0 for request in going_on)
        if not going_on or num_grown * self._num_groups > self._kv.num_free_blocks:
            return None
        if self._drafts.may_follow(going_on):
            return None
        ahead = SchedulerOutput(
            num_scheduled_tokens=dict.fromkeys((request.request_id for request in going_on), 1),
            total_num_scheduled_tokens=len(going_on),
            work=float(len(going_on)),
            num_context_tokens=sum(request.num_tokens for request in going_on),
            dropped_request_ids=self._lifecycle.take_dropped(),
        )
        for request in going_on:
            added = self._kv.grow(request, request.num_tokens + 1)
            if added:
                ahead.new_block_ids[request.request_id] = added
            request.num_scheduled_tokens += 1
        self._lifecycle.step_began(dict.fromkeys(going_on, 1), len(going_on))
        return ahead

    @property
    def _has_more_to_decide(self) -> bool:
        """Whether something else than the running requests may get tokens or blocks."""
        places = self._places
        has_slot = len(self._running) < self._max_num_running
        return bool(
            self._transfers.has_events
            or self._grammars.has_events
            or (has_slot and places.ready)
            or (not self._lifecycle.is_stalled and (places.consumers or (has_slot and places.waiting)))
        )

    def _samples_simply(self, request: Request) -> bool:
        """Whether the step that runs samples its next token, after which another can follow unseen."""
        return (
            request.is_simple
            and not request.is_producer
            and not request.wants_prompt_logprobs
            and request.num_scheduled_tokens == request.num_tokens
        )

    def _collect(self, now: float) -> None:
        """Take what has arrived. Requests that have ended meanwhile need nothing of it."""
        if self._grammars.has_events:
            for answer in self._grammars.collect():
                self._lifecycle.take_grammar(answer)
        if not self._transfers.has_events:
            return
        for arrival in self._transfers.collect():
            match arrival:
                case Kept(request):
                    if not request.is_finished:
                        self._lifecycle.take_answer(arrival)
                case Restored(request):
                    if not request.is_finished:
                        self._lifecycle.take_restored(request, arrival)
                case HandedOver(request_id):
                    if request_id in self._places.live:
                        self._lifecycle.take_handoff(self._places.live[request_id], arrival, now)

    def _start_ready(self, now: float) -> None:
        ready = self._places.ready
        while ready and len(self._running) < self._max_num_running:
            self._lifecycle.start(ready.popleft(), now)

    def _schedule_decoding(self, plan: StepPlan) -> list[Request]:
        """A token for each request that decodes, or for a share of them if others are for steps beside this one.
        Returns the others of the batch, whose prompts are not complete."""
        prompts: list[Request] = []
        most = -(-len(self._running) // self._max_concurrent_batches)
        block_size, decode, running = self._block_size, plan.decode, RequestStatus.RUNNING
        for request in self._running.copy():  # preemption changes the batch
            num_scheduled = request.num_scheduled_tokens
            num_left = len(request.token_ids) - num_scheduled  # below 0 while a step in flight verifies drafts
            if num_left > 1:
                prompts.append(request)
            elif num_left < 1 or request.awaits_mask or request.status is not running or len(plan.scheduled) == most:
                pass  # a step in flight samples its next token, its mask is late, it was preempted, or is not its turn
            elif num_scheduled % block_size or self._grow(request, 1, plan):  # else it goes into a block begun
                decode(request, num_scheduled)
        return prompts

    def _admit_consumers(self, now: float) -> Request | None:
        """Reserve blocks for consumers, in order; those that come after the first waiting prompt leave it what it
        needs. The one that was refused, which prompts that come after it must not pass."""
        consumers = self._places.consumers
        while consumers:
            request = consumers.head
            if not self._may_reserve(request):
                self._lifecycle.is_stalled = True
                return request
            consumers.pop()
            self._lifecycle.reserve(request, self._kv.find_cached_prefix(request), now)
        return None

    def _may_reserve(self, request: Request) -> bool:
        held_back, waiting = self._num_held_back, self._places.waiting
        if waiting and waiting.head.order < request.order:
            held_back += self._kv.num_blocks_for(waiting.head.num_tokens)
        return self._kv.can_allocate(request, self._kv.find_cached_prefix(request), held_back)

    def _schedule_prompts(self, prompts: list[Request], last: Request | None, plan: StepPlan, now: float) -> None:
        """Share out what the step has left for prompts: to `prompts`, which have begun, and to those that wait and
        come before `last`, in order."""
        room = self._room_for_prompts(plan)
        prompts.sort(key=_order, reverse=True)
        waiting = self._places.waiting
        may_admit = True
        while True:
            may_admit = may_admit and bool(waiting) and (last is None or waiting.head.order < last.order)
            if prompts and not (may_admit and waiting.head.order < prompts[-1].order):
                self._continue_prompt(prompts.pop(), room, plan)
            elif may_admit:
                may_admit = self._admit(waiting.head, room, plan, now)
            else:
                return

    def _room_for_prompts(self, plan: StepPlan) -> PromptRoom:
        times = self._step_times
        if self.target_itl_s == math.inf:
            return PromptRoom.unlimited()
        stream_target_s = plan.stream_target_s
        if stream_target_s is None:
            return PromptRoom.alone(self._knee or knee_tokens(times.line))
        if not times.is_known:
            return PromptRoom.least(self._min_prefill_tokens)
        return PromptRoom.beside_streams(
            times.line,
            step_s=times.predict(len(plan.scheduled), plan.num_context_tokens),
            target_s=min(self.target_itl_s, stream_target_s),
            least=self._min_prefill_tokens,
        )

    def _continue_prompt(self, request: Request, room: PromptRoom, plan: StepPlan) -> None:
        if request.status is not RequestStatus.RUNNING or request in plan.scheduled:
            return  # preempted in this step, and perhaps admitted again
        num_before = request.num_scheduled_tokens
        num_tokens = min(room.chunk(request.num_unscheduled_tokens, num_before), plan.room_for(request))
        if num_tokens and self._grow(request, num_tokens, plan):
            room.take(num_tokens, num_before)
            plan.give(request, num_tokens)

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Make room for the next `num_tokens` of `request`, preempting from the end of the order. False: itself."""
        while (added := self._kv.grow(request, request.num_scheduled_tokens + num_tokens)) is None:
            victim = max(self._running, key=_order)
            plan.take_back(victim)
            self._lifecycle.preempt(victim)
            if victim is request:
                return False
        if added:
            plan.new_block_ids[request] = added
        return True

    def _admit(self, request: Request, room: PromptRoom, plan: StepPlan, now: float) -> bool:
        """Take the first waiting prompt out of the queue, if its turn has come. False: not now."""
        has_slot = len(self._running) < self._max_num_running and not room.is_full
        if not has_slot and not request.num_kept_blocks:
            return False
        prefix = self._kv.find_cached_prefix(request)
        num_cached = len(prefix) * self._block_size
        is_kept = request.num_kept_blocks > len(prefix)
        if not is_kept and self._is_being_computed(request, len(prefix), plan):
            return False
        chunk = room.chunk(request.num_tokens - num_cached, num_cached)
        num_tokens = min(chunk, plan.room_for(request)) if has_slot else 0
        if not num_tokens and not is_kept:
            return False
        if (is_kept and not self._may_restore) or not self._kv.can_allocate(request, prefix, self._num_held_back):
            self._lifecycle.is_stalled = True
            return False
        self._places.waiting.pop()
        if self._lifecycle.ask_again(request, prefix):
            return True
        if is_kept:
            self._lifecycle.restore(request, prefix)
        else:
            self._lifecycle.admit(request, prefix, now)
            room.take(num_tokens, num_cached)
            plan.give(request, num_tokens)
        return True

    def _is_being_computed(self, request: Request, num_cached: int, plan: StepPlan) -> bool:
        """Whether this step computes, for another request, at least half of what `request` lacks, as where one prompt
        has several answers. A step later it is cached."""
        if not (self._kv.enable_prefix_caching and request.reads_cache):
            return False
        wanted = request.block_hashes[: self._kv.num_shareable_blocks(request)]
        if len(wanted) <= num_cached:
            return False
        least = num_cached + (request.num_tokens - num_cached * self._block_size) // (2 * self._block_size)
        shared = wanted[: max(least, num_cached + 1)]  # hashes are chained: equal ends are equal blocks
        return any(
            num_tokens > 1
            and other.block_hashes[len(shared) - 1 : len(shared)] == shared[-1:]
            and other.num_scheduled_tokens < (num_cached + 1) * self._block_size
            for other, num_tokens in plan.scheduled.items()
        )

    @property
    def _num_held_back(self) -> int:
        """Blocks that admission leaves free for growth: one of each KV group for each request that holds blocks, and at
        least the watermark. None if there is no such request, or a large one might never be admitted."""
        num_holding = self._places.num_holding * self._num_groups
        return max(num_holding, self._watermark_blocks) if num_holding else 0

    @property
    def _may_restore(self) -> bool:
        num_taken = len(self._running) + len(self._places.ready) + self._places.num_restoring
        return num_taken < self._max_num_running + max(1, self._max_num_running // AHEAD_SHARE)

    def _build(self, plan: StepPlan) -> SchedulerOutput:
        """The step as data. From here on it is in flight."""
        step = SchedulerOutput(
            total_num_scheduled_tokens=plan.num_tokens,
            work=plan.work,
            num_context_tokens=plan.num_context_tokens,
            dropped_request_ids=self._lifecycle.take_dropped(),
            forgets_outputs=self._forgets_outputs,
            asked=self._drafts.asked,
        )
        self._forgets_outputs = False
        for request, block_ids in plan.new_block_ids.items():
            if request.is_in_batch:
                step.new_block_ids[request.request_id] = block_ids
        for request, token_ids in plan.drafts.items():
            step.drafts[request.request_id] = token_ids
        num_scheduled_tokens, num_prompt_tokens = step.num_scheduled_tokens, 0
        for request, num_tokens in plan.scheduled.items():
            if not request.is_in_batch:
                step.new_requests.append(self._introduce(request))
            num_scheduled_tokens[request.request_id] = num_tokens
            start = request.num_scheduled_tokens
            request.num_scheduled_tokens = start + num_tokens
            if start < request.num_prompt_tokens:
                num_prompt_tokens += min(num_tokens, request.num_prompt_tokens - start)
        self._lifecycle.step_began(plan.scheduled, step.total_num_scheduled_tokens, num_prompt_tokens, plan.drafts)
        return step

    def _introduce(self, request: Request) -> NewRequest:
        request.is_in_batch = True
        return NewRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=self._kv.block_ids(request),
            num_computed_tokens=request.num_computed_tokens,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            is_producer=request.is_producer,
            pooling=request.pooling,
            positions=request.positions,
            root=request.root,
            extra_keys=request.extra_keys,
            adapter=request.adapter,
        )

    def masks_arrived(self, request_ids: Sequence[RequestId]) -> None:
        """The masks of requests for which the runner had none are there."""
        for request_id in request_ids:
            request = self._places.live.get(request_id)
            if request is not None:
                request.awaits_mask = False

    def grammar_of(self, request_id: RequestId) -> RequestGrammar | None:
        """Returns the grammar that the output of a live request follows, if it has one."""
        request = self._places.live.get(request_id)
        return None if request is None else request.grammar

    def take_urgent_outputs(self) -> list[RequestOutput]:
        """Returns outputs that should be sent before the step runs; called after `schedule`. Often none."""
        return self._lifecycle.take_outputs(urgent_only=True)

    def awaited(self, outcomes: Mapping[RequestId, Outcome]) -> Mapping[RequestId, Outcome]:
        """Returns the outcomes of the first step in flight without those of requests that have left it, which may have
        come back."""
        if self._max_concurrent_batches == 1:
            return outcomes
        awaited = {request.request_id for request in self._lifecycle.in_flight}
        return {request_id: outcome for request_id, outcome in outcomes.items() if request_id in awaited}

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput, step_s: float) -> list[RequestOutput]:
        """Take the runner's answer to `step`, the first in flight, which took `step_s` seconds. Returns all outputs
        since the last call."""
        own_s = step_s  # of the model
        if (drafting := result.drafting) is not None:
            own_s -= drafting.seconds
            self._drafts.observe_model(drafting)
        self._step_times.observe(own_s, step.work, step.num_context_tokens)
        num_tokens = step.total_num_scheduled_tokens
        if num_tokens:
            self._last_step_tokens = num_tokens
            self._last_step_s = step_s
            self._drafts.observe(step, own_s)
        self._lifecycle.step_ended(result, step_s)
        return self._lifecycle.take_outputs()

    # ---------------------------------------------------------------- for the core

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something. False with `has_unfinished` True means: wait for a command or for
        KV to arrive."""
        return bool(
            self._running
            or self._places.ready
            or self._lifecycle.has_outputs
            or self._transfers.has_events
            or self._grammars.has_events
            or (self._places.has_waiting and not self._lifecycle.is_stalled)
        )

    @property
    def has_unscheduled(self) -> bool:
        """Whether a step beside those in flight may compute something."""
        return self._has_more_to_decide or any(
            request.num_unscheduled_tokens > 0 and not request.awaits_mask for request in self._running
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is live."""
        return bool(self._places.live)

    @property
    def has_cache_change(self) -> bool:
        """Whether the prefix cache has changed since the last `take_cache_change`."""
        return bool(self._kv.cache_changes)

    def take_cache_change(self) -> CacheChange:
        """Returns the changes of the prefix cache since the last call."""
        return self._kv.cache_changes.take()

    def stats(self) -> EngineStats:
        """Current figures; those of transfers are the core's."""
        places, totals = self._places, self._lifecycle.totals
        return EngineStats(
            num_running=len(places.running),
            num_waiting=places.num_waiting + len(places.ready),
            num_waiting_for_remote_kv=len(places.remote),
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks,
            num_queued_tokens=places.num_queued_tokens,
            last_step_s=self._last_step_s,
            last_step_tokens=self._last_step_tokens,
            num_preemptions=totals.num_preemptions,
            prefix_cache_queries=totals.prefix_cache_queries,
            prefix_cache_hits=totals.prefix_cache_hits,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_generation_tokens=totals.num_generation_tokens,
            tier_hits=totals.tier_hits,
            running_adapters=self._adapters.in_use,
            num_late_masks=totals.num_late_masks,
            num_slow_grammars=totals.num_slow_grammars,
            prefill_steps=totals.prefill_steps.figures,
            decode_steps=totals.decode_steps.figures,
            mixed_steps=totals.mixed_steps.figures,
            drafts=totals.drafts.figures,
        )

    def reset_prefix_cache(self) -> None:
        """Removes all cached blocks that no request owns, and, in the next step, what a proposer has learnt."""
        self._kv.reset_prefix_cache()
        self._forgets_outputs = True

    @property
    def known_requests(self) -> KnownRequests:
        """Returns the requests of which workers have been told so far."""
        in_batch = [request for request in self._places.live.values() if request.is_in_batch]
        block_ids = {request.request_id: self._kv.block_ids(request) for request in in_batch}
        return KnownRequests(block_ids, self._lifecycle.dropped)

    def check_integrity(self) -> IntegrityReport:
        """State the invariants: each block has one owner or is free, each request is in one place and each place
        holds blocks or not as it should."""
        places = self._places
        violations = self._kv.check_integrity([*self._transfers.pinned_blocks, *self._lifecycle.pinned_blocks])
        violations += places.violations(set(self._kv.holders))
        violations += self._adapters.violations(places.live)
        computing = {request: self._kv.blocks(request) for request in (*places.running, *places.ready)}
        violations += overwritten(computing, self._transfers.writable_blocks)
        if len(places.running) > self._max_num_running:
            violations.append(f"{len(places.running)} requests in a batch of {self._max_num_running}")
        return IntegrityReport(
            violations=violations,
            num_requests=len(places.live),
            num_blocks_in_use=self._kv.num_blocks - self._kv.num_free_blocks,
            num_transfers=0,
        )


def _target_s(
    setting: Literal["auto"] | float | None, steps: Sequence[tuple[int, float]], *, has_connector: bool
) -> float:
    if setting is None:
        return math.inf
    if setting != "auto":
        return setting / 1000
    return MIN_AUTO_TARGET_S if has_connector else auto_target_s(steps)  # others compute long prompts then


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
