"""A guard against ranks that part ways: each writes a digest of what it has done so far to memory that all share.

Every step digests the one before, what the scheduler decided, and what was sampled. A rank that ends a step looks at
where the others were after the step before: those of its stage have all begun this one, as they compute together, and
those of earlier stages have ended it. Then it looks at those that have ended this step as well, so that the last to end
it sees a difference although no step may follow. Only the last stage samples: half of a digest is of results, and is
compared within a stage.
"""

from __future__ import annotations

import mmap
import os
import zlib

from common.errors import EngineDeadError

_NUM_ENTRIES = 64  # steps of each rank that are kept, more than one rank can be behind another
_NUMBER_BITS = 32  # of an entry; the others are its digest's
_DECISIONS = 0xFFFF0000  # bits of a digest that are of decisions; the others are of results


def create_digests(num_ranks: int) -> int:
    """Returns the descriptor of memory for as many ranks, which they inherit."""
    memory = os.memfd_create("baton-digests")
    os.ftruncate(memory, num_ranks * _NUM_ENTRIES * 8)
    return memory


class RankDigests:
    """One rank's view."""

    def __init__(self, memory: int, rank: int, num_ranks: int, stage_size: int | None = None) -> None:
        """`stage_size`: ranks of each stage of a pipeline; None: there is one stage."""
        self._entries = memoryview(mmap.mmap(memory, num_ranks * _NUM_ENTRIES * 8)).cast("Q")
        self._rank = rank
        self._num_ranks = num_ranks
        first = rank - rank % (stage_size or num_ranks)
        self._stage = range(first, first + (stage_size or num_ranks))
        self._number = 0  # of steps that are over
        self._digest = 0  # after the last of them
        self._decisions = self._results = 0  # of which it is made

    @property
    def last(self) -> tuple[int, int]:
        """Number of the last step, and its digest."""
        return self._number, self._digest

    def end_step(self, decisions: bytes | bytearray, results: bytes) -> None:
        """Raises EngineDeadError if a rank did something else until the step before, or in this one if it has ended
        it."""
        self._compare_all()
        self._decisions = zlib.crc32(decisions, self._decisions)
        self._results = zlib.crc32(results, self._results)
        digest = (self._decisions & _DECISIONS) | (self._results & ~_DECISIONS)
        self.note((self._number + 1) % (1 << 64 - _NUMBER_BITS), digest)

    def note(self, number: int, digest: int) -> None:
        """The rank, which may not see this memory, has ended a step. Raises EngineDeadError if another has ended it and
        did something else; those that have not will compare."""
        self._number, self._digest = number, digest
        # As one word, so that none is read while half of it is written.
        self._entries[self._place(self._rank)] = (number << _NUMBER_BITS) + digest
        self._compare_all()

    def _compare_all(self) -> None:
        for other in range(self._num_ranks):
            number, digest = divmod(self._entries[self._place(other)], 1 << _NUMBER_BITS)
            difference = digest ^ self._digest if other in self._stage else (digest ^ self._digest) & _DECISIONS
            if number == self._number and difference:
                raise EngineDeadError(
                    f"the ranks have parted ways: after step {number}, rank {self._rank} has digest "
                    f"{self._digest:08x}, rank {other} has {digest:08x}"
                )

    def _place(self, rank: int) -> int:
        return rank * _NUM_ENTRIES + self._number % _NUM_ENTRIES
