"""The load of a simulation: sessions of requests, each with a name for the content of each of its blocks.

A session is turns that follow each other, each with the whole conversation so far as its prompt. The next turn comes
some time after the answer to the one before, so how fast a policy is decides what comes when, as in life.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

import numpy as np

from common.types import HASH_BYTES


class Turn(NamedTuple):
    """One request of a session."""

    wait_s: float  # after the answer before; of the first turn 0
    prompt: bytes  # names of the prompt's full blocks, of `HASH_BYTES` each
    whole: bytes  # names of the full blocks of prompt and answer
    num_prompt_tokens: int
    num_output_tokens: int

    def token_ids(self, block_size: int) -> list[int]:
        """Returns the tokens of prompt and answer: a block begins with its name, as four numbers, and so differs."""
        names = np.frombuffer(self.whole, "<u4").reshape(-1, HASH_BYTES // 4)
        tokens = np.zeros((len(names) + 1, block_size), np.uint32)
        width = min(block_size, HASH_BYTES // 4)
        tokens[:-1, :width] = names[:, :width]
        found: list[int] = tokens.ravel()[: self.num_prompt_tokens + self.num_output_tokens].tolist()
        return found


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


def chain(names: bytes, name: str, num_blocks: int) -> bytes:
    """Returns `names` and those of so many more blocks, which are the same for the same name."""
    numbered = (f"{name} {index}".encode() for index in range(num_blocks))
    return names + b"".join(hashlib.blake2b(each, digest_size=HASH_BYTES).digest() for each in numbered)


def poisson(choices: random.Random, count: int, rate: float) -> list[float]:
    """Returns arrival times, in seconds, of a Poisson process."""
    clock, arrivals = 0.0, []
    for _ in range(count):
        clock += choices.expovariate(rate)
        arrivals.append(clock)
    return arrivals
