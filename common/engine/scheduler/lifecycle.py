"""The life of a request: what each transition does to its blocks, its place, its transfers and its outputs.

    add --> [grammar]
               v
       [looking up] --> waiting --> reserve --> remote --take_handoff--> ready --start--> running --> finish
               ^                |                  ^                       ^                |
               |                +--> restore -------+-----take_restored----+                |
               |                +--> admit --> running                                      |
               +------------------------------------ preempt -------------------------------+

The Scheduler decides which request is next; this module carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from common.engine.kv_cache import Block, KVCacheManager
from common.engine.messages import KVReceived, RequestOutput, RequestStarted
from common.engine.scheduler.grammars import GrammarAnswer, Grammars
from common.engine.scheduler.kv_transfers import HandedOver, Kept, KVTransfers, Restored
from common.engine.scheduler.outbox import Outbox
from common.engine.scheduler.output import DeadEnd, ModelRunnerOutput, PromptLogprobs
from common.engine.scheduler.places import Places
from common.engine.scheduler.request import Request, RequestStatus
from common.engine.scheduler.totals import Totals
from common.errors import BatonError, GrammarTooSlowError, InvalidRequestError, NonFiniteError
from common.types import FinishReason, RequestId, SampledToken


class Lifecycle:
    """Owns the live requests."""

    def __init__(self, kv: KVCacheManager, transfers: KVTransfers, grammars: Grammars) -> None:
        self._kv = kv
        self._transfers = transfers
        self._grammars = grammars
        self._block_size = kv.block_size
        self._outbox = Outbox()
        self._has_urgent_news = False  # a client or a pod can go on while the step runs
        self._dropped: list[RequestId] = []  # to be removed by the runner
        self.places = Places()
        self.totals = Totals()
        self.is_stalled = False  # a waiting request found too few blocks, and nothing has changed since

    @property
    def has_news(self) -> bool:
        """Whether there are outputs for the client or dropped requests for the runner."""
        return bool(self._dropped or self._outbox)

    def take_dropped(self) -> list[RequestId]:
        """Returns the requests dropped since the last call, which the runner removes."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_news(self, *, urgent_only: bool = False) -> list[RequestOutput]:
        """Returns outputs since the last call. `urgent_only`: none, unless the client can go on with them while a step
        runs."""
        if urgent_only and not self._has_urgent_news:
            return []
        self._has_urgent_news = False
        return self._outbox.drain()

    # ---------------------------------------------------------------- beginnings

    def add(self, request: Request) -> None:
        """Adds a new request. Raises InvalidRequestError or OverloadedError if its grammar cannot be had; then nothing
        has changed."""
        grammar = None
        has_constraint = request.sampling.structured_outputs is not None
        if has_constraint:
            grammar = request.grammar = self._grammars.ask(request)  # raises for one that is known to be impossible
        self.places.live[request.request_id] = request
        if request.is_producer or request.awaits_handoff:
            self._transfers.begin(request)
        if has_constraint and grammar is None:
            self.places.await_grammar(request)
        else:
            self._enqueue(request)

    def take_grammar(self, answer: GrammarAnswer) -> None:
        """Takes the outcome of compiling its grammar."""
        request, result = answer
        if isinstance(result, BatonError):
            self.finish(request, FinishReason.ERROR)
            self._outbox.fail(request, result)
            return
        self.places.grammar_settled(request)
        request.grammar = result
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """Queues a request that has no blocks, or first looks up which of its blocks are kept."""
        self.is_stalled = False
        request.num_kept_blocks = 0
        if self._transfers.ask(request):
            self.places.look_up(request)
        else:
            self.places.wait(request)

    def take_answer(self, kept: Kept) -> None:
        """Takes the result of the lookup."""
        kept.request.num_kept_blocks = kept.num_blocks
        self.places.answered(kept.request)

    def ask_again(self, request: Request, prefix: Sequence[Block]) -> bool:
        """At its turn: whether another lookup is needed, for which it waits."""
        if self._transfers.ask_again(request, len(prefix)):
            self.places.look_up(request)
            return True
        return False

    def reserve(self, request: Request, prefix: Sequence[Block], now: float) -> None:
        """A consumer gets blocks for its whole prompt; from now on KV may come."""
        self._claim_blocks(request, prefix)
        self.places.await_kv(request)
        self._announce_start(request, now, self._transfers.receive(request))

    def restore(self, request: Request, prefix: Sequence[Block]) -> None:
        """It gets blocks for all its tokens; those that a tier keeps come from there."""
        self._claim_blocks(request, prefix)
        self.places.await_kv(request)
        self._transfers.restore(request)

    def admit(self, request: Request, prefix: Sequence[Block], now: float) -> None:
        """It gets blocks and a slot."""
        self._claim_blocks(request, prefix)
        self.start(request, now)

    def start(self, request: Request, now: float) -> None:
        """It has blocks and gets a slot."""
        if not request.is_started:
            self._announce_start(request, now)
        self.places.run(request)

    def _announce_start(self, request: Request, now: float, reserved_block_ids: Sequence[int] = ()) -> None:
        request.is_started = True
        num_cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        self.totals.prefix_cache_hits += min(
            request.num_computed_tokens - request.num_restored_tokens, request.num_prompt_tokens
        )
        self.totals.prefix_cache_queries += request.num_prompt_tokens if self._kv.enable_prefix_caching else 0
        started = RequestStarted(
            queue_s=now - request.added_at,
            num_cached_tokens=num_cached,
            reserved_block_ids=list(reserved_block_ids),
        )
        self._outbox.add_event(request, started)
        self._has_urgent_news |= request.is_producer or bool(reserved_block_ids)

    def _claim_blocks(self, request: Request, prefix: Sequence[Block]) -> None:
        self._kv.allocate(request, prefix)
        request.num_computed_tokens = len(prefix) * self._block_size
        self._transfers.admitted(request)

    def _release_blocks(self, request: Request) -> None:
        self._transfers.released(request)
        self._kv.free(request)
        request.num_computed_tokens = 0

    # ---------------------------------------------------------------- arrivals

    def take_restored(self, request: Request, restored: Restored) -> None:
        """Its blocks hold what could be restored from a tier."""
        request.num_restored_tokens = restored.num_blocks * self._block_size - request.num_computed_tokens
        self.totals.tier_hits += request.num_restored_tokens
        request.num_computed_tokens += request.num_restored_tokens
        self._transfers.arrived(request, restored)
        self._kv.cache_computed(request)
        self.places.arrived(request)
        self.places.ready.append(request)

    def take_handoff(self, request: Request, handoff: HandedOver, now: float) -> None:
        """Continue from the longest valid prefix. If that is the whole prompt and the first token is known, nothing
        is left to prefill."""
        num_local = request.num_computed_tokens
        num_valid = max(num_local, min(handoff.num_blocks * self._block_size, request.num_prompt_tokens))
        is_complete = num_valid >= request.num_prompt_tokens and handoff.first_token is not None
        request.awaits_handoff = False
        self.places.arrived(request)
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
        self._has_urgent_news |= handoff.first_token is not None
        request.wants_prompt_logprobs = request.wants_prompt_logprobs and not is_complete  # else the producer has them
        if handoff.may_be_written or request.wants_prompt_logprobs:
            self._start_over(request, handoff.first_token)
            return
        self.places.ready.append(request)
        if handoff.first_token is not None:
            self._append_token(request, handoff.first_token)

    def _start_over(self, request: Request, first_token: SampledToken | None) -> None:
        """Back to the queue as an ordinary request: its blocks may still be written to, or it must compute its whole
        prompt. Verified blocks are complete, so the prefix cache may return them."""
        self._release_blocks(request)
        reason = self._add_token(request, first_token) if first_token is not None else None
        self._enqueue(request)
        if reason is not None:
            self.finish(request, reason)

    # ---------------------------------------------------------------- steps

    def step_ended(self, num_computed: Mapping[RequestId, int], result: ModelRunnerOutput) -> None:
        """A step has computed so many tokens of each request, and sampled one for those that then lacked none."""
        for request_id, dead_end in result.dead_ends.items():
            self._end_at(dead_end, request_id)
        for request_id, found in result.prompt_logprobs.items():
            self._take_prompt_logprobs(request_id, found)
        for request_id in result.late:
            self._put_off(request_id)
        sampled = result.sampled
        live, add_token, block_size = self.places.live, self._outbox.add_token, self._block_size
        running = RequestStatus.RUNNING
        num_decoded = 0
        for request_id, num_tokens in num_computed.items():
            request = live.get(request_id)
            if request is None or request.status is not running:
                continue  # aborted while the step ran
            token = sampled.get(request_id)
            # Most decodes fill no block, so that there is nothing to cache or to move.
            if num_tokens > 1 or token is None or request.is_producer or request.num_computed_tokens % block_size == 0:
                self._computed(request, token, result.masked)
            else:
                num_decoded += 1
                reason = request.append(token)
                add_token(request, token)
                if reason is not None:
                    self.finish(request, reason)
        self.totals.num_generation_tokens += num_decoded
        self._transfers.step_ended()

    def _put_off(self, request_id: RequestId) -> None:
        """A running request waits for the mask of its next token: the next step computes its last token again."""
        request = self.places.live.get(request_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= 1
            self.totals.num_late_masks += 1

    def _end_at(self, dead_end: DeadEnd, request_id: RequestId) -> None:
        """Ends a running request whose grammar allows no further token."""
        request = self.places.live.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return  # aborted while the step ran
        if dead_end is DeadEnd.COMPLETE and request.num_output_tokens:
            self.finish(request, FinishReason.COMPLETE)
            return
        self.totals.num_slow_grammars += dead_end is DeadEnd.TOO_SLOW
        kind = GrammarTooSlowError if dead_end is DeadEnd.TOO_SLOW else InvalidRequestError
        problem = {
            DeadEnd.COMPLETE: "the grammar allows only an empty answer",
            DeadEnd.MISMATCH: "the tokens generated before do not follow the grammar",
            DeadEnd.CONTRADICTION: "the grammar and the other sampling parameters together allow no token",
            DeadEnd.TOO_SLOW: "following the grammar takes too much time or memory",
        }[dead_end]
        self.finish(request, FinishReason.ERROR)
        self._outbox.fail(request, kind(problem, param="structured_outputs"))

    def _take_prompt_logprobs(self, request_id: RequestId, found: PromptLogprobs) -> None:
        """Reports those that were not reported before the request was preempted."""
        request = self.places.live.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        if any(math.isnan(entry.sampled) for entry in found.entries):
            self._fail(request, NonFiniteError("the model computed no finite logit for a token of the prompt"))
            return
        num_known = request.num_prompt_logprobs + 1 - found.start
        entries = found.entries[max(0, num_known) :]
        self._outbox.add_prompt_logprobs(request, request.num_prompt_logprobs + 1, entries)
        request.num_prompt_logprobs += len(entries)
        request.wants_prompt_logprobs = request.num_prompt_logprobs < request.num_prompt_tokens - 1

    def _computed(self, request: Request, token: SampledToken | None, masked: Collection[RequestId]) -> None:
        if token is None and request.num_uncomputed_tokens == 0:
            if request.request_id in masked:
                self._reject(request)
            else:
                self._fail(request, NonFiniteError("the model computed no finite logit for the next token"))
            return
        self._kv.cache_computed(request)
        self._transfers.computed(request)
        if token is not None:
            self.totals.num_generation_tokens += 1
            self._append_token(request, token)

    def _append_token(self, request: Request, token: SampledToken) -> None:
        reason = self._add_token(request, token)
        if reason is not None:
            self.finish(request, reason)

    def _add_token(self, request: Request, token: SampledToken) -> FinishReason | None:
        reason = request.append(token)
        self._outbox.add_token(request, token)
        if reason is None and request.is_producer:
            return FinishReason.HANDOFF
        return reason

    # ---------------------------------------------------------------- endings

    def preempt(self, request: Request) -> None:
        """A running request loses slot and blocks, and waits for its turn again."""
        self.places.leave(request)
        self._forget(request)
        self._release_blocks(request)
        request.status = RequestStatus.PREEMPTED
        self._enqueue(request)
        self.totals.num_preemptions += 1

    def abort(self, request: Request) -> RequestOutput:
        """Ends it now. Returns its last output."""
        self.finish(request, FinishReason.ABORT)
        return self._outbox.take(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends it, wherever it is. Blocks in transfer stay pinned as long as the transport touches them."""
        self.places.leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.places.live[request.request_id]
        self._forget(request)
        self._transfers.released(request)
        self._kv.free(request)
        self._transfers.ended(request, is_aborted=reason in (FinishReason.ABORT, FinishReason.ERROR))
        if request.sampling.structured_outputs is not None:
            self._grammars.withdraw(request)
        self._outbox.finish(request)
        self.is_stalled = False

    def _reject(self, request: Request) -> None:
        """End a running request that forbids every token."""
        self.finish(request, FinishReason.ERROR)
        error = InvalidRequestError("bad_words, allowed_token_ids and the like leave no token to go on with")
        self._outbox.fail(request, error)

    def _fail(self, request: Request, error: NonFiniteError) -> None:
        """End a running request whose KV may hold NaN: later requests must not find it in the prefix cache."""
        self._kv.forget(request)
        self.finish(request, FinishReason.ERROR)
        self._outbox.fail(request, error)

    def _forget(self, request: Request) -> None:
        if request.is_in_batch:
            request.is_in_batch = False
            self._dropped.append(request.request_id)
