"""The grammars of the requests that run, and the masks of the tokens that they allow.

Matchers are in processes of their own. A request's matcher is told of a token as soon as it is sampled, and answers
with the mask of the next one while the model computes. What is not there when the logits are, within a bound of time
for the whole batch, is late: its request gets no token in this step, which goes on without it.
"""

from __future__ import annotations

import itertools
import select
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.engine.contract.masks import BITS, BatchMasks, RequestGrammar
from common.engine.contract.step import NoToken, Outcome, SchedulerOutput
from common.engine.grammar.base import Grammar
from common.engine.grammar.processes import GrammarProcess
from common.engine.grammar.protocol import Masks, MatcherState
from common.errors import InvalidRequestError
from common.types import RequestId, SamplingParams

# CPU time that a matcher may take for each token, however many there are: some times what it usually takes.
_LEAST_SHARE_S = 0.00025
_MAX_DEATHS = 2  # of processes at work on a request; the first may have had another cause
_MAX_LATE_S = 60.0  # for one mask; a matcher that computes is ended by its CPU time before

_FAILURES: dict[MatcherState, NoToken] = {"lost": NoToken.MISMATCH, "too_slow": NoToken.TOO_SLOW}


@dataclass(slots=True)
class _Constrained:
    """A request's place in its grammar."""

    grammar: Grammar
    params: SamplingParams
    num_prompt_tokens: int
    output: list[int]
    matcher_id: int
    process: GrammarProcess | None = None  # None: the grammar has none yet, or none any more
    words: npt.NDArray[np.int32] | None = None  # the mask of the next token, if it is here
    ahead: dict[int, npt.NDArray[np.int32] | None] = field(default_factory=dict)  # masks after drafts; None: awaited
    takes_drafts: bool = True  # following some has not cost the process its life
    failure: NoToken | None = None
    num_deaths: int = 0  # of processes that were at work on it
    late_since: float | None = None  # when it was waited for in vain

    @property
    def is_pending(self) -> bool:
        """Whether its next mask is still to come."""
        return self.words is None and self.failure is None

    @property
    def is_awaited(self) -> bool:
        """Whether any of its masks is."""
        return self.is_pending or any(words is None for words in self.ahead.values())


