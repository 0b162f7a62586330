"""The scheduler: one rule, no phases.

A request has `num_tokens` known tokens of which `num_computed_tokens` have their KV here. Each step gives tokens to
requests, under a token budget, so that the second number catches up with the first; when it does, one more token
is sampled. Prefill, chunked prefill, prefix hits, decoding, resumed and handed-over requests are that rule with
other numbers.

A step:

1. requests whose blocks are filled already, by a handoff or from a tier below, take a seat in the batch;
2. running requests get tokens, those that decode first, so that no prefill chunk delays a token. Who finds no free
   block preempts the last in order, itself at worst;
3. waiting requests are admitted in order while blocks for all their tokens, seats and budget last. A consumer needs
   neither seat nor budget: it reserves blocks and waits for its KV; nor does a request of which a tier below keeps more
   than is here, see `common.engine.scheduler.tiers`;
4. lookups, loads and saves that became possible are started.

No deadlock: the first request in order can preempt all others of the batch; what else holds blocks depends on nobody's
blocks and ends by itself: handoffs, restores, jobs, and windows, which end with the word that the producer is quiet. No
starvation: admission is strictly in order, and a step's budget is never smaller than the batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from common.engine.config import SchedulerConfig
from common.engine.kv_cache import Block, CacheChange, KVCacheManager
from common.engine.kv_connector import ConnectorFacts, TransferResult
from common.engine.messages import (
    AddRequest,
    EngineStats,
    IntegrityReport,
    KVReceived,
    KVSaved,
    RequestOutput,
    RequestStarted,
    TransferTarget,
    TransferUpdate,
)
from common.engine.request import Request, RequestStatus
from common.engine.scheduler.integrity import misplaced, overwritten
from common.engine.scheduler.outbox import Outbox
from common.engine.scheduler.output import ContinuedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from common.engine.scheduler.plan import Plan
from common.engine.scheduler.tiers import AHEAD_SHARE, Lookup, Restore, Tiers
from common.engine.scheduler.totals import Totals
from common.engine.scheduler.transfers import Incoming, Outgoing, TransferLedger
from common.engine.scheduler.waiting_queue import WaitingQueue
from common.errors import ConfigError, InvalidRequestError, NonFiniteError, OverloadedError, PromptTooLongError
from common.types import HASH_BYTES, FinishReason, RequestId, SampledToken, SamplingParams, block_size_misfit

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the requests of an engine and their place in life. Called by EngineCore on its one thread:
    any number of `add_request`, `abort_requests` and `update_transfer`, then `schedule` and, with the runner's answer,
    `update`. Times are monotonic seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        enable_prefix_caching: bool,
        connector: ConnectorFacts | None = None,
    ) -> None:
        """`num_blocks` counts the null block. Tiers are used with prefix caching only. Raises ConfigError if one
        request may outgrow the KV cache."""
        if max_model_len > (num_blocks - 1) * block_size:
            raise ConfigError(
                f"max_model_len {max_model_len} needs more than the {num_blocks - 1} KV blocks of {block_size} tokens",
                param="max_model_len",
            )
        self._config = config
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        connector = connector or ConnectorFacts()
        self._is_direct = connector.is_direct
        # Each request of the batch gets at least one token per step.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._watermark_blocks = int(config.watermark * self._kv.num_blocks)

        # Every live request is in exactly one of the four places below, or waits for an answer of the tiers.
        self._live: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue()  # no blocks
        self._remote: dict[RequestId, Request] = {}  # blocks reserved, KV in flight
        self._ready: deque[Request] = deque()  # handoff over; has blocks, wants a seat
        self._running: list[Request] = []  # the batch
        self._settling: dict[RequestId, Request] = {}  # finished producers whose saves go on or are to come

        self._transfers = TransferLedger(self._kv)
        self._tiers = Tiers(
            self._kv,
            self._transfers,
            keeps_blocks=connector.keeps_blocks and enable_prefix_caching,
            wants_offloads=connector.wants_offloads and enable_prefix_caching,
        )
        self._loadable: dict[Request, None] = {}  # requests with loads to start; a dict keeps the order
        self._savable: dict[Request, None] = {}  # producers that have just learnt where to save to
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
            is_direct=self._is_direct,
        )
        misfit = request.misfit_block_hash(self._block_size)
        if misfit is not None:
            raise InvalidRequestError(
                f"block_hashes[{misfit}] is not the hash of that block of {self._block_size} prompt tokens",
                param="block_hashes",
            )
        self._num_arrivals += 1
        self._live[request.request_id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """Queue a request that has no blocks, or first ask what is kept of it."""
        self._is_stalled = False
        if self._tiers.ask(request):
            request.status = RequestStatus.LOOKING_UP
        else:
            self._waiting.push(request)

    def _check_admissible(self, message: AddRequest) -> None:
        request_id, num_outputs = message.request_id, len(message.output_token_ids)
        num_tokens = len(message.prompt_token_ids) + num_outputs
        if request_id in self._live or request_id in self._settling or self._transfers.has_window(request_id):
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
        if message.transfer is not None and message.transfer.peer_block_size:
            self._check_peer_block_size(message.transfer.peer_block_size)
        num_waiting = len(self._waiting) + len(self._tiers.waiting)
        if num_waiting >= self._config.max_num_waiting:
            raise OverloadedError(f"{num_waiting} requests are waiting already")

    def _check_stop_tokens(self, sampling: SamplingParams) -> None:
        if sampling.min_tokens and len(sampling.stop_token_ids) + len(self._eos_token_ids) >= self._vocab_size:
            stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
            if len(stops) >= self._vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids names every token, which leaves none for the first min_tokens", param="min_tokens"
                )

    def _check_peer_block_size(self, theirs: int) -> None:
        misfit = block_size_misfit(self._block_size, theirs, is_direct=self._is_direct)
        if misfit:
            raise InvalidRequestError(
                f"block_size is {self._block_size} here and {theirs} at the producer: {misfit}", param="peer_block_size"
            )

    def abort_requests(self, request_ids: Sequence[RequestId]) -> list[RequestOutput]:
        """End requests now; one output with FinishReason.ABORT for each that was live. Their transfers are hurried,
        also those of a producer that has finished; the blocks stay pinned until these settle, and those that a
        producer may write to until it is quiet."""
        outputs = []
        for request_id in request_ids:
            request = self._live.get(request_id)
            if request is not None:
                self._give_up_saves(request)
                self._finish(request, FinishReason.ABORT)
                self._transfers.cancel(request)
                outputs.append(self._outbox.take(request))
            elif request_id in self._settling:
                self._abort_settling(self._settling[request_id])
        return outputs

    def _abort_settling(self, request: Request) -> None:
        assert request.outgoing is not None
        if request.outgoing.in_flight:
            self._transfers.cancel(request)
        else:
            self._give_up_saves(request)
            self._release_settled(request)

    def update_transfer(self, update: TransferUpdate, now: float) -> None:
        """Take news of a consumer's handoff. Ignored if the request has ended, is past its handoff, or the epoch is
        another one; but that its producer is quiet counts to the end."""
        if update.is_quiet and self._transfers.close_window(update.request_id, update.epoch):
            self._is_stalled = False
        request = self._live.get(update.request_id)
        if request is None or request.incoming is None or request.incoming.epoch != update.epoch:
            return
        request.incoming.apply(update, now)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._advance_handoff(request, request.incoming, now)

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Take where a producer is to write. Ignored if it is unknown, of another epoch, or has a target."""
        request = self._live.get(target.request_id) or self._settling.get(target.request_id)
        outgoing = request.outgoing if request is not None else None
        if request is None or outgoing is None or outgoing.epoch != target.epoch or not outgoing.wants_target:
            return
        outgoing.aim(target, request.num_prompt_tokens, self._block_size)
        if outgoing.can_start:
            self._savable[request] = None
        self._report_saved(request)
        self._release_settled(request)

    # ---------------------------------------------------------------- the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step."""
        plan = Plan(self._config.max_num_batched_tokens)
        self._seat_ready(now)
        self._schedule_running(plan)
        self._admit_waiting(plan, now)
        return self._build(plan)

    def _seat_ready(self, now: float) -> None:
        while self._ready and len(self._running) < self._max_num_running:
            self._seat(self._ready.popleft(), now)

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
        has_seat = plan.budget > 0 and len(self._running) < self._max_num_running
        if not has_seat and request.incoming is None and not request.num_kept_blocks:
            return False
        prefix = self._kv.find_cached_prefix(request)
        is_kept = request.num_kept_blocks > len(prefix)
        if not has_seat and request.incoming is None and not is_kept:
            return False
        if (is_kept and not self._may_restore) or not self._kv.can_allocate(request, prefix, self._num_held_back):
            self._is_stalled = True
            return False
        self._waiting.pop()
        if self._tiers.ask_again(request, len(prefix)):
            request.status = RequestStatus.LOOKING_UP
            return True
        self._claim_blocks(request, prefix)
        if request.incoming is not None:
            self._reserve(request, request.incoming, now)
        elif is_kept:
            self._restore(request)
        else:
            self._seat(request, now)
            plan.give(request, min(request.num_uncomputed_tokens, plan.budget))
        return True

    def _seat(self, request: Request, now: float) -> None:
        if not request.is_started:
            self._announce_start(request, now)
        request.status = RequestStatus.RUNNING
        self._running.append(request)

    def _claim_blocks(self, request: Request, prefix: Sequence[Block]) -> None:
        self._kv.allocate(request, prefix)
        request.num_computed_tokens = len(prefix) * self._block_size
        request.num_offered_blocks = len(prefix)

    def _release_blocks(self, request: Request) -> None:
        self._tiers.forgo(request)
        self._kv.free(request)
        request.num_computed_tokens = 0

    @property
    def _num_held_back(self) -> int:
        """Blocks that admission leaves free for growth: one for each request that holds blocks, and at least the
        watermark. None if there is no such request, or a large one might never be admitted."""
        num_holders = len(self._running) + len(self._ready) + len(self._remote)
        return max(num_holders, self._watermark_blocks) if num_holders else 0

    @property
    def _may_restore(self) -> bool:
        num_restoring = sum(request.restore is not None for request in self._remote.values())
        num_seated = len(self._running) + len(self._ready) + num_restoring
        return num_seated < self._max_num_running + max(1, self._max_num_running // AHEAD_SHARE)

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
        self._has_urgent_news |= request.outgoing is not None or (self._is_direct and request.incoming is not None)

    def _build(self, plan: Plan) -> SchedulerOutput:
        """The step as data. From here on the scheduled tokens count as computed."""
        step = SchedulerOutput(
            total_num_scheduled_tokens=self._config.max_num_batched_tokens - plan.budget,
            dropped_request_ids=self._dropped,
            cancelled_job_ids=self._transfers.take_cancelled(),
            lookups=self._tiers.take_lookups(),
        )
        self._dropped = []
        self._last_step_tokens = step.total_num_scheduled_tokens or self._last_step_tokens
        self._start_loads(step)
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
            if request.outgoing is not None:
                self._start_saves(request, request.outgoing, step)
        step.saves.extend(self._tiers.take_saves(plan.scheduled))
        for request in self._savable:
            assert request.outgoing is not None
            self._start_saves(request, request.outgoing, step)  # what was computed before the target came
        self._savable.clear()
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

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[RequestOutput]:
        """Take the runner's answer to `step`. What requests gained since the last call, in any way."""
        for transfer in result.transfers:
            self._settle(transfer, now)
        for request_id in step.num_scheduled_tokens:
            request = self._live.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            token = result.sampled.get(request_id)
            if request.num_uncomputed_tokens == 0 and token is None:
                self._fail(request, NonFiniteError("the model computed no finite logit for the next token"))
                continue
            self._kv.cache_computed(request)
            if token is not None:
                self._totals.num_generation_tokens += 1
                self._append_token(request, token)
        return self._outbox.drain()

    def _append_token(self, request: Request, token: SampledToken) -> None:
        reason = self._add_token(request, token)
        if reason is not None:
            self._finish(request, reason)

    def _add_token(self, request: Request, token: SampledToken) -> FinishReason | None:
        reason = request.append(token)
        self._outbox.add_token(request, token)
        if reason is None and request.outgoing is not None:
            return FinishReason.HANDOFF
        return reason

    # ---------------------------------------------------------------- transfers

    def _reserve(self, request: Request, incoming: Incoming, now: float) -> None:
        """The consumer holds blocks for its whole prompt; from now on KV may come."""
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._remote[request.request_id] = request
        incoming.reserve(request.num_computed_tokens, self._block_size)
        reserved: list[int] = []
        if self._is_direct and not incoming.is_quiet and incoming.final_at is None:
            reserved = self._transfers.open_window(request, incoming.epoch, incoming.num_local)
        self._announce_start(request, now, reserved)
        self._advance_handoff(request, incoming, now)

    def _advance_handoff(self, request: Request, incoming: Incoming, now: float) -> None:
        may_be_written = self._transfers.has_window(request.request_id)
        if incoming.num_loadable(request.num_prompt_tokens, self._block_size) > incoming.num_started:
            self._loadable[request] = None
        elif incoming.is_over and (incoming.has_failed or not may_be_written):
            self._conclude_handoff(request, incoming, now)
        elif incoming.is_broken:
            self._transfers.cancel(request)  # what comes after the gap is of no use

    def _start_loads(self, step: SchedulerOutput) -> None:
        for request in self._loadable:
            stream = request.incoming or request.restore
            assert stream is not None
            stop = stream.num_loadable(request.num_prompt_tokens, self._block_size)
            if stop > stream.num_started:
                step.loads.append(self._transfers.start(request, stream, stop))
        self._loadable.clear()

    def _restore(self, request: Request) -> None:
        """The request holds blocks for all its tokens; those that a tier keeps come from there."""
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        request.restore = Restore(request.num_offered_blocks, request.num_kept_blocks)
        self._remote[request.request_id] = request
        self._loadable[request] = None

    def _conclude_restore(self, request: Request, restore: Restore) -> None:
        num_restored = restore.num_moved * self._block_size - request.num_computed_tokens
        request.restore = None
        request.num_restored_tokens = num_restored
        request.num_computed_tokens += num_restored
        request.num_offered_blocks = restore.num_moved
        self._tiers.num_restored_tokens += num_restored
        self._kv.cache_computed(request)
        del self._remote[request.request_id]
        request.status = RequestStatus.WAITING
        self._ready.append(request)

    def _conclude_handoff(self, request: Request, incoming: Incoming, now: float) -> None:
        """Continue from the longest valid prefix. If that is the whole prompt and the first token is known, nothing
        is left to prefill."""
        num_local = request.num_computed_tokens
        unit = incoming.unit(self._block_size)
        num_valid = max(num_local, min(incoming.num_moved * unit, request.num_prompt_tokens))
        is_complete = num_valid >= request.num_prompt_tokens and incoming.first_token is not None
        request.incoming = None
        self._remote.pop(request.request_id)
        self._loadable.pop(request, None)
        received = KVReceived(
            num_tokens=num_valid - num_local,
            handoff_s=0.0 if incoming.final_at is None else now - incoming.final_at,
            recompute_reason="" if is_complete else incoming.error or incoming.failure or "incomplete",
        )
        self._outbox.add_event(request, received)
        known = request.num_tokens if incoming.first_token is not None else request.num_tokens - 1
        request.num_computed_tokens = min(num_valid, known)  # without the first token, the last one is computed again
        self._kv.cache_computed(request)
        if not incoming.is_direct and unit == self._block_size:
            request.num_offered_blocks = request.num_computed_tokens // self._block_size  # a store has them already
        self._tiers.offer(request)
        request.status = RequestStatus.WAITING
        if self._transfers.has_window(request.request_id):
            self._start_over(request, incoming.first_token)
            return
        self._ready.append(request)
        if incoming.first_token is not None:
            self._append_token(request, incoming.first_token)

    def _start_over(self, request: Request, first_token: SampledToken | None) -> None:
        """Back to the queue as an ordinary request: its blocks may still be written to. What was verified of them is
        complete, so the prefix cache may give it back."""
        self._release_blocks(request)
        reason = self._add_token(request, first_token) if first_token is not None else None
        self._enqueue(request)
        if reason is not None:
            self._finish(request, reason)

    def _start_saves(self, request: Request, outgoing: Outgoing, step: SchedulerOutput) -> None:
        """Save the prompt blocks that are complete after this step; the partial last one once nothing more is
        written to it. Blocks found in the prefix cache are saved too: the store may have lost them."""
        if not outgoing.can_start:
            return
        if request.is_finished or request.num_uncomputed_tokens == 0:
            stop = self._kv.num_blocks_for(request.num_prompt_tokens)
        else:
            stop = min(request.num_computed_tokens, request.num_prompt_tokens) // self._block_size
        if stop > outgoing.num_started:
            step.saves.append(self._transfers.start(request, outgoing, stop))

    def _settle(self, result: TransferResult, now: float) -> None:
        job = self._transfers.settle(result)
        if job is None:
            logger.warning("connector settled job %d, which is not under way; ignored", result.job_id)
            return
        self._is_stalled = False
        request = job.request
        if request is None:
            return  # an offload: nobody waits for it
        if isinstance(job.owner, Outgoing):
            if job.owner.is_direct and job.owner.is_broken:
                self._transfers.cancel(request, job.owner)  # the failure is said when nothing is written any more
            self._report_saved(request)
            self._release_settled(request)
        elif request.is_finished:
            return
        elif isinstance(job.owner, Lookup):
            self._tiers.withdraw(request)
            request.status = RequestStatus.WAITING
            self._waiting.push(request)
        elif isinstance(job.owner, Restore):
            self._conclude_restore(request, job.owner)
        elif request.incoming is not None:
            self._advance_handoff(request, request.incoming, now)

    def _give_up_saves(self, request: Request) -> None:
        if request.outgoing is not None:
            request.outgoing.fail("aborted")
            self._report_saved(request)

    def _report_saved(self, request: Request) -> None:
        """Say how much of a producer's prompt is in the connector, if that is news. With a direct connector a failure
        also says that nothing is written any more, so it waits for all jobs."""
        outgoing = request.outgoing
        if outgoing is None or outgoing.is_reported_broken:
            return
        num_tokens = min(outgoing.num_moved * self._block_size, request.num_prompt_tokens)
        may_be_writing = outgoing.is_direct and outgoing.in_flight
        failure = "" if num_tokens == request.num_prompt_tokens or may_be_writing else outgoing.error
        if num_tokens > outgoing.num_reported_tokens or failure:
            start, stop = self._kv.num_blocks_for(outgoing.num_reported_tokens), outgoing.num_moved
            outgoing.num_reported_tokens = num_tokens
            outgoing.is_reported_broken = bool(failure)
            digests = outgoing.take_digests(start, stop)
            self._outbox.add_event(request, KVSaved(num_tokens=num_tokens, failure=failure, digests=digests))

    def _release_settled(self, request: Request) -> None:
        """Free the blocks of a finished producer that has saved all that it will."""
        assert request.outgoing is not None
        num_blocks = self._kv.num_blocks_for(request.num_prompt_tokens)
        if self._settling.get(request.request_id) is request and request.outgoing.is_settled(num_blocks):
            del self._settling[request.request_id]
            self._savable.pop(request, None)
            self._kv.free(request)
            self._is_stalled = False

    # ---------------------------------------------------------------- endings

    def _leave(self, request: Request) -> None:
        """Take a live request out of its place."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            del self._remote[request.request_id]
            self._loadable.pop(request, None)
        elif request.status is RequestStatus.LOOKING_UP:
            self._tiers.withdraw(request)
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
        num_blocks = self._kv.num_blocks_for(request.num_prompt_tokens)
        is_settled = request.outgoing is None or request.outgoing.is_settled(num_blocks)
        self._tiers.forgo(request)
        if is_settled or reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._savable.pop(request, None)
            self._kv.free(request)
        else:
            self._settling[request.request_id] = request
        self._outbox.finish(request)
        self._is_stalled = False

    def _fail(self, request: Request, error: NonFiniteError) -> None:
        """End a running request whose KV may hold NaN: later requests must not find it in the prefix cache."""
        self._kv.forget(request)
        self._give_up_saves(request)
        self._finish(request, FinishReason.ERROR)
        self._transfers.cancel(request)
        self._outbox.fail(request, error)

    def _forget(self, request: Request) -> None:
        if request.is_in_batch:
            request.is_in_batch = False
            self._dropped.append(request.request_id)

    # ---------------------------------------------------------------- for the core

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something. False with `has_unfinished` True means: wait for a command or for
        a transfer to settle."""
        return bool(
            self._running
            or self._ready
            or self._loadable
            or self._savable
            or self._dropped
            or self._outbox
            or self._tiers.has_work
            or self._transfers.has_cancellations
            or (self._waiting and not self._is_stalled)
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is live, a transfer has not settled, or a producer may still write here."""
        return bool(self._live or self._settling or self._transfers or self._tiers.has_work)

    @property
    def has_cache_change(self) -> bool:
        """Whether the prefix cache changed since it was last asked how."""
        return bool(self._kv.cache_changes)

    def take_cache_change(self) -> CacheChange:
        """What became of the prefix cache since the last call."""
        return self._kv.cache_changes.take()

    def stats(self) -> EngineStats:
        """Current figures; those of the step's duration are the core's."""
        offloads = self._tiers.offloads
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._ready) + len(self._tiers.waiting),
            num_waiting_for_remote_kv=len(self._remote),
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks,
            num_queued_tokens=self._waiting.num_tokens
            + sum(request.num_uncomputed_tokens for request in self._running)
            + sum(request.num_uncomputed_tokens for request in self._ready)
            + sum(request.num_tokens for request in self._tiers.waiting),
            last_step_tokens=self._last_step_tokens,
            num_preemptions=self._totals.num_preemptions,
            prefix_cache_queries=self._totals.prefix_cache_queries,
            prefix_cache_hits=self._totals.prefix_cache_hits,
            num_prompt_tokens=self._totals.num_prompt_tokens,
            num_generation_tokens=self._totals.num_generation_tokens,
            tier_queries=self._tiers.num_queried_tokens,
            tier_hits=self._tiers.num_restored_tokens,
            num_offloaded_blocks=offloads.num_saved if offloads is not None else 0,
            num_offload_failures=offloads.num_failed if offloads is not None else 0,
            num_offloads_skipped=offloads.num_skipped if offloads is not None else 0,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no request owns."""
        self._kv.reset_prefix_cache()

    def check_integrity(self) -> IntegrityReport:
        """State the invariants: each block has one owner or is free, each request is in one place and each place
        holds blocks or not as it should."""
        places = {
            RequestStatus.LOOKING_UP: list(self._tiers.waiting),
            RequestStatus.RUNNING: self._running,
            RequestStatus.WAITING_FOR_REMOTE_KV: list(self._remote.values()),
            RequestStatus.WAITING: [*self._ready, *(r for r in self._waiting if r.status is RequestStatus.WAITING)],
            RequestStatus.PREEMPTED: [r for r in self._waiting if r.status is RequestStatus.PREEMPTED],
            RequestStatus.FINISHED: list(self._settling.values()),
        }
        violations = self._kv.check_integrity([*self._transfers.pinned_blocks, *self._tiers.offered_blocks])
        violations += misplaced(places, [*self._live, *self._settling])
        holders = {request.request_id for request in (*self._running, *self._remote.values(), *self._ready)}
        holders |= self._settling.keys()
        if holders != set(self._kv.holders):
            violations.append(f"blocks are held by {sorted(self._kv.holders)}, not by {sorted(holders)}")
        computing = {request: self._kv.blocks(request) for request in (*self._running, *self._ready)}
        computing |= {request: self._kv.blocks(request) for request in self._settling.values()}
        violations += overwritten(computing, self._transfers.windowed_blocks)
        if len(self._running) > self._max_num_running:
            violations.append(f"{len(self._running)} requests in a batch of {self._max_num_running}")
        return IntegrityReport(
            violations=violations,
            num_requests=len(self._live),
            num_blocks_in_use=self._kv.num_blocks - self._kv.num_free_blocks,
            num_transfers=len(self._transfers),
        )
