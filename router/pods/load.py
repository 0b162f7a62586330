"""How much a pod has to do: what it reports, and what this router has sent it.

Reports lag behind and count the work of all routers, but not what of a prompt will be a prefix hit; the router's own
claims are up to date and know that. Each figure is put together from both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from common.pb import pods_pb2
from common.step_times import Slowness, StepTimes, can_be
from router.placing.index import Expectation
from router.placing.policies import Load, PodRow
from router.placing.policies.table import TYPICAL_BUDGET

_SETTLING_S = 1.0  # from the end of a leg until the pod's event about its blocks has come
_UNFED_SETTLING_S = 30.0  # the same if the pod sends no events: how long a prompt is taken to stay cached


class Share(NamedTuple):
    """One request's part of a pod's load."""

    tokens: int = 0  # prompt tokens to compute or to reuse
    work: float = 0.0  # what of them is to be computed, see prefill_work
    blocks: int = 0  # KV blocks that it will take
    context: float = 0.0  # tokens of prompt and answer whose KV the steps of its answer read


class PodLoad:
    """The load of one pod, across its connections. Writes to the pod's row while it has one."""

    def __init__(self, step_times: StepTimes | None = None) -> None:
        """`step_times`: of all pods of the role and model, which learn from this one too; None: not known yet."""
        self.step_times = StepTimes(TYPICAL_BUDGET) if step_times is None else step_times
        self.row: PodRow | None = None  # while the pod is ready; set by the Cluster
        self.on_idle: Callable[[], None] = _nothing  # called when the last request of this router has ended
        self._slowness = Slowness()  # of this incarnation
        self.num_requests = 0  # of this router, as are the next three
        self.num_tokens = 0
        self.work = 0.0
        self.num_blocks = 0
        self.context = 0.0
        self._tokens_at_report = 0
        self._requests_at_report = 0
        self._claimed_tokens = (0, 0)  # between the last two reports, since the last one
        self._reported = pods_pb2.PodStats()

    def connected(self) -> None:
        """A new incarnation: nothing is known of its load yet."""
        self._slowness = Slowness()
        self._reported = pods_pb2.PodStats()

    def report(self, stats: pods_pb2.PodStats) -> None:
        """Events of the pod."""
        before, self._reported = self._reported, stats
        self._tokens_at_report = self.num_tokens
        self._requests_at_report = self.num_requests
        self._claimed_tokens = (self._claimed_tokens[1], 0)
        if (stats.last_step_s, stats.last_step_tokens) != (before.last_step_s, before.last_step_tokens):
            self._learn(stats.last_step_s, stats.last_step_tokens)
        self._write()

    def add(self, share: Share) -> None:
        """A request was sent."""
        self.num_requests += 1
        self.context += share.context
        self._claimed_tokens = (self._claimed_tokens[0], self._claimed_tokens[1] + share.tokens)
        self._change(share, 1)

    def computed(self, share: Share) -> None:
        """Its prompt is done with."""
        self._change(share, -1)

    def ended(self, context: float) -> None:
        """It has ended. `context`: of its share."""
        self.num_requests -= 1
        self.context = self.context - context if self.num_requests else 0.0
        self._write()
        if not self.num_requests:
            self.on_idle()

    def current(self) -> Load:
        """All of it."""
        stats = self._reported
        reported = stats.num_running + stats.num_waiting + stats.num_waiting_for_remote_kv
        num_requests = max(self.num_requests, reported + self.num_requests - self._requests_at_report)
        return Load(
            num_requests=num_requests,
            queued_tokens=self._queued_tokens(),
            free_blocks=max(0, stats.num_free_blocks - self.num_blocks),
            context_tokens=self._context_tokens(num_requests),
            slowness=self._slowness.value,
        )

    @property
    def is_stepping(self) -> bool:
        """By its last report it has requests in its batch."""
        return self._reported.num_running > 0

    def longest_step_s(self, max_num_batched_tokens: int) -> float | None:
        """Seconds of the longest step that this load explains; None: too few steps were seen to tell."""
        if not self.step_times.is_known:
            return None
        load = self.current()
        tokens = min(load.queued_tokens + load.num_requests, max_num_batched_tokens)
        predicted_s = self.step_times.predict(tokens, load.context_tokens) * load.slowness
        return max(predicted_s, self._reported.last_step_s)

    def _learn(self, seconds: float, tokens: int) -> None:
        if can_be(seconds, tokens):
            context = self._context_tokens(self.num_requests)
            self._slowness.observe(seconds, self.step_times.predict(tokens, context))
            self.step_times.observe(seconds / self._slowness.value, tokens, context)

    def _context_tokens(self, num_requests: float) -> float:
        """Returns the context of so many requests, of which those of others are taken to be like ours."""
        return self.context * num_requests / self.num_requests if self.num_requests else 0.0

    def _queued_tokens(self) -> float:
        """This router's work, and what the pod has from others, of which as much is taken to be cached as of ours; but
        not more than the pod itself says to have, with what is on its way there."""
        reported = self._reported.num_queued_tokens
        others = max(0, reported - self._tokens_at_report)
        share = self.work / self.num_tokens if self.num_tokens else 1.0
        return min(self.work + others * share, reported + sum(self._claimed_tokens))

    def _change(self, share: Share, sign: int) -> None:
        self.num_tokens += sign * share.tokens
        self.work = self.work + sign * share.work if self.num_tokens else 0.0  # no rounding errors pile up
        self.num_blocks += sign * share.blocks
        self._write()

    def _write(self) -> None:
        if self.row is not None:
            self.row.update(self.current())


def _nothing() -> None:
    pass


class PodClaim:
    """One request's share of a pod's load, until it is released."""

    def __init__(self, load: PodLoad, share: Share, expectation: Expectation | None, *, fed: bool = True) -> None:
        """`expectation`: that the pod will hold the prompt's blocks. `fed`: the pod tells what it holds."""
        self._load = load
        self._share: Share | None = share
        self._expectation = expectation
        self._context = share.context
        self._settling_s = _SETTLING_S if fed else _UNFED_SETTLING_S
        self._ended = False
        load.add(share)

    def prefilled(self, now: float) -> None:
        """The prompt's KV is there. `now`: time.monotonic()."""
        self._settle(now + self._settling_s)

    def release(self, now: float) -> None:
        """The pod has nothing to do with the request any more. Idempotent."""
        self._settle(now)
        if not self._ended:
            self._ended = True
            self._load.ended(self._context)

    def _settle(self, expires_at: float) -> None:
        if self._share is not None:
            self._load.computed(self._share)
            self._share = None
            if self._expectation is not None:
                self._expectation.settle(expires_at)
