"""Drafts in steps: which of those that were proposed are verified, how many a draft model is asked for, and the blocks
for both. DraftDepth decides what pays."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.contract.step import NOTHING_ASKED, Asked, Drafting, SchedulerOutput
from common.engine.kv_cache import KVCacheManager
from common.engine.scheduler.draft_depth import Acceptance, Candidate, DraftDepth
from common.engine.scheduler.lifecycle import Lifecycle
from common.engine.scheduler.request import Request
from common.engine.scheduler.step_plan import StepPlan
from common.step_times import StepTimes


class StepDrafts:
    """The scheduler's part that plans drafts, after all else of a step."""

    def __init__(
        self,
        kv: KVCacheManager,
        lifecycle: Lifecycle,
        depth: DraftDepth,
        *,
        max_rows: int,
        max_tokens: int,
        has_model: bool,
    ) -> None:
        """A step has logits of `max_rows` rows at most, and `max_tokens` tokens. `has_model`: a draft model proposes,
        which is asked."""
        self.asked = NOTHING_ASKED  # by the last step
        self._kv = kv
        self._lifecycle = lifecycle
        self._depth = depth
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._has_model = has_model

    def plan(self, plan: StepPlan, times: StepTimes) -> None:
        """Adds drafts to a step, and room for those that are asked for."""
        self.asked = self._ask(plan, times) if self._has_model else NOTHING_ASKED
        if self._lifecycle.drafts:
            self._verify(plan)
        if self.asked.num_drafts:
            self._make_room_for_what_is_asked(plan)

    def may_follow(self, going_on: Sequence[Request]) -> bool:
        """Whether a step after the one that runs, in which these requests go on, may have drafts or ask for some."""
        if self.asked.num_drafts or self._depth.expects_drafts:
            return True
        if self._has_model and self._ask_for(going_on, sum(map(_num_tokens, going_on))) != NOTHING_ASKED:
            return True
        return bool(self._lifecycle.drafts) and self._would_verify(going_on)

    def observe(self, step: SchedulerOutput, step_s: float) -> None:
        """A step with tokens took so long, without what a draft model did beside it."""
        num_tokens = step.total_num_scheduled_tokens
        if step.work == num_tokens and self._lifecycle.totals.drafts.num_proposed:  # prompts weigh more
            self._depth.observe(step_s, num_tokens, step.num_context_tokens, has_drafts=bool(step.drafts))

    def observe_model(self, drafting: Drafting) -> None:
        """Takes the report of a draft model on a step."""
        self._has_model = not drafting.has_failed
        self._depth.observe_drafting(drafting)

    def _ask(self, plan: StepPlan, times: StepTimes) -> Asked:
        """Returns the work that the draft model may do once the step that is planned so far has sampled."""
        if plan.has_prompts:
            return self._depth.ask_beside_prompts(times.predict(plan.work, plan.num_context_tokens))
        return self._ask_for(list(plan.scheduled), plan.num_context_tokens)

    def _ask_for(self, requests: Sequence[Request], num_context_tokens: int) -> Asked:
        of_pod = self._depth.acceptance
        chances = [(request.acceptance or of_pod).chance for request in requests if self._may_have_drafts(request)]
        return self._depth.ask(chances, len(requests), num_context_tokens)

    def _may_have_drafts(self, request: Request) -> bool:
        """Whether the step after the next token of a request that decodes may verify some."""
        return (
            request.sampling.speculative
            and not request.is_producer
            and request.num_tokens + 2 < request.max_num_tokens  # or the last token would come after none
        )

    def _make_room_for_what_is_asked(self, plan: StepPlan) -> None:
        """The draft model writes its KV to the blocks of the tokens that it proposes. Where there are none, it proposes
        fewer."""
        for request, num_tokens in plan.scheduled.items():
            num_known = request.num_scheduled_tokens + num_tokens + 1  # if the step's drafts are right
            num_drafts = min(self.asked.num_drafts, request.max_num_tokens - num_known - 1)
            if num_drafts > 0 and self._may_have_drafts(request):
                self._make_room_for_drafts(request, num_tokens - 1 + num_drafts, plan)

    def _verify(self, plan: StepPlan) -> None:
        """Lets requests that decode in this step verify what was proposed for them, as far as it pays and the budget,
        the memory for logits, their lengths and blocks that no request may need for another token allow. A step with
        prompts takes the time that it may without drafts."""
        proposed = self._lifecycle.take_drafts()
        if plan.has_prompts:
            return
        verifying: list[Request] = []
        candidates: list[Candidate] = []
        for request, token_ids in proposed.items():
            if plan.scheduled.get(request) == 1 and request.num_scheduled_tokens == request.num_tokens - 1:
                candidates.append(self._candidate(request, len(token_ids)))
                verifying.append(request)
        room = min(plan.budget, self._max_rows - len(plan.scheduled))
        depths = self._depth.choose(candidates, len(plan.scheduled), plan.num_context_tokens, max(room, 0))
        for request, depth in zip(verifying, depths, strict=True):
            num_drafts = self._make_room_for_drafts(request, depth, plan) if depth else 0
            if num_drafts:
                plan.draft(request, proposed[request][:num_drafts], request.num_scheduled_tokens)

    def _would_verify(self, running: Sequence[Request]) -> bool:
        """Whether some of what was proposed while the step runs would be verified, were it proposed after it."""
        room = min(self._max_tokens, self._max_rows) - len(running)
        if room <= 0:
            return False
        candidates = [self._candidate(each, len(drafts)) for each, drafts in self._lifecycle.drafts.items()]
        return self._depth.would_choose(candidates, len(running), sum(map(_num_tokens, running)), room)

    def _candidate(self, request: Request, num_drafts: int) -> Candidate:
        acceptance = request.acceptance
        if acceptance is None:
            acceptance = request.acceptance = Acceptance(self._depth.acceptance)
        most = min(num_drafts, request.max_num_tokens - request.num_tokens - 1)
        return Candidate(most, request.num_tokens - 1, acceptance.chance)

    def _make_room_for_drafts(self, request: Request, num_drafts: int, plan: StepPlan) -> int:
        """Returns how many drafts fit its blocks, with new ones if more are free than requests run."""
        num_tokens = request.num_scheduled_tokens + 1
        num_missing = self._kv.num_missing_blocks(request, num_tokens + num_drafts)
        if num_missing > max(0, self._kv.num_free_blocks - len(self._lifecycle.places.running) * len(self._kv.groups)):
            return min(num_drafts, self._kv.capacity(request) - num_tokens)
        if num_missing:
            added = self._kv.grow(request, num_tokens + num_drafts)
            assert added is not None, "so many blocks are free"
            before = plan.new_block_ids.get(request, [[]] * len(self._kv.groups))
            plan.new_block_ids[request] = [ids + more for ids, more in zip(before, added, strict=True)]
        return num_drafts


def _num_tokens(request: Request) -> int:
    return request.num_tokens
