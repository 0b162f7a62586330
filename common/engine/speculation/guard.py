"""Keeps what goes wrong in a proposer from the streams, which go on without its drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from common.engine.speculation.base import Context, Proposer
from common.engine.speculative import MAX_DEPTH
from common.types import RequestId

logger = logging.getLogger(__name__)

Failure = Literal["raised", "invalid", "too_slow"]

MAX_FAILURES = 10  # of a call, in a row; then the proposer is asked no more
_LATE_ANYWAY = 10  # times the budget, however little of it was processor time: it waits for something
_SPARE_SHARE = 0.02  # of the time, for guesses while none are verified
_MOST_SPARE_S = 0.05  # allowance of such time that accumulates


class Proposed(NamedTuple):
    """The answer of a proposer."""

    drafts: dict[RequestId, list[int]]  # of the vocabulary; at least one of each request
    failure: Failure | Literal[""] = ""


NOTHING = Proposed({})


class GuardedProposer:
    """A proposer whose answers are checked and whose time is measured. Each kind of failure is logged once; after
    MAX_FAILURES in a row, it is off until the engine ends.

    One that is late is asked for half as many requests the next time, the others having their turn after them, and for
    twice as many once there is time. It fails if it is late with one, unless the machine had no time for it.

    While no drafts are verified, because they do not pay or none were found, it is asked in some steps only, so that
    what it takes is a small share of the time."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        budget_s: float,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`budget_s`: of a step."""
        self._proposer: Proposer | None = proposer
        self._name = type(proposer).__name__
        self._vocab_size = vocab_size
        self._budget_s = budget_s
        self._clock = clock
        self._cpu_clock = cpu_clock  # so that a busy machine is not the proposer's fault
        self._num_asked = 1 << 30  # most requests at once
        self._first = 0  # whose turn it is
        self._spare_s = _MOST_SPARE_S  # processor time that it may take while none are verified
        self._spared_until = clock()
        self._num_failures = {"propose": 0, "forget": 0}  # in a row
        self._untold: Failure | Literal[""] = ""  # of `forget` and `reset`, which have no answer
        self._logged: set[str] = set()

    @property
    def is_off(self) -> bool:
        """Whether it has failed too often."""
        return self._proposer is None

    def propose(self, requests: Sequence[Context], *, are_verified: bool = True) -> Proposed:
        """Asks for drafts for requests that have just sampled. `are_verified`: whether any were in the same step."""
        if self._proposer is None or not requests:
            return NOTHING
        began, cpu_began = self._clock(), self._cpu_clock()
        if not are_verified:
            spare_s = self._spare_s + _SPARE_SHARE * (began - self._spared_until)
            self._spare_s, self._spared_until = min(spare_s, _MOST_SPARE_S), began
            if self._spare_s <= 0:
                return NOTHING
        asked = self._take_turns(requests)
        try:
            answer = self._proposer.propose(asked)
            drafts, problem = self._checked(asked, answer)
        except Exception as error:  # noqa: BLE001  code of others: whatever it is, streams go on
            return Proposed({}, self._fail("propose", "raised", repr(error)))
        seconds, cpu_s = self._clock() - began, self._cpu_clock() - cpu_began
        if not are_verified:
            self._spare_s -= cpu_s
        is_late = self._pace(seconds, len(asked)) and (
            cpu_s > self._budget_s or seconds > _LATE_ANYWAY * self._budget_s
        )
        if problem:
            return Proposed(drafts, self._fail("propose", "invalid", problem))
        if is_late:
            problem = f"took longer than {self._budget_s * 1000:g} ms"
            return Proposed(drafts, self._fail("propose", "too_slow", problem))
        self._num_failures["propose"] = 0
        untold, self._untold = self._untold, ""
        return Proposed(drafts, untold)

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer."""
        self._tell(lambda proposer: proposer.forget(requests))

    def reset(self) -> None:
        """See Proposer."""
        self._tell(lambda proposer: proposer.reset())

    def check(self) -> list[str]:
        """See Proposer."""
        if self._proposer is None:
            return []
        try:
            return list(self._proposer.check())
        except Exception as error:  # noqa: BLE001  as above
            return [f"the check of {self._name} has failed: {error!r}"]

    def _take_turns(self, requests: Sequence[Context]) -> Sequence[Context]:
        """Returns as many of the requests as are asked for at once, from where the last ones ended."""
        num_left = len(requests) - self._num_asked
        if num_left <= 0:
            return requests
        first = self._first % len(requests)
        self._first = first + self._num_asked
        return [*requests[first:], *requests[:first]][: self._num_asked]

    def _pace(self, seconds: float, num_asked: int) -> bool:
        """Adapts how many requests it is asked for. Returns whether it was late with one."""
        if seconds > self._budget_s:
            self._num_asked = max(1, num_asked // 2)
            return num_asked == 1
        if seconds < self._budget_s / 2 and num_asked == self._num_asked:
            self._num_asked *= 2
        return False

    def _checked(
        self, requests: Sequence[Context], answer: Sequence[Sequence[int]]
    ) -> tuple[dict[RequestId, list[int]], str]:
        """The drafts that can be used, and what is wrong with the others."""
        if len(answer) != len(requests):
            return {}, f"has answered with drafts of {len(answer)} requests, not of {len(requests)}"
        drafts: dict[RequestId, list[int]] = {}
        problem = ""
        for request, found in zip(requests, answer, strict=True):
            if len(found) > MAX_DEPTH:
                problem = f"has proposed {len(found)} tokens of a request, more than {MAX_DEPTH}"
            token_ids = [int(each) for each in found[:MAX_DEPTH]]
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                wrong = next(at for at, each in enumerate(token_ids) if not 0 <= each < self._vocab_size)
                problem = f"has proposed token {token_ids[wrong]}, outside the vocabulary [0, {self._vocab_size})"
                del token_ids[wrong:]
            if token_ids:
                drafts[request.request_id] = token_ids
        return drafts, problem

    def _tell(self, call: Callable[[Proposer], None]) -> None:
        if self._proposer is None:
            return
        try:
            call(self._proposer)
        except Exception as error:  # noqa: BLE001  as above
            self._untold = self._fail("forget", "raised", repr(error))
        else:
            self._num_failures["forget"] = 0

    def _fail(self, call: Literal["propose", "forget"], failure: Failure, problem: str) -> Failure:
        self._num_failures[call] += 1
        if failure not in self._logged:
            self._logged.add(failure)
            logger.warning("speculative: %s: %s %s; requests go on without its drafts", failure, self._name, problem)
        if self._num_failures[call] == MAX_FAILURES:
            logger.error(
                "speculative: %s has failed %d times in a row, the last time as %s (%s): nothing is proposed any more "
                "until the pod starts again",
                self._name,
                MAX_FAILURES,
                failure,
                problem,
            )
            self._proposer = None
        return failure
