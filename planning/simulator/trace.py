"""The load of a simulation: sessions of requests, each with the hashes of its blocks.

A session is turns that follow each other, each with the whole conversation so far as its prompt. The next turn comes
some time after the answer to the one before, so how fast a policy is decides what comes when, as in life.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

from common.types import HASH_BYTES


class Turn(NamedTuple):
    """One request of a session."""

    wait_s: float  # after the answer before; of the first turn 0
    prompt: bytes  # hashes of the prompt's full blocks
    whole: bytes  # hashes of the full blocks of prompt and answer
    num_prompt_tokens: int
    num_output_tokens: int


class Session(NamedTuple):
    """Turns of one user."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


class Trace(NamedTuple):
    """The load of one simulation."""

    name: str
    sessions: list[Session]
    shares: bool  # whether prompts have beginnings in common

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)


def chain(hashes: bytes, name: str, num_blocks: int) -> bytes:
    """Returns `hashes` and those of so many more blocks, which are the same for the same beginning and name."""
    parent, chained = hashes[-HASH_BYTES:], [hashes]
    for index in range(num_blocks):
        parent = hashlib.blake2b(parent + f"{name} {index}".encode(), digest_size=HASH_BYTES).digest()
        chained.append(parent)
    return b"".join(chained)


def poisson(choices: random.Random, count: int, rate: float) -> list[float]:
    """Returns arrival times, in seconds, of a Poisson process."""
    clock, arrivals = 0.0, []
    for _ in range(count):
        clock += choices.expovariate(rate)
        arrivals.append(clock)
    return arrivals
