"""The outputs of earlier requests, in bounded memory, and where in them some tokens stand.

A ring holds the outputs one after the other, newest over oldest. Places whose last MIN_MATCH tokens have the same hash
are chained, newest first, as in a compressor of the LZ77 kind: a link to a place that was written over ends its chain,
so that nothing is ever removed. Tokens are stored xor the tag of their tenant, so that those of others never match.
"""

from __future__ import annotations

import hashlib
import operator
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.engine.speculative import MAX_MATCH

MIN_MATCH = 3  # tokens
_MAX_FOUND = 16  # places, the last ones
_BYTES_PER_PLACE = 24
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # odd, of xxHash; one for each of MIN_MATCH
_FACTOR_ARRAY = np.array(_FACTORS, dtype=np.uint64)
_MASK64 = (1 << 64) - 1
_SHIFT = 24
_TAG_BIT = 1 << 63
_TOKEN_LIMIT = 1 << 32


class Found(NamedTuple):
    """The places at which most of the last tokens of a request stand."""

    continuations: list[list[int]]  # what follows there, newest first; fewer tokens where an output ends
    length: int  # of the match


NOTHING_FOUND = Found([], 0)


class History:
    """Numbers of places count from 1; a place is in the ring until as many others as there are were written."""

    def __init__(self, memory: int) -> None:
        """`memory`: bytes, which are taken as they are written to."""
        self._memory = memory
        self._size = memory // _BYTES_PER_PLACE
        self._secret = os.urandom(16)  # so that no client can find a salt with the tag of another
        self._tagged = np.zeros(self._size, dtype=np.uint64)  # token xor tag; 0: between two outputs
        self._before = np.zeros(self._size, dtype=np.int64)  # the place before it in its chain; 0: none
        self._newest = np.zeros(self._size, dtype=np.int64)  # of each chain; 0: none
        self._num_written = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the ring."""
        return int(np.count_nonzero(self._tagged))

    def add(self, root: bytes, token_ids: npt.NDArray[np.int64]) -> None:
        """Writes an output of the tenant with that root."""
        token_ids = token_ids[-(self._size - 1) :]
        num_tokens = len(token_ids)
        tagged = token_ids.astype(np.uint64) ^ np.uint64(self._tag(root))
        first = self._num_written + 1
        numbers = np.arange(first, first + num_tokens + 1)
        self._tagged[numbers % self._size] = np.append(tagged, np.uint64(0))
        self._num_written += num_tokens + 1
        before, newest, size = self._before.data, self._newest.data, self._size
        for number, chain in enumerate(self._chains(tagged), first + MIN_MATCH - 1):
            before[number % size] = newest[chain]
            newest[chain] = number

    def find(self, root: bytes, token_ids: npt.NDArray[np.int64], depth: int) -> Found:
        """Finds the places in outputs of the tenant at which most of the last tokens stand, up to MAX_MATCH of them,
        and up to `depth` that follow. The last places only, if there are many."""
        if len(token_ids) < MIN_MATCH or not self._num_written:
            return NOTHING_FOUND
        tag = self._tag(root)
        run = [token_id ^ tag for token_id in token_ids[-MIN_MATCH:].tolist()]
        numbers = self._chained(_hash(run) % self._size)
        if not numbers:
            return NOTHING_FOUND
        wanted = token_ids[: -MAX_MATCH - 1 : -1].astype(np.uint64) ^ np.uint64(tag)  # the last one first
        ends = np.array(numbers)[:, None]
        is_same = self._tagged[(ends - np.arange(len(wanted))) % self._size] == wanted
        lengths = np.logical_and.accumulate(is_same, axis=1).sum(axis=1)
        length = int(lengths.max())
        if length < MIN_MATCH:
            return NOTHING_FOUND  # others with the same hash
        following = self._tagged[(ends[lengths == length] + np.arange(1, depth + 1)) % self._size] ^ np.uint64(tag)
        return Found([_own_tokens(row) for row in following.tolist()], length)

    def check(self) -> list[str]:
        """Violations of its bound and its bookkeeping, one line each."""
        violations = []
        num_bytes = self._tagged.nbytes + self._before.nbytes + self._newest.nbytes
        if num_bytes > self._memory:
            violations.append(f"outputs of earlier requests take {num_bytes} bytes, more than {self._memory}")
        written, oldest = self._num_written, max(1, self._num_written - self._size + 1)
        if self._tagged[written % self._size]:
            violations.append("the last output of the history has no end")
        numbers = np.arange(oldest, written + 1)
        if (self._before[numbers % self._size] >= numbers).any():
            violations.append("a chain of the history goes on to a later place")
        chains = np.flatnonzero(self._newest >= oldest + MIN_MATCH - 1)
        ends = self._newest[chains]
        if (ends > written).any():
            violations.append("a chain of the history begins at a place that was not written")
        elif len(ends):
            run = self._tagged[(ends[:, None] - np.arange(MIN_MATCH - 1, -1, -1)) % self._size]
            if (_hashes(run) % np.uint64(self._size) != chains.astype(np.uint64)).any():
                violations.append("a chain of the history begins at other tokens than its own")
        return violations

    def _tag(self, root: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(root, digest_size=8, key=self._secret).digest()) | _TAG_BIT

    def _chains(self, tagged: npt.NDArray[np.uint64]) -> list[int]:
        """The chains of all runs of MIN_MATCH tokens, in order."""
        if len(tagged) < MIN_MATCH:
            return []
        runs = np.lib.stride_tricks.sliding_window_view(tagged, MIN_MATCH)
        chains: list[int] = (_hashes(runs) % np.uint64(self._size)).tolist()
        return chains

    def _chained(self, chain: int) -> list[int]:
        """Numbers of its last places that are still in the ring, newest first."""
        oldest, size, before = self._num_written - self._size, self._size, self._before.data
        number = int(self._newest[chain])
        numbers: list[int] = []
        while number > max(0, oldest) and len(numbers) < _MAX_FOUND:
            numbers.append(number)
            number = before[number % size]
        return numbers


def _hash(run: list[int]) -> int:
    """Hashes MIN_MATCH tokens into a number modulo 2^64, without its lowest bits."""
    total: int = sum(map(operator.mul, run, _FACTORS))
    return (total & _MASK64) >> _SHIFT


def _hashes(runs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same of each of [runs, MIN_MATCH]."""
    mixed: npt.NDArray[np.uint64] = (runs * _FACTOR_ARRAY).sum(axis=1, dtype=np.uint64) >> np.uint64(_SHIFT)
    return mixed


def _own_tokens(untagged: list[int]) -> list[int]:
    """Up to the end of the output."""
    end = next((at for at, each in enumerate(untagged) if each >= _TOKEN_LIMIT), len(untagged))
    return untagged[:end]
