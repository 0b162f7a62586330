"""A smaller model of the same vocabulary, which proposes what it would sample itself.

Its KV is paged under the block ids of the model's first KV group, in a tensor of its own: whoever owns a block of the
model's owns the draft model's part of it, so that nothing is allocated, shared or freed here. What a part holds depends
on where the block has been. The model's KV may have come from another pod, a tier or the prefix cache, or the block
have been another request's. So each full block has a key here, the hash of the tokens up to its end for which the draft
model has computed it.

1. `begin_step` takes note of requests and blocks, as the model's runner does, and of what the step asks for.
2. `propose` has the tokens that the model has sampled. What the draft model took for them and was not right counts as
   not computed.
3. It catches up: requests whose KV lacks more than a few tokens get them computed, those that lack least first, as many
   tokens as fit the seconds that were asked for.
4. For those that lack no more than that, it samples one token after the other, with their own parameters and noise.

No token of an answer depends on what is computed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from common.engine.contract.masks import no_masks
from common.engine.contract.step import NOTHING_ASKED, Drafting, NewRequest, SchedulerOutput
from common.engine.phases import PhaseClock
from common.engine.speculation.base import Context
from common.engine.worker.model_runner import ModelRunner
from common.engine.worker.step_measurement import measure_steps
from common.step_budget import prefill_work, tokens_within
from common.step_times import StepTimes
from common.types import BlockHash, RequestId, hash_prompt

logger = logging.getLogger(__name__)

_MEASURED_TOKENS = 256


class Key(NamedTuple):
    """The content of a block of the draft model."""

    block_hash: BlockHash
    first: int  # block of its request that the draft model began with


@dataclass(slots=True)
class Drafted:
    """A request that may have drafts, of which the draft model has all tokens but the first `shift`, and all blocks but
    the first `first`. The rest counts from there."""

    root: BlockHash
    block_ids: list[int]
    num_known: int  # tokens of the prompt and the output; in the table, drafts may follow
    shift: int = 0
    first: int = 0
    row: int = -1  # in the runner's table
    hashes: list[BlockHash] = field(default_factory=list)  # of all full blocks of the request
    num_keyed: int = 0  # first blocks whose keys are theirs
    num_passed_over: int = 0  # times that only others caught up

    def key(self, number: int) -> Key:
        """Returns the key of one of its blocks, once that is full."""
        return Key(self.hashes[self.first + number], self.first)

    def add_hashes(self, token_ids: Sequence[int] | npt.NDArray[np.int64], block_size: int) -> None:
        """Adds the hashes of blocks that are full of the tokens, which are the request's, all of them."""
        start = len(self.hashes) * block_size
        if len(token_ids) >= start + block_size:
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes += hash_prompt(np.asarray(token_ids[start:]).tolist(), block_size, parent)


