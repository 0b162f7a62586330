"""The grammars of the requests that a worker runs, and the masks of the tokens that they allow.

Matchers are in processes of their own. A request's matcher is told of a token as soon as it is sampled, and answers
with the mask of the next one while the model computes. What is not there when the logits are, within a bound of time
for the whole batch, is late: its request gets no token in this step, which goes on without it.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.step import NewRequest, NoToken
from common.engine.grammar.base import BITS, Grammar
from common.engine.grammar.processes import GrammarProcess
from common.engine.grammar.protocol import Mask, MatcherState
from common.errors import InvalidRequestError
from common.types import SamplingParams

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
    output: list[int]
    matcher_id: int
    process: GrammarProcess | None = None  # None: the grammar has none yet, or none any more
    words: npt.NDArray[np.int32] | None = None  # the mask of the next token, if it is here
    failure: NoToken | None = None
    num_deaths: int = 0  # of processes that were at work on it
    late_since: float | None = None  # when it was waited for in vain

    @property
    def is_pending(self) -> bool:
        """Whether its next mask is still to come."""
        return self.words is None and self.failure is None


class TokenMask:
    """Tokens that some rows of a batch allow."""

    def __init__(self, rows: Sequence[int], words: npt.NDArray[np.int32]) -> None:
        """`words` [rows, words]: see `common.engine.grammar.base`."""
        self._rows = rows
        self._words = words

    def apply(self, logits: torch.Tensor) -> None:
        """Excludes other tokens from `logits` [batch, vocabulary], in place, on their device."""
        allowed = self._unpacked(logits.device, logits.shape[1])
        if len(self._rows) == len(logits):
            logits.masked_fill_(~allowed, -torch.inf)
        else:
            index = torch.tensor(self._rows, dtype=torch.int64).to(logits.device)
            logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)

    def _unpacked(self, device: torch.device, vocab_size: int) -> torch.Tensor:
        """Whether each token is allowed, [rows, vocabulary]."""
        if device.type == "cpu":
            unpacked = np.unpackbits(self._words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(unpacked).view(torch.bool)
        words = torch.from_numpy(self._words).pin_memory().to(device, non_blocking=True)
        bits = (words[:, :, None] >> torch.arange(BITS, device=device, dtype=torch.int32)) & 1
        return bits.flatten(1)[:, :vocab_size].bool()


class Constraints:
    """By row of the request table; rows of requests without a grammar are not in it."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], step_s: float) -> None:
        """`step_s`: seconds that a step waits for masks at most, and CPU time of all matchers together for a step."""
        self._num_words = -(-vocab_size // BITS)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            if token_id < vocab_size:
                self._eos.view(np.uint32)[token_id // BITS] |= np.uint32(1 << (token_id % BITS))
        self._step_s = step_s
        self._matcher_ids = itertools.count()
        self._by_row: dict[int, _Constrained] = {}

    def __len__(self) -> int:
        return len(self._by_row)

    def add(self, row: int, new: NewRequest) -> None:
        """Takes a request's grammar up, and follows the output that it has already."""
        if new.grammar is not None:
            output = new.token_ids[new.num_prompt_tokens :]
            self._by_row[row] = _Constrained(new.grammar, new.sampling, output, next(self._matcher_ids))

    def drop(self, row: int) -> None:
        """Forgets a row. Idempotent."""
        entry = self._by_row.pop(row, None)
        if entry is not None:
            if entry.process is not None:
                entry.process.close_matcher(entry.matcher_id)
                entry.process.flush()
            entry.grammar.release()

    def has(self, row: int) -> bool:
        """Whether the row's request has a grammar."""
        return row in self._by_row

    def accept(self, row: int, token_id: int) -> None:
        """Takes a sampled token."""
        entry = self._by_row.get(row)
        if entry is not None:
            entry.output.append(token_id)
            entry.words = None
            if entry.process is not None:
                entry.process.accept(entry.matcher_id, token_id, self._share_s)

    def begin(self) -> None:
        """Lets the matchers begin with what they were told of. Called before the model computes, and after it."""
        if self._by_row:
            for entry in self._by_row.values():
                if entry.process is None and entry.failure is None:
                    self._open(entry)
            for process in self._processes(self._by_row.values()):
                process.flush()

    def wait(self, rows: Sequence[int]) -> list[int]:
        """Waits for the masks of rows of a batch. Returns the positions, in `rows`, of those that are late."""
        constrained = self._among(rows)
        if constrained:
            self._await([entry for _, entry in constrained], is_all=len(constrained) == len(rows))
        return [position for position, entry in constrained if entry.is_pending]

    def mask(self, rows: Sequence[int]) -> tuple[TokenMask | None, dict[int, NoToken]]:
        """What rows of a batch, none of which is late, allow next; and the positions, in `rows`, of those that allow
        nothing."""
        constrained = self._among(rows)
        if not constrained:
            return None, {}
        words = np.empty((len(constrained), self._num_words), dtype=np.int32)
        dead_ends: dict[int, NoToken] = {}
        for number, (position, entry) in enumerate(constrained):
            if entry.failure is not None:
                dead_ends[position] = entry.failure
                words[number] = -1
                continue
            assert entry.words is not None, "its mask is late"
            words[number] = entry.words
            if entry.params.ignore_eos or len(entry.output) < entry.params.min_tokens:
                words[number] &= ~self._eos
        for number in np.flatnonzero(~words.any(axis=1)).tolist():
            dead_ends[constrained[number][0]] = NoToken.COMPLETE
            words[number] = -1  # its token is not used
        return TokenMask([position for position, _ in constrained], words), dead_ends

    def _among(self, rows: Sequence[int]) -> list[tuple[int, _Constrained]]:
        return [(position, self._by_row[row]) for position, row in enumerate(rows) if row in self._by_row]

    # -- processes --------------------------------------------------------------------------------------------------

    @property
    def _share_s(self) -> float:
        """CPU seconds of a step for each matcher."""
        return max(_LEAST_SHARE_S, self._step_s / len(self._by_row))

    def _open(self, entry: _Constrained) -> None:
        """Asks a process to follow the output so far, if there is one."""
        try:
            entry.process = entry.grammar.process()
        except InvalidRequestError:  # it was compiled before, but not again
            entry.failure = NoToken.TOO_SLOW
        if entry.process is not None:
            entry.process.open(entry.matcher_id, entry.output, self._share_s)

    def _await(self, entries: list[_Constrained], *, is_all: bool) -> None:
        """Waits until the masks are here, or the time for it has passed. Those that were late before are waited for
        only if there is nothing else in the step: `is_all`."""
        due = time.monotonic() + self._step_s
        while True:
            self._receive(entries)
            pending = [entry for entry in entries if entry.is_pending]
            awaited = [entry for entry in pending if entry.late_since is None and entry.process is not None]
            if is_all and len(pending) == len(entries):
                awaited = pending
            left_s = due - time.monotonic()
            if not awaited or left_s <= 0:
                break
            self._wait(awaited, left_s)
        for entry in pending:
            self._note_late(entry)

    def _wait(self, entries: list[_Constrained], timeout_s: float) -> None:
        """Waits for news of any of the entries."""
        poll = select.poll()
        for process in self._processes(entries):
            poll.register(process, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def _receive(self, entries: list[_Constrained]) -> None:
        by_id = {entry.matcher_id: entry for entry in self._by_row.values()}
        for process in self._processes(entries):
            for message in process.receive():
                assert isinstance(message, Mask)
                entry = by_id[message.matcher_id]
                entry.late_since = None
                entry.failure = _FAILURES.get(message.state)
                if entry.failure is None:
                    entry.words = np.frombuffer(message.words, dtype=np.int32)
            if process.is_gone:
                self._bury(process)

    def _bury(self, process: GrammarProcess) -> None:
        """A process has ended: of the CPU time or the memory that the matcher at work took, or for another reason. The
        requests of its grammar go on with another process."""
        for entry in self._by_row.values():
            if entry.process is process:
                if entry.matcher_id == process.at_work_on:
                    entry.num_deaths += 1
                    if entry.num_deaths == _MAX_DEATHS:
                        entry.failure = NoToken.TOO_SLOW
                entry.grammar.release()
                entry.process = None
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
