"""The scheduler: one rule, no phases.

A request has `num_tokens` known tokens of which `num_computed_tokens` have their KV here. Each step gives tokens to
requests, under a token budget, so that the second number catches up with the first; when it does, one more token
is sampled. Prefill, chunked prefill, prefix hits, decoding, resumed and handed-over requests are that rule with
other numbers.

A step:

1. requests whose blocks are filled already, by a handoff or from a tier below, take a slot in the batch;
2. running requests get tokens, those that decode first, so that no prefill chunk delays a token. One that finds no free
   block preempts the last in order, itself at worst;
3. waiting requests are admitted in order while blocks for all their tokens, slots and budget last. A consumer needs
   neither slot nor budget: it reserves blocks and waits for its KV; nor does a request of which a tier below keeps more
   than is here.

How KV gets into and out of blocks is for KVTransfers to know. Requests whose KV is on its way are in `_remote`, and go
on when it has arrived.

No deadlock: the first request in order can preempt all others of the batch; what else holds blocks depends on no other
request's blocks and ends by itself: handoffs, restores, and pinned blocks. No starvation: admission is strictly in
order, and a step's budget is never smaller than the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.engine.config import SchedulerConfig
from common.engine.kv_cache import Block, CacheChange, KVCacheManager
from common.engine.messages import (
    AddRequest,
    EngineStats,
    IntegrityReport,
    KVReceived,
    RequestOutput,
    RequestStarted,
)
from common.engine.scheduler.integrity import misplaced, overwritten
from common.engine.scheduler.kv_transfers import HandedOver, Kept, KVTransfers, NoTransfers, Restored
from common.engine.scheduler.outbox import Outbox
from common.engine.scheduler.output import ContinuedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from common.engine.scheduler.plan import Plan
from common.engine.scheduler.request import Request, RequestStatus
from common.engine.scheduler.totals import Totals
from common.engine.scheduler.waiting_queue import WaitingQueue
from common.errors import ConfigError, InvalidRequestError, NonFiniteError, OverloadedError, PromptTooLongError
from common.types import HASH_BYTES, FinishReason, RequestId, SampledToken, SamplingParams

# Requests restored ahead of a slot in the batch, as a share of its slots: enough that a slot never waits for a restore,
# not so many that they crowd out those that run.
AHEAD_SHARE = 4


class Scheduler:
    """Owns the requests of an engine and their place in life. Called by EngineCore on its one thread:
    any number of `add_request` and `abort_requests`, then `schedule` and, with the runner's answer, `update`. Times are
    monotonic seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        transfers: KVTransfers | None = None,
    ) -> None:
        """Raises ConfigError if one request may outgrow the KV cache."""
        if max_model_len > kv.num_blocks * kv.block_size:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit {kv.num_blocks} KV blocks of {kv.block_size} tokens",
                param="max_model_len",
            )
        self._config = config
        self._kv = kv
        self._block_size = kv.block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._transfers = NoTransfers() if transfers is None else transfers
        # Each request of the batch gets at least one token per step.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._watermark_blocks = int(config.watermark * kv.num_blocks)

        # Every live request is in exactly one of these places.
        self._live: dict[RequestId, Request] = {}
        self._looking_up: dict[RequestId, Request] = {}  # no blocks; waits for an answer of the tiers
        self._waiting = WaitingQueue()  # no blocks
        self._remote: dict[RequestId, Request] = {}  # blocks reserved, KV in flight
        self._ready: deque[Request] = deque()  # its KV has arrived; has blocks, wants a slot
        self._running: list[Request] = []  # the batch

        self._outbox = Outbox()
        self._has_urgent_news = False  # the other side of a handoff can go on while the step runs
        self._dropped: list[RequestId] = []  # the runner is to forget them
        self._is_stalled = False  # the head of the queue was refused, and nothing happened since that may change it
        self._num_arrivals = 0

        self._totals = Totals()
        self._last_step_tokens = 0

    # ---------------------------------------------------------------- from the client

    def add_request(self, message: AddRequest, now: float) -> None:
        """Queue a request. Raises InvalidRequestError, PromptTooLongError or OverloadedError; then nothing happened."""
        self._check_admissible(message)
        priority = message.priority if self._config.policy == "priority" else 0
        request = Request(
            message,
            added_at=now,
            order=(priority, self._num_arrivals),
            max_model_len=self._max_model_len,
            eos=self._eos_token_ids,
        )
        misfit = request.misfit_block_hash(self._block_size)
        if misfit is not None:
            raise InvalidRequestError(
                f"block_hashes[{misfit}] is not the hash of that block of {self._block_size} prompt tokens",
                param="block_hashes",
            )
        self._num_arrivals += 1
        self._live[request.request_id] = request
        if message.transfer is not None:
            self._transfers.begin(request)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """Queue a request that has no blocks, or first ask what is kept of it."""
        self._is_stalled = False
        request.num_kept_blocks = 0
        if self._transfers.ask(request):
            self._look_up(request)
        else:
            self._waiting.push(request)

    def _look_up(self, request: Request) -> None:
        """It waits for the answer beside the queue, so that no request waits behind it."""
        request.status = RequestStatus.LOOKING_UP
        self._looking_up[request.request_id] = request

    def _check_admissible(self, message: AddRequest) -> None:
        request_id, num_outputs = message.request_id, len(message.output_token_ids)
        num_tokens = len(message.prompt_token_ids) + num_outputs
        if request_id in self._live or self._transfers.knows(request_id):
            raise InvalidRequestError(f"request {request_id} exists already", param="request_id")
        if not message.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt_token_ids")
        if num_tokens >= self._max_model_len:
            raise PromptTooLongError(
                f"{num_tokens} tokens leave no room for another one in a context of {self._max_model_len}",
                param="prompt_token_ids",
            )
        if message.sampling.max_tokens <= num_outputs:
            raise InvalidRequestError(
                f"max_tokens {message.sampling.max_tokens} leaves nothing to generate after {num_outputs} tokens",
                param="max_tokens",
            )
        self._check_stop_tokens(message.sampling)
        if any(len(block_hash) != HASH_BYTES for block_hash in message.block_hashes):
            raise InvalidRequestError(f"block hashes have {HASH_BYTES} bytes", param="block_hashes")
        num_waiting = len(self._waiting) + len(self._looking_up)
        if num_waiting >= self._config.max_num_waiting:
            raise OverloadedError(f"{num_waiting} requests are waiting already")

    def _check_stop_tokens(self, sampling: SamplingParams) -> None:
        if sampling.min_tokens and len(sampling.stop_token_ids) + len(self._eos_token_ids) >= self._vocab_size:
            stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
            if len(stops) >= self._vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids names every token, which leaves none for the first min_tokens", param="min_tokens"
                )

    def abort_requests(self, request_ids: Sequence[RequestId]) -> list[RequestOutput]:
        """End requests now; one output with FinishReason.ABORT for each that was live. Blocks that are on the move stay
        pinned until the transport no longer touches them."""
        outputs = []
        for request_id in request_ids:
            request = self._live.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
                outputs.append(self._outbox.take(request))
        return outputs

    # ---------------------------------------------------------------- the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step."""
        plan = Plan(self._config.max_num_batched_tokens)
        self._collect(now)
        self._start_ready(now)
        self._schedule_running(plan)
        self._admit_waiting(plan, now)
        return self._build(plan)

    def _collect(self, now: float) -> None:
        """Take what has arrived. Requests that have ended meanwhile need nothing of it."""
        if not self._transfers.has_notes:
            return
        self._is_stalled = False  # blocks may have become free
        for arrival in self._transfers.collect():
            match arrival:
                case Kept(request):
                    if not request.is_finished:
                        self._take_answer(request, arrival)
                case Restored(request):
                    if not request.is_finished:
                        self._take_restored(request, arrival)
                case HandedOver(request_id):
                    if request_id in self._live:
                        self._take_handoff(self._live[request_id], arrival, now)

    def _start_ready(self, now: float) -> None:
        while self._ready and len(self._running) < self._max_num_running:
            self._start(self._ready.popleft(), now)

    def _schedule_running(self, plan: Plan) -> None:
        prefilling: list[Request] = []
        for request in self._running.copy():  # preemption changes the batch
            if request.num_uncomputed_tokens > 1:
                prefilling.append(request)
            elif request.status is RequestStatus.RUNNING and self._grow(request, 1, plan):
                plan.give(request, 1)
        for request in prefilling:
            num_tokens = min(request.num_uncomputed_tokens, plan.budget)
            if num_tokens and request.status is RequestStatus.RUNNING and self._grow(request, num_tokens, plan):
                plan.give(request, num_tokens)

    def _grow(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Make room for the next `num_tokens` of `request`, preempting from the end of the order. False: itself."""
        while (added := self._kv.grow(request, request.num_computed_tokens + num_tokens)) is None:
            victim = max(self._running, key=lambda running: running.order)
            self._preempt(victim, plan)
            if victim is request:
                return False
        if added:
            plan.new_block_ids[request] = added
        return True

    def _preempt(self, request: Request, plan: Plan) -> None:
        plan.take_back(request)
        self._running.remove(request)
        self._forget(request)
        self._release_blocks(request)
        request.status = RequestStatus.PREEMPTED
        self._enqueue(request)
        self._totals.num_preemptions += 1

    def _admit_waiting(self, plan: Plan, now: float) -> None:
        self._is_stalled = False
        while self._waiting and self._admit(self._waiting.head, plan, now):
            pass

    def _admit(self, request: Request, plan: Plan, now: float) -> bool:
        """Take the head of the queue out, if its turn has come. False: not now."""
        has_slot = plan.budget > 0 and len(self._running) < self._max_num_running
        if not has_slot and not request.awaits_handoff and not request.num_kept_blocks:
            return False
        prefix = self._kv.find_cached_prefix(request)
        is_kept = request.num_kept_blocks > len(prefix)
        if not has_slot and not request.awaits_handoff and not is_kept:
            return False
        if (is_kept and not self._may_restore) or not self._kv.can_allocate(request, prefix, self._num_held_back):
            self._is_stalled = True
            return False
        self._waiting.pop()
        if self._transfers.ask_again(request, len(prefix)):
            self._look_up(request)
            return True
        self._claim_blocks(request, prefix)
        if request.awaits_handoff:
            self._reserve(request, now)
        elif is_kept:
            self._restore(request)
        else:
            self._start(request, now)
            plan.give(request, min(request.num_uncomputed_tokens, plan.budget))
        return True

    def _start(self, request: Request, now: float) -> None:
        if not request.is_started:
            self._announce_start(request, now)
        request.status = RequestStatus.RUNNING
        self._running.append(request)

    def _claim_blocks(self, request: Request, prefix: Sequence[Block]) -> None:
        self._kv.allocate(request, prefix)
        request.num_computed_tokens = len(prefix) * self._block_size
        self._transfers.admitted(request)

    def _release_blocks(self, request: Request) -> None:
        self._transfers.released(request)
        self._kv.free(request)
        request.num_computed_tokens = 0

    def _reserve(self, request: Request, now: float) -> None:
        """The consumer holds blocks for its whole prompt; from now on KV may come."""
        self._await_kv(request)
        self._announce_start(request, now, self._transfers.receive(request))

    def _restore(self, request: Request) -> None:
        """The request holds blocks for all its tokens; those that a tier keeps come from there."""
        self._await_kv(request)
        self._transfers.restore(request)

    def _await_kv(self, request: Request) -> None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._remote[request.request_id] = request

    @property
    def _num_held_back(self) -> int:
        """Blocks that admission leaves free for growth: one for each request that holds blocks, and at least the
        watermark. None if there is no such request, or a large one might never be admitted."""
        num_holders = len(self._running) + len(self._ready) + len(self._remote)
        return max(num_holders, self._watermark_blocks) if num_holders else 0

    @property
    def _may_restore(self) -> bool:
        num_restoring = sum(not request.awaits_handoff for request in self._remote.values())
        num_taken = len(self._running) + len(self._ready) + num_restoring
        return num_taken < self._max_num_running + max(1, self._max_num_running // AHEAD_SHARE)

    def _announce_start(self, request: Request, now: float, reserved_block_ids: Sequence[int] = ()) -> None:
        request.is_started = True
        num_cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._totals.prefix_cache_hits += min(
            request.num_computed_tokens - request.num_restored_tokens, request.num_prompt_tokens
        )
        self._totals.prefix_cache_queries += request.num_prompt_tokens if self._kv.enable_prefix_caching else 0
        started = RequestStarted(
            queue_s=now - request.added_at,
            num_cached_tokens=num_cached,
            reserved_block_ids=list(reserved_block_ids),
        )
        self._outbox.add_event(request, started)
        self._has_urgent_news |= request.is_producer or bool(reserved_block_ids)

    def _build(self, plan: Plan) -> SchedulerOutput:
        """The step as data. From here on the scheduled tokens count as computed."""
        step = SchedulerOutput(
            total_num_scheduled_tokens=self._config.max_num_batched_tokens - plan.budget,
            dropped_request_ids=self._dropped,
        )
        self._dropped = []
        self._last_step_tokens = step.total_num_scheduled_tokens or self._last_step_tokens
        for request, num_tokens in plan.scheduled.items():
            start = request.num_computed_tokens
            request.num_computed_tokens = start + num_tokens
            step.num_scheduled_tokens[request.request_id] = num_tokens
            if request.is_in_batch:
                added = plan.new_block_ids.get(request) or []
                step.continued_requests.append(ContinuedRequest(request.request_id, added, start))
            else:
                step.new_requests.append(self._introduce(request, start))
            if start < request.num_prompt_tokens:
                self._totals.num_prompt_tokens += min(num_tokens, request.num_prompt_tokens - start)
        return step

    def _introduce(self, request: Request, num_computed_tokens: int) -> NewRequest:
        request.is_in_batch = True
        return NewRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=[block.block_id for block in self._kv.blocks(request)],
            num_computed_tokens=num_computed_tokens,
        )

    def take_urgent_news(self) -> list[RequestOutput]:
        """What should be said before the step runs; called after `schedule`. Often nothing."""
        if not self._has_urgent_news:
            return []
        self._has_urgent_news = False
        return self._outbox.drain()

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take the runner's answer to `step`. What requests gained since the last call, in any way."""
        for request_id in step.num_scheduled_tokens:
            request = self._live.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            token = result.sampled.get(request_id)
            if request.num_uncomputed_tokens == 0 and token is None:
                self._fail(request, NonFiniteError("the model computed no finite logit for the next token"))
                continue
            self._kv.cache_computed(request)
            self._transfers.computed(request)
            if token is not None:
                self._totals.num_generation_tokens += 1
                self._append_token(request, token)
        self._transfers.step_ended()
        return self._outbox.drain()

    def _append_token(self, request: Request, token: SampledToken) -> None:
        reason = self._add_token(request, token)
        if reason is not None:
            self._finish(request, reason)

    def _add_token(self, request: Request, token: SampledToken) -> FinishReason | None:
        reason = request.append(token)
        self._outbox.add_token(request, token)
        if reason is None and request.is_producer:
            return FinishReason.HANDOFF
        return reason

    # ---------------------------------------------------------------- arrivals

    def _take_answer(self, request: Request, kept: Kept) -> None:
        del self._looking_up[request.request_id]
        request.num_kept_blocks = kept.num_blocks
        request.status = RequestStatus.WAITING
        self._waiting.push(request)

    def _take_restored(self, request: Request, restored: Restored) -> None:
        request.num_restored_tokens = restored.num_blocks * self._block_size - request.num_computed_tokens
        self._totals.tier_hits += request.num_restored_tokens
        request.num_computed_tokens += request.num_restored_tokens
        self._transfers.arrived(request, restored)
        self._kv.cache_computed(request)
        self._leave(request)
        request.status = RequestStatus.WAITING
        self._ready.append(request)

    def _take_handoff(self, request: Request, handoff: HandedOver, now: float) -> None:
        """Continue from the longest valid prefix. If that is the whole prompt and the first token is known, nothing
        is left to prefill."""
        num_local = request.num_computed_tokens
        num_valid = max(num_local, min(handoff.num_blocks * self._block_size, request.num_prompt_tokens))
        is_complete = num_valid >= request.num_prompt_tokens and handoff.first_token is not None
        request.awaits_handoff = False
        self._leave(request)
        received = KVReceived(
            num_tokens=num_valid - num_local,
            handoff_s=0.0 if handoff.final_at is None else now - handoff.final_at,
            recompute_reason="" if is_complete else handoff.failure or "incomplete",
        )
        self._outbox.add_event(request, received)
        known = request.num_tokens if handoff.first_token is not None else request.num_tokens - 1
        request.num_computed_tokens = min(num_valid, known)  # without the first token, the last one is computed again
        self._kv.cache_computed(request)
        self._transfers.arrived(request, handoff)
        request.status = RequestStatus.WAITING
        if handoff.may_be_written:
            self._start_over(request, handoff.first_token)
            return
        self._ready.append(request)
        if handoff.first_token is not None:
            self._append_token(request, handoff.first_token)
            self._has_urgent_news = True

    def _start_over(self, request: Request, first_token: SampledToken | None) -> None:
        """Back to the queue as an ordinary request: its blocks may still be written to. What was verified of them is
        complete, so the prefix cache may give it back."""
        self._release_blocks(request)
        reason = self._add_token(request, first_token) if first_token is not None else None
        self._enqueue(request)
        if reason is not None:
            self._finish(request, reason)

    # ---------------------------------------------------------------- endings

    def _leave(self, request: Request) -> None:
        """Take a live request out of its place."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            del self._remote[request.request_id]
        elif request.status is RequestStatus.LOOKING_UP:
            del self._looking_up[request.request_id]
        elif request in self._ready:
            self._ready.remove(request)
        else:
            self._waiting.remove(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._live[request.request_id]
        self._forget(request)
        self._transfers.released(request)
        self._kv.free(request)
        self._transfers.ended(request, is_aborted=reason in (FinishReason.ABORT, FinishReason.ERROR))
        self._outbox.finish(request)
        self._is_stalled = False

    def _fail(self, request: Request, error: NonFiniteError) -> None:
        """End a running request whose KV may hold NaN: later requests must not find it in the prefix cache."""
        self._kv.forget(request)
        self._finish(request, FinishReason.ERROR)
        self._outbox.fail(request, error)

    def _forget(self, request: Request) -> None:
        if request.is_in_batch:
            request.is_in_batch = False
            self._dropped.append(request.request_id)

    # ---------------------------------------------------------------- for the core

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something. False with `has_unfinished` True means: wait for a command or for
        KV to arrive."""
        return bool(
            self._running
            or self._ready
            or self._dropped
            or self._outbox
            or self._transfers.has_notes
            or (self._waiting and not self._is_stalled)
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is live."""
        return bool(self._live)

    @property
    def has_cache_change(self) -> bool:
        """Whether the prefix cache changed since it was last asked how."""
        return bool(self._kv.cache_changes)

    def take_cache_change(self) -> CacheChange:
        """What became of the prefix cache since the last call."""
        return self._kv.cache_changes.take()

    def stats(self) -> EngineStats:
        """Current figures; those of the step's duration and of transfers are the core's."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._ready) + len(self._looking_up),
            num_waiting_for_remote_kv=len(self._remote),
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks,
            num_queued_tokens=self._waiting.num_tokens
            + sum(request.num_uncomputed_tokens for request in self._running)
            + sum(request.num_uncomputed_tokens for request in self._ready)
            + sum(request.num_tokens for request in self._looking_up.values()),
            last_step_tokens=self._last_step_tokens,
            num_preemptions=self._totals.num_preemptions,
            prefix_cache_queries=self._totals.prefix_cache_queries,
            prefix_cache_hits=self._totals.prefix_cache_hits,
            num_prompt_tokens=self._totals.num_prompt_tokens,
            num_generation_tokens=self._totals.num_generation_tokens,
            tier_hits=self._totals.tier_hits,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no request owns."""
        self._kv.reset_prefix_cache()

    def check_integrity(self) -> IntegrityReport:
        """State the invariants: each block has one owner or is free, each request is in one place and each place
        holds blocks or not as it should."""
        places = {
            RequestStatus.LOOKING_UP: list(self._looking_up.values()),
            RequestStatus.RUNNING: self._running,
            RequestStatus.WAITING_FOR_REMOTE_KV: list(self._remote.values()),
            RequestStatus.WAITING: [*self._ready, *(r for r in self._waiting if r.status is RequestStatus.WAITING)],
            RequestStatus.PREEMPTED: [r for r in self._waiting if r.status is RequestStatus.PREEMPTED],
        }
        violations = self._kv.check_integrity(self._transfers.pinned_blocks)
        violations += misplaced(places, list(self._live))
        holders = {request.request_id for request in (*self._running, *self._remote.values(), *self._ready)}
        if holders != set(self._kv.holders):
            violations.append(f"blocks are held by {sorted(self._kv.holders)}, not by {sorted(holders)}")
        computing = {request: self._kv.blocks(request) for request in (*self._running, *self._ready)}
        violations += overwritten(computing, self._transfers.writable_blocks)
        if len(self._running) > self._max_num_running:
            violations.append(f"{len(self._running)} requests in a batch of {self._max_num_running}")
        return IntegrityReport(
            violations=violations,
            num_requests=len(self._live),
            num_blocks_in_use=self._kv.num_blocks - self._kv.num_free_blocks,
            num_transfers=0,
        )
