"""The life of a request: what each transition does to its blocks, its place, its transfers and its outputs.

    add --> [grammar] --> [adapter]
               v             v
       [looking up] --> waiting --> reserve --> remote --take_handoff--> ready --start--> running --> finish
               ^                |                  ^                       ^                |
               |                +--> restore -------+-----take_restored----+                |
               |                +--> admit --> running                                      |
               +------------------------------------ preempt -------------------------------+

The Scheduler decides which request is next; this module carries it out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from common.engine.contract.step import ModelRunnerOutput, NoToken, Outcome, PromptLogprobs
from common.engine.kv_cache import Block, KVCacheManager, Prefix
from common.engine.messages import KVReceived, RequestOutput, RequestStarted
from common.engine.scheduler.adapters import AdapterPlaces
from common.engine.scheduler.grammars import GrammarAnswer, Grammars
from common.engine.scheduler.kv_transfers import HandedOver, Kept, KVTransfers, Restored
from common.engine.scheduler.outbox import Outbox
from common.engine.scheduler.places import Places
from common.engine.scheduler.request import Request, RequestStatus
from common.engine.scheduler.totals import Totals
from common.errors import BatonError, GrammarTooSlowError, InvalidRequestError, NonFiniteError
from common.types import FinishReason, RequestId, SampledToken

NO_DRAFTS: Mapping[Request, Sequence[int]] = MappingProxyType({})


@dataclass(slots=True)
class _Flight:
    """A step that runs, or is about to."""

    scheduled: dict[Request, int]  # tokens of each; requests that have left meanwhile are not in it
    num_tokens: int
    num_prompt_tokens: int
    drafts: Mapping[Request, Sequence[int]]  # of those that verify some
    pinned: list[Block] = field(default_factory=list)  # blocks of those that have left, to which it writes


class Lifecycle:
    """Owns the live requests."""

    def __init__(self, kv: KVCacheManager, transfers: KVTransfers, grammars: Grammars, adapters: AdapterPlaces) -> None:
        self._kv = kv
        self._adapters = adapters
        self._transfers = transfers
        self._grammars = grammars
        self._block_size = kv.block_size
        self._outbox = Outbox()
        self._has_urgent_outputs = False  # a client or a pod can go on while the step runs
        self._dropped: list[RequestId] = []  # to be removed by the runner
        self._flights: deque[_Flight] = deque()  # steps that run or are about to, in order
        self.drafts: dict[Request, list[int]] = {}  # proposed when the last step ended
        self.places = Places()
        self.totals = Totals()
        self.is_stalled = False  # a waiting request found too few blocks, and nothing has changed since

    @property
    def has_outputs(self) -> bool:
        """Whether there are outputs for the client or dropped requests for the runner."""
        return bool(self._dropped or self._outbox)

    @property
    def dropped(self) -> list[RequestId]:
        """The requests dropped since the last call of `take_dropped`."""
        return self._dropped.copy()

    def take_dropped(self) -> list[RequestId]:
        """Returns the requests dropped since the last call, which the runner removes."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_outputs(self, *, urgent_only: bool = False) -> list[RequestOutput]:
        """Returns outputs since the last call. `urgent_only`: none, unless the client can go on with them while a step
        runs."""
        if urgent_only and not self._has_urgent_outputs:
            return []
        self._has_urgent_outputs = False
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
        self._adapters.add(request)
        if request.is_producer or request.awaits_handoff:
            self._transfers.begin(request)
        if has_constraint and grammar is None:
            self.places.await_grammar(request)
        else:
            self._enter(request)

    def take_grammar(self, answer: GrammarAnswer) -> None:
        """Takes the outcome of compiling its grammar."""
        request, result = answer
        if isinstance(result, BatonError):
            self.finish(request, FinishReason.ERROR)
            self._outbox.fail(request, result)
            return
        self.places.grammar_settled(request)
        request.grammar = result
        self._enter(request)

    def _enter(self, request: Request) -> None:
        """It has what it needs but for its adapter, blocks and a slot."""
        if self._adapters.take(request):
            self._enqueue(request)
        else:
            self.places.await_adapter(request)

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

    def ask_again(self, request: Request, prefix: Prefix) -> bool:
        """At its turn: whether another lookup is needed, for which it waits."""
        if self._transfers.ask_again(request, len(prefix)):
            self.places.look_up(request)
            return True
        return False

    def reserve(self, request: Request, prefix: Prefix, now: float) -> None:
        """A consumer gets blocks for its whole prompt; from now on KV may come."""
        self._claim_blocks(request, prefix)
        self.places.await_kv(request)
        self._announce_start(request, now, self._transfers.receive(request))

    def restore(self, request: Request, prefix: Prefix) -> None:
        """It gets blocks for all its tokens; those that a tier keeps come from there."""
        self._claim_blocks(request, prefix)
        self.places.await_kv(request)
        self._transfers.restore(request)

    def admit(self, request: Request, prefix: Prefix, now: float) -> None:
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
        self._has_urgent_outputs |= request.is_producer or bool(reserved_block_ids)

    def _claim_blocks(self, request: Request, prefix: Prefix) -> None:
        self._kv.allocate(request, prefix)
        request.has_computed(len(prefix) * self._block_size)
        self._transfers.admitted(request)

    def _release_blocks(self, request: Request) -> None:
        self._leave_flights(request)
        self._transfers.released(request)
        self._kv.free(request)
        request.has_computed(0)
        request.awaits_mask = False

    # ---------------------------------------------------------------- arrivals

    def take_restored(self, request: Request, restored: Restored) -> None:
        """Its blocks hold what could be restored from a tier."""
        request.num_restored_tokens = restored.num_blocks * self._block_size - request.num_computed_tokens
        self.totals.tier_hits += request.num_restored_tokens
        request.has_computed(request.num_computed_tokens + request.num_restored_tokens)
        self._transfers.arrived(request, restored)
        self._kv.free_skipped(request)
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
        request.has_computed(min(num_valid, known))  # without the first token, the last one is computed again
        self._kv.cache_computed(request)
        self._transfers.arrived(request, handoff)
        self._has_urgent_outputs |= handoff.first_token is not None
        request.wants_prompt_logprobs = request.wants_prompt_logprobs and not is_complete  # else the producer has them
        if handoff.may_be_written or request.wants_prompt_logprobs or self._kv.lacks_blocks(request):
            self._start_over(request, handoff.first_token)
            return
        self.places.ready.append(request)
        if handoff.first_token is not None:
            self._append_token(request, handoff.first_token)

    def _start_over(self, request: Request, first_token: SampledToken | None) -> None:
        """Back to the queue as an ordinary request: its blocks may still be written to, it must compute its whole
        prompt, or has too few blocks to compute the rest. Verified blocks are complete, so the prefix cache may return
        them."""
        self._release_blocks(request)
        reason = self._add_token(request, first_token) if first_token is not None else None
        self._enqueue(request)
        if reason is not None:
            self.finish(request, reason)

    # ---------------------------------------------------------------- steps

    def step_began(
        self,
        scheduled: dict[Request, int],
        num_tokens: int,
        num_prompt_tokens: int = 0,
        drafts: Mapping[Request, Sequence[int]] = NO_DRAFTS,
    ) -> None:
        """A step computes so many tokens of each request, which count as scheduled, `num_tokens` in all;
        `num_prompt_tokens` of them for the first time. The last of some are drafts."""
        self._flights.append(_Flight(scheduled, num_tokens, num_prompt_tokens, drafts))
        self.totals.num_prompt_tokens += num_prompt_tokens

    def step_ended(self, result: ModelRunnerOutput, step_s: float) -> None:
        """The first step in flight is over, after `step_s` seconds."""
        flight = self._flights.popleft()
        self.totals.count_step(flight.num_tokens, flight.num_prompt_tokens, step_s)
        outcomes, prompt_logprobs, drafts = result.outcomes, result.prompt_logprobs, flight.drafts
        add_token, block_size = self._outbox.add_token, self._block_size
        num_sampled = 0
        for request, num_tokens in flight.scheduled.items():
            request.num_computed_tokens += num_tokens
            if prompt_logprobs and not self._take_prompt_logprobs(request, prompt_logprobs):
                continue
            if result.pooled and (pooled := result.pooled.get(request.request_id)) is not None:
                self._take_pooled(request, pooled)
                continue
            outcome = outcomes.get(request.request_id)
            if drafts and request in drafts:
                num_sampled += self._verify(request, len(drafts[request]), outcome)
                if request.is_finished:
                    continue
            if isinstance(outcome, NoToken):
                self._take_no_token(request, num_tokens, outcome)
                continue
            # Most decodes fill no block, so that there is nothing to cache or to move.
            if num_tokens > 1 or request.is_producer or request.num_computed_tokens % block_size == 0:
                self._kv.cache_computed(request)
                self._transfers.computed(request)
            if outcome is not None:
                num_sampled += 1
                token = outcome[-1]
                reason = request.append(token)
                add_token(request, token)
                if reason is None and request.is_producer:
                    reason = FinishReason.HANDOFF
                if reason is not None:
                    self.finish(request, reason)
        self.totals.num_generation_tokens += num_sampled
        if drafts:
            self.totals.drafts.num_steps += 1
        if flight.pinned or self._kv.has_fallen_out:
            self._kv.unpin(flight.pinned)
            self._kv.has_fallen_out = self.is_stalled = False
        self._transfers.step_ended()
        self.drafts = {}  # those that came while this step ran are for tokens that are known now
        if result.drafts:
            running = {request.request_id: request for request in flight.scheduled if not request.is_finished}
            self.drafts = {running[each]: found for each, found in result.drafts.items() if each in running}
            self.totals.drafts.num_proposed += sum(map(len, self.drafts.values()))
        if result.drafting is not None:
            self.totals.drafts.num_caught_up += result.drafting.num_caught_up
            self.totals.drafts.num_unseen += result.drafting.num_unseen
        if result.proposer_failure:
            self.totals.drafts.count_failure(result.proposer_failure)

    def take_drafts(self) -> dict[Request, list[int]]:
        """Returns what was proposed when the last step ended, also for requests that have left the batch meanwhile."""
        drafts, self.drafts = self.drafts, {}
        return drafts

    def _verify(self, request: Request, num_drafts: int, outcome: Outcome | None) -> int:
        """Appends the drafts that were right, which come first in the outcome. What was computed of the others counts
        no longer; its blocks stay, as the next tokens go there. Returns how many were right."""
        right = outcome[:-1] if isinstance(outcome, list) else []
        request.num_computed_tokens -= num_drafts - len(right)
        request.num_scheduled_tokens -= num_drafts - len(right)
        for number, token in enumerate(right, 1):
            reason = request.append(token)
            self._outbox.add_token(request, token)
            if reason is not None:
                request.num_computed_tokens = request.num_tokens - 1
                self._kv.cache_computed(request)
                self._transfers.computed(request)
                self._count_drafts(request, number, number)  # of those after the end nothing is known
                self.finish(request, reason)
                return number
        if isinstance(outcome, list):
            self._count_drafts(request, num_drafts, len(right))
        return len(right)

    def _count_drafts(self, request: Request, num_drafts: int, num_right: int) -> None:
        assert request.acceptance is not None
        request.acceptance.observe(num_drafts, num_right)
        self._outbox.add_drafts(request, num_drafts, num_right)
        self.totals.drafts.count_verification(num_drafts, num_right)

    def _leave_flights(self, request: Request) -> None:
        """A request ends or loses its blocks: results of steps in flight are not for it. Blocks that they write to are
        not given to others before they are over."""
        if request.num_scheduled_tokens == request.num_computed_tokens:
            return
        written = self._kv.blocks_of_tokens(request, request.num_computed_tokens, request.num_scheduled_tokens)
        last = None
        for flight in self._flights:
            if flight.scheduled.pop(request, None) is not None:
                last = flight
        if last is not None:
            self._kv.pin(written)
            last.pinned += written

    @property
    def in_flight(self) -> Iterable[Request]:
        """The requests for which the first step in flight computes."""
        return self._flights[0].scheduled if self._flights else ()

    @property
    def pinned_blocks(self) -> Iterable[Block]:
        """Blocks of requests that are gone, to which steps in flight write."""
        return (block for flight in self._flights for block in flight.pinned)

    def _take_no_token(self, request: Request, num_tokens: int, outcome: NoToken) -> None:
        """A running request has computed so many tokens, up to its last, but has no next one."""
        match outcome:
            case NoToken.NOT_YET:
                self.totals.num_late_masks += 1
                request.awaits_mask = True
                request.num_computed_tokens -= 1
                request.num_scheduled_tokens -= 1
                if num_tokens > 1:
                    self._kv.cache_computed(request)
                    self._transfers.computed(request)
            case NoToken.COMPLETE if request.num_output_tokens:
                self.finish(request, FinishReason.COMPLETE)
            case NoToken.NON_FINITE:
                self._fail(request, NonFiniteError("the model computed no finite logit for the next token"))
            case _:
                self.totals.num_slow_grammars += outcome is NoToken.TOO_SLOW
                self.finish(request, FinishReason.ERROR)
                self._outbox.fail(request, _no_token_error(outcome))

    def _take_prompt_logprobs(self, request: Request, by_request: Mapping[RequestId, PromptLogprobs]) -> bool:
        """Reports those that were not reported before the request was preempted. False: it has ended."""
        found = by_request.get(request.request_id)
        if found is None:
            return True
        if any(math.isnan(entry.sampled) for entry in found.entries):
            self._fail(request, NonFiniteError("the model computed no finite logit for a token of the prompt"))
            return False
        num_known = request.num_prompt_logprobs + 1 - found.start
        entries = found.entries[max(0, num_known) :]
        self._outbox.add_prompt_logprobs(request, request.num_prompt_logprobs + 1, entries)
        request.num_prompt_logprobs += len(entries)
        request.wants_prompt_logprobs = request.num_prompt_logprobs < request.num_prompt_tokens - 1
        return True

    def _take_pooled(self, request: Request, pooled: bytes) -> None:
        """Ends a request with the numbers of its prompt; empty: they are not finite."""
        if not pooled:
            self._fail(request, NonFiniteError("the model computed no finite numbers for the prompt"))
            return
        self._kv.cache_computed(request)
        self._transfers.computed(request)
        self._outbox.set_pooled(request, pooled)
        self.finish(request, FinishReason.STOP)

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
        self._leave_flights(request)
        self._transfers.released(request)
        self._kv.free(request)
        self._transfers.ended(request, is_aborted=reason in (FinishReason.ABORT, FinishReason.ERROR))
        if request.sampling.structured_outputs is not None:
            self._grammars.withdraw(request)
        self._outbox.finish(request)
        self.is_stalled = False
        for each in self._adapters.release(request):
            self.places.got_adapter(each)
            self._enqueue(each)

    def _fail(self, request: Request, error: NonFiniteError) -> None:
        """End a running request whose KV may hold NaN: later requests must not find it in the prefix cache."""
        self._kv.forget(request)
        self.finish(request, FinishReason.ERROR)
        self._outbox.fail(request, error)

    def _forget(self, request: Request) -> None:
        if request.is_in_batch:
            request.is_in_batch = False
            self._dropped.append(request.request_id)


def _no_token_error(outcome: NoToken) -> InvalidRequestError:
    match outcome:
        case NoToken.TOO_SLOW:
            problem = "following the grammar takes too much time or memory"
            return GrammarTooSlowError(problem, param="structured_outputs")
        case NoToken.COMPLETE:
            problem = "the grammar allows no token: only an empty answer, or none"
        case NoToken.MISMATCH:
            problem = "the tokens generated before do not follow the grammar"
        case NoToken.CONTRADICTION:
            problem = "the grammar and the other sampling parameters together allow no token"
        case _:
            return InvalidRequestError("bad_words, allowed_token_ids and the like leave no token to go on with")
    return InvalidRequestError(problem, param="structured_outputs")