class GrammarMasks:
    """The running requests that have a grammar. Used on the step loop's thread."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], step_s: float) -> None:
        """`step_s`: seconds that a step waits for masks at most, and CPU time of all matchers together for a step."""
        self._num_words = -(-vocab_size // BITS)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            if token_id < vocab_size:
                self._eos.view(np.uint32)[token_id // BITS] |= np.uint32(1 << (token_id % BITS))
        self._step_s = step_s
        self._matcher_ids = itertools.count()
        self._by_request: dict[RequestId, _Constrained] = {}
        self._late: dict[RequestId, _Constrained] = {}  # those that got no token because their mask was not there

    def __len__(self) -> int:
        return len(self._by_request)

    def step_scheduled(self, step: SchedulerOutput, grammar_of: Callable[[RequestId], RequestGrammar | None]) -> None:
        """Takes up the grammars of the step's new requests, whose output so far is followed, drops those of others, and
        has masks filled along drafts. Called before the model computes."""
        for request_id in step.dropped_request_ids if self._by_request else ():
            self._drop(request_id)
        for new in step.new_requests:
            grammar = grammar_of(new.request_id)
            if grammar is not None:
                assert isinstance(grammar, Grammar), "made by the compiler"
                num_prompt_tokens, matcher_id = new.num_prompt_tokens, next(self._matcher_ids)
                output = new.token_ids[num_prompt_tokens:]
                entry = _Constrained(grammar, new.sampling, num_prompt_tokens, output, matcher_id)
                self._by_request[new.request_id] = entry
        for request_id in step.drafts.keys() & self._by_request.keys() if step.drafts else ():
            drafts, entry = step.drafts[request_id], self._by_request[request_id]
            if entry.process is not None and entry.takes_drafts:
                entry.process.look_ahead(entry.matcher_id, drafts, self._share_s)
                entry.ahead = dict.fromkeys(range(1, len(drafts) + 1))
        self._begin()

    def step_ended(self, outcomes: Mapping[RequestId, Outcome]) -> None:
        """Takes the tokens that a step has sampled, so that the next masks are filled meanwhile."""
        if not self._by_request:
            return
        accepted: defaultdict[GrammarProcess, list[tuple[int, list[int]]]] = defaultdict(list)
        for request_id, entry in self._by_request.items():
            outcome = outcomes.get(request_id)
            if outcome is not None:
                entry.ahead = {}
            if isinstance(outcome, list):
                token_ids = [token.token_id for token in outcome]
                entry.output += token_ids
                entry.words = None
                if entry.process is not None:
                    accepted[entry.process].append((entry.matcher_id, token_ids))
        for process, token_ids_by_matcher in accepted.items():
            process.accept(token_ids_by_matcher, self._share_s)
        self._begin()

    def masks(self, request_ids: Sequence[RequestId], lengths: npt.NDArray[np.int64]) -> BatchMasks | None:
        """See MaskSource."""
        known = self._by_request
        if not known:
            return None
        entries = [(position, known[each]) for position, each in enumerate(request_ids) if each in known]
        if not entries:
            return None
        self._await([entry for _, entry in entries])
        no_tokens: dict[int, NoToken] = {}
        positions: list[int] = []
        masks: list[npt.NDArray[np.int32]] = []
        for position, entry in entries:
            num_tokens = int(lengths[position]) - entry.num_prompt_tokens
            num_drafts = num_tokens - len(entry.output)
            words = entry.ahead.get(num_drafts) if num_drafts else entry.words
            if words is None and num_drafts:  # the grammar does not allow them, or not in time: what was before holds
                no_tokens[position] = NoToken.NOT_YET
                continue
            if words is None:
                no_tokens[position] = entry.failure or NoToken.NOT_YET
                if entry.failure is None:
                    self._late[request_ids[position]] = entry
                continue
            if entry.params.ignore_eos or num_tokens < entry.params.min_tokens:
                words = words & ~self._eos
            if words.any():
                positions.append(position)
                masks.append(words)
            else:
                no_tokens[position] = NoToken.COMPLETE
        words = np.stack(masks) if masks else np.empty((0, self._num_words), dtype=np.int32)
        return BatchMasks(positions, words, no_tokens)

    def arrived(self, *, may_wait: bool) -> list[RequestId]:
        """Returns the requests whose late masks are there by now, or will never be. `may_wait`: there is nothing else
        to compute, so that it may wait for any of them, no longer than a step does."""
        if not self._late:
            return []
        entries = list(self._late.values())
        self._receive(entries)
        if may_wait and all(entry.is_pending for entry in entries):
            self._wait(entries, self._step_s)
            self._receive(entries)
        for entry in entries:
            if entry.is_pending:
                self._note_late(entry)
        found = [request_id for request_id, entry in self._late.items() if not entry.is_pending]
        for request_id in found:
            del self._late[request_id]
        return found

    def close(self) -> None:
        """Forgets all requests. Idempotent."""
        for request_id in list(self._by_request):
            self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        self._late.pop(request_id, None)
        entry = self._by_request.pop(request_id, None)
        if entry is not None:
            if entry.process is not None:
                entry.process.close_matcher(entry.matcher_id)
                entry.process.flush()
            entry.grammar.release()

    def _begin(self) -> None:
        """Lets the matchers begin with what they were told of."""
        if self._by_request:
            for entry in self._by_request.values():
                if entry.process is None and entry.failure is None:
                    self._open(entry)
            for process in self._processes(self._by_request.values()):
                process.flush()

    # -- processes --------------------------------------------------------------------------------------------------

    @property
    def _share_s(self) -> float:
        """CPU seconds of a step for each matcher."""
        return max(_LEAST_SHARE_S, self._step_s / len(self._by_request))

    def _open(self, entry: _Constrained) -> None:
        """Asks a process to follow the output so far, if there is one."""
        try:
            entry.process = entry.grammar.process()
        except InvalidRequestError:  # it was compiled before, but not again
            entry.failure = NoToken.TOO_SLOW
        if entry.process is not None:
            entry.process.open(entry.matcher_id, entry.output, self._share_s)

    def _await(self, entries: list[_Constrained]) -> None:
        """Waits until the masks are here, or the time for it has passed."""
        due = time.monotonic() + self._step_s
        while True:
            self._receive(entries)
            awaited = [entry for entry in entries if entry.is_awaited and entry.process is not None]
            left_s = due - time.monotonic()
            if not awaited or left_s <= 0:
                break
            self._wait(awaited, left_s)
        for entry in entries:
            if entry.is_pending:
                self._note_late(entry)

    def _wait(self, entries: list[_Constrained], timeout_s: float) -> None:
        """Waits for a change of any of the entries."""
        poll = select.poll()
        for process in self._processes(entries):
            poll.register(process, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def _receive(self, entries: list[_Constrained]) -> None:
        by_id = {entry.matcher_id: entry for entry in self._by_request.values()}
        for process in self._processes(entries):
            for message in process.receive():
                assert isinstance(message, Masks)
                for matcher_id, num_drafts, state, words in process.take(message):
                    entry = by_id[matcher_id]
                    if num_drafts:
                        if entry.ahead.pop(num_drafts, words) is None and state == "following":
                            entry.ahead[num_drafts] = words
                        continue
                    entry.late_since = None
                    entry.failure = _FAILURES.get(state)
                    entry.words = words if entry.failure is None else None
            if process.is_gone:
                self._bury(process)

    def _bury(self, process: GrammarProcess) -> None:
        """A process has ended: of the CPU time or the memory that the matcher at work took, or that its matchers took
        together, or for another reason. The requests of its grammar go on with another process."""
        for entry in self._by_request.values():
            if entry.process is process:
                matcher_id, num_drafts = process.at_work_on or (None, 0)
                if entry.matcher_id == matcher_id and num_drafts:
                    entry.takes_drafts = False
                elif entry.matcher_id == matcher_id or process.has_outgrown:
                    entry.num_deaths += 1
                    if entry.num_deaths == _MAX_DEATHS:
                        entry.failure = NoToken.TOO_SLOW
                entry.grammar.release()
                entry.process = None
                entry.ahead = {}
                if entry.is_pending:
                    self._open(entry)

    def _note_late(self, entry: _Constrained) -> None:
        now = time.monotonic()
        process = entry.process
        if entry.late_since is None:
            entry.late_since = now
        elif now - entry.late_since > _MAX_LATE_S:
            entry.failure = NoToken.TOO_SLOW
        if process is not None:
            process.note_late(self._step_s)

    def _processes(self, entries: Iterable[_Constrained]) -> Iterable[GrammarProcess]:
        return dict.fromkeys(entry.process for entry in entries if entry.process is not None)