class DraftModel:
    """See Proposer. Called by one worker, on its thread."""

    _num_again = 0  # last tokens of blocks with the same tokens that are computed all the same
    _max_rows = 4  # tokens of a request that the first pass for a draft computes beside those of others

    def __init__(
        self,
        runner: ModelRunner,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner`: of the draft model, over `num_blocks` blocks. `max_model_len`: of the draft model, which proposes
        nothing beyond; `max_num_tokens`: most that it computes at once."""
        self._runner = runner
        self._block_size = block_size
        self._limit = min(max_model_len, runner.max_model_len)
        self._max_num_tokens = max(max_num_tokens, block_size)
        self._clock = clock
        self._phases = PhaseClock()
        self._keys: list[Key | None] = [None] * num_blocks
        self._requests: dict[RequestId, Drafted] = {}
        self._asked = NOTHING_ASKED
        self._drafting: Drafting | None = None
        most = min(_MEASURED_TOKENS, max_num_tokens, (num_blocks - 1) * block_size, self._limit)
        self._times = StepTimes.measured(max_num_tokens, measure_steps(runner.profile, most))
        if max_model_len < runner.max_model_len:
            logger.warning(
                "the draft model's limit is %d tokens, the model's %d: nothing is proposed for what comes after",
                max_model_len,
                runner.max_model_len,
            )

    @property
    def num_failed_recordings(self) -> int:
        """See Executor."""
        return self._runner.num_failed_recordings

    def begin_step(self, step: SchedulerOutput) -> None:
        """Called for each step before the model computes it."""
        self._asked = step.asked
        if step.forgets_outputs:
            self.reset()
        requests = self._requests
        dropped = [each for each in step.dropped_request_ids if requests.pop(each, None) is not None]
        new_requests = [each for each in step.new_requests if each.sampling.speculative]
        introduced = [self._introduce(each) for each in new_requests]
        grown = {each: ids[:1] for each, ids in step.new_block_ids.items() if each in requests}
        self._runner.update_requests(
            SchedulerOutput(
                new_requests=list(map(_of_draft_model, new_requests, introduced)),
                new_block_ids=grown,
                dropped_request_ids=dropped,
            )
        )
        for request_id, (block_ids,) in grown.items():
            requests[request_id].block_ids += block_ids
        for new, request in zip(new_requests, introduced, strict=True):
            (request.row,) = self._runner.table.rows_of([new.request_id]).tolist()
            requests[new.request_id] = request

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer. They are those of the step that `begin_step` was told of."""
        try:
            return self._propose(requests)
        except Exception:
            self._distrust_all()
            raise

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer; they are dropped when the next step begins."""

    def reset(self) -> None:
        """See Proposer. Those that run go on with what is computed of them."""
        self._keys = [None] * len(self._keys)

    def take_drafting(self) -> Drafting | None:
        """Returns what was done in the last call of `propose`."""
        drafting, self._drafting = self._drafting, None
        return drafting

    def check(self) -> list[str]:
        """See Proposer."""
        violations = []
        tables, table = self._runner.block_tables, self._runner.table
        if tables.keys() != self._requests.keys():
            violations.append(f"the draft model knows {sorted(tables)}, not {sorted(self._requests)}")
        for request_id, request in self._requests.items():
            name = f"the draft model's {request_id}"
            if tables.get(request_id) != [request.block_ids]:
                violations.append(f"{name} has blocks {tables.get(request_id)}, not {request.block_ids}")
            num_computed = int(table.num_computed_tokens[request.row])
            if num_computed > min(int(table.num_tokens[request.row]), len(request.block_ids) * self._block_size):
                violations.append(f"{name} has computed {num_computed} tokens, which it has not or has no blocks for")
            for number in range(request.num_keyed):
                found, block_id = self._keys[request.block_ids[number]], request.block_ids[number]
                if found is not None and found.block_hash != request.key(number).block_hash:
                    violations.append(f"{name} has block {block_id}, whose key is that of other tokens")
        return violations

    def _propose(self, contexts: Sequence[Context]) -> list[list[int]]:
        for context in contexts:
            self._take_tokens(context)
        began = self._clock()
        num_caught_up = self._catch_up(self._asked.catch_up_s) if self._asked.catch_up_s > 0 else 0
        caught_up = self._clock()
        drafts = self._draft(contexts, self._asked.num_drafts)
        found = list(map(len, drafts.values()))
        if found or num_caught_up:
            proposing_s = self._clock() - caught_up if found else 0.0
            num_passes = max(found, default=0)
            self._drafting = Drafting(num_passes, len(found), proposing_s, num_caught_up, caught_up - began)
        return [drafts.get(context.request_id, []) for context in contexts]

    def _introduce(self, new: NewRequest) -> Drafted:
        """The request, before anything is computed of it."""
        return Drafted(BlockHash(new.root), list(new.block_ids[0]), len(new.token_ids))

    def _take_tokens(self, context: Context) -> None:
        request = self._requests[context.request_id]
        request.add_hashes(context.token_ids, self._block_size)
        self._runner.table.correct_tokens(context.request_id, context.token_ids, request.num_known)
        request.num_known = len(context.token_ids)
        self._set_keys(request)

    def _catch_up(self, seconds: float) -> int:
        """Computes tokens of requests that lack many. Returns how many tokens."""
        line = self._times.line
        work_left = (seconds - line.base_s) / line.token_s
        scheduled: dict[RequestId, int] = {}
        begun: set[int] = set()  # blocks; one that several requests share is computed once
        work = 0.0
        lacking = [each for each in self._requests.items() if self._lacks_many(each[1])]
        for request_id, request in sorted(lacking, key=lambda each: self._turn(each[1])):
            request.num_passed_over += 1
            start = self._skip_computed(request)
            if (scheduled and work >= work_left) or not self._lacks_many(request):
                continue
            first_block = request.block_ids[start // self._block_size]
            if first_block in begun:
                continue
            num_tokens = self._chunk(request, start, work_left - work, self._max_num_tokens - sum(scheduled.values()))
            if not num_tokens:
                continue
            begun.add(first_block)
            self._clear_keys(request, start, start + num_tokens)
            scheduled[request_id] = num_tokens
            work += prefill_work(num_tokens, start)
            request.num_passed_over = 0
        if not scheduled:
            return 0
        began = self._clock()
        self._runner.submit(scheduled, {}, no_masks, self._phases).result()
        self._times.observe(self._clock() - began, work)
        for request_id in scheduled:
            self._set_keys(self._requests[request_id])
        return sum(scheduled.values())

    def _turn(self, request: Drafted) -> int:
        """The lowest is the first to catch up: what lacks least can propose soonest, but each time that others came
        first counts as a block less."""
        num_left = request.num_known - int(self._runner.table.num_computed_tokens[request.row])
        return num_left - request.num_passed_over * self._block_size

    def _lacks_many(self, request: Drafted) -> bool:
        """Whether more tokens are to be computed than a pass for drafts takes."""
        num_left = request.num_known - int(self._runner.table.num_computed_tokens[request.row])
        return num_left > self._max_rows and request.num_known < self._limit

    def _chunk(self, request: Drafted, start: int, work: float, most: int) -> int:
        """How many tokens of a request to compute after the first `start`, of at most so many, but for its last one. Up
        to the end of a block, one at least: others may share it, and read what is there of it."""
        end = request.num_known - 1
        stop = min(end, start + min(tokens_within(work, start), most))
        if stop < end:
            stop -= stop % self._block_size
        if stop <= start:
            stop = min(end, (start // self._block_size + 1) * self._block_size)
        return stop - start if stop - start <= most else 0

    def _draft(self, contexts: Sequence[Context], num_drafts: int) -> dict[RequestId, list[int]]:
        """Drafts of the requests of which few tokens lack."""
        table = self._runner.table
        scheduled: dict[RequestId, int] = {}
        depths: dict[RequestId, int] = {}
        for context in contexts:
            request_id, request = context.request_id, self._requests[context.request_id]
            start, stop = int(table.num_computed_tokens[request.row]), request.num_known
            most = min(
                len(request.block_ids) * self._block_size + 1,  # the last draft is not computed
                # None is of use after the last token.
                context.num_prompt_tokens + context.sampling.max_tokens - 1 - request.shift,
                self._limit,
            )
            depth = min(num_drafts, most - stop)
            has_all = stop > 0 and request.shift + stop == len(context.token_ids)
            if has_all and depth > 0 and stop - start <= self._max_rows:
                scheduled[request_id], depths[request_id] = stop - start, depth
                self._clear_keys(request, start, stop + depth - 1)
        drafts: dict[RequestId, list[int]] = {request_id: [] for request_id in scheduled}
        as_rows: Mapping[RequestId, Sequence[int]] = {each: () for each, count in scheduled.items() if count > 1}
        passes = []
        while scheduled:
            passes.append(self._runner.submit(scheduled, as_rows, no_masks, self._phases))
            as_rows = {}
            scheduled = {each: 1 for each in scheduled if depths[each] > len(passes)}
        for number, running in enumerate(passes):
            for request_id, outcome in running.result().outcomes.items():
                if isinstance(outcome, list) and len(drafts[request_id]) == number:
                    drafts[request_id].append(outcome[0].token_id)
        return {request_id: found for request_id, found in drafts.items() if found}

    def _skip_computed(self, request: Drafted) -> int:
        """Goes on after the blocks in which the draft model has computed the request's tokens, for it or another.
        Returns after how many tokens that is."""
        table = self._runner.table
        start = int(table.num_computed_tokens[request.row])
        first, rest = divmod(start, self._block_size)
        last = (request.num_known - 1) // self._block_size  # blocks without the last token
        if rest or first >= last or self._keys[request.block_ids[first]] is None:
            return start
        number = first
        while number < last and self._keys[request.block_ids[number]] == request.key(number):
            number += 1
        if number > first:
            start = number * self._block_size - self._num_again
            table.set_computed(request.row, start)
            request.num_keyed = max(request.num_keyed, start // self._block_size)
        return start

    def _set_keys(self, request: Drafted) -> None:
        """Sets the keys of blocks that are full of what was computed of the request's own tokens."""
        num_computed = int(self._runner.table.num_computed_tokens[request.row])
        num_full = min(num_computed, request.num_known) // self._block_size
        if num_full > request.num_keyed:
            for number in range(request.num_keyed, num_full):
                self._keys[request.block_ids[number]] = request.key(number)
            request.num_keyed = num_full

    def _clear_keys(self, request: Drafted, start: int, stop: int) -> None:
        """Tokens [start, stop) of the request are written to their blocks."""
        for number in range(start // self._block_size, -(-stop // self._block_size)):
            self._keys[request.block_ids[number]] = None

    def _distrust_all(self) -> None:
        """Nothing that was computed counts."""
        self._keys = [None] * len(self._keys)
        for request in self._requests.values():
            self._runner.table.set_computed(request.row, 0)
            request.num_keyed = 0


def _of_draft_model(new: NewRequest, request: Drafted) -> NewRequest:
    """A request as the draft model's runner is to know it: nothing is computed, and only tokens are wanted."""
    sampling = msgspec.structs.replace(new.sampling, num_logprobs=None, prompt_logprobs=None, structured_outputs=None)
    return replace(
        new,
        sampling=sampling,
        token_ids=new.token_ids[request.shift :],
        num_prompt_tokens=new.num_prompt_tokens - request.shift,
        block_ids=[request.block_ids],
        num_computed_tokens=0,
        wants_prompt_logprobs=False,
        positions=None,
    )
