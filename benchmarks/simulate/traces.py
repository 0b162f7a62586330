"""Requests in the shapes that recordings of real services have, made from a seed.

Lengths are in blocks. Answers are part of what follows them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from common.types import HASH_BYTES
from planning.simulator.trace import Session, Trace, Turn, chain, poisson


class TraceMaker:
    """Makes traces for pods with blocks of `block_size` tokens. `rate` scales how much comes per second."""

    def __init__(self, block_size: int, *, seed: int = 1) -> None:
        self._block_size = block_size
        self._seed = seed

    def system_prompts(self, num_sessions: int, rate: float) -> Trace:
        """Single questions to two dozen applications, each with its own long instructions; a few are popular."""
        choices = self._choices("system prompts")
        lengths = [choices.randint(1_500, 6_000) for _ in range(24)]
        sessions = []
        for number, start_s in enumerate(poisson(choices, num_sessions, rate)):
            app = _zipf(choices, len(lengths))
            story = self._story(f"app {app}", lengths[app])
            story = self._tell(story, f"question {number}", _spread(choices, 350))
            sessions.append(Session(f"user {number}", start_s, (self._turn(0, story, f"q{number}", choices, 200),)))
        return Trace("system prompts", sessions, shares=True)

    def chats(self, num_sessions: int, rate: float) -> Trace:
        """Conversations of one to eight turns, with a pause for reading and typing."""
        return self._conversations(
            "chats", num_sessions, rate, opening=(4, 900), turns=(1, 8), message=450, answer=340, pause_s=12
        )

    def agents(self, num_sessions: int, rate: float) -> Trace:
        """Tools call back within seconds, with long results, under one of three long instructions."""
        return self._conversations(
            "agents", num_sessions, rate, opening=(3, 5_000), turns=(4, 12), message=1_000, answer=120, pause_s=1.5
        )

    def bursts(self, num_sessions: int, rate: float) -> Trace:
        """Single questions, and now and then dozens at once about one new document."""
        choices = self._choices("bursts")
        sessions: list[Session] = []
        clock = 0.0
        while len(sessions) < num_sessions:
            size = choices.randint(20, 60)
            document = self._story(f"document {len(sessions)}", choices.randint(4_000, 8_000))
            for number in range(len(sessions), len(sessions) + size):
                story = self._tell(document, f"question {number}", _spread(choices, 120))
                start_s = clock + choices.uniform(0, 1.0)
                sessions.append(Session(f"{number}", start_s, (self._turn(0, story, f"q{number}", choices, 150),)))
            for number in range(len(sessions), len(sessions) + size):
                story = self._story(f"lone {number}", _spread(choices, 700))
                start_s = clock + choices.uniform(0, 2 * size / rate)
                sessions.append(Session(f"{number}", start_s, (self._turn(0, story, f"q{number}", choices, 150),)))
            clock += 2 * size / rate
        return Trace("bursts", sorted(sessions, key=lambda session: session.start_s), shares=True)

    def quarter_shared(self, num_sessions: int, rate: float) -> Trace:
        """Prompts of which the first quarter is shared with others. Naive cache awareness was reported to be worse than
        round robin at such a share."""
        choices = self._choices("quarter shared")
        apps = [self._story(f"app {number}", 4_096) for number in range(64)]
        sessions = []
        for number, start_s in enumerate(poisson(choices, num_sessions, rate)):
            num_own = _spread(choices, 1_500)
            num_shared = max(1, round(num_own / 3 / self._block_size)) * HASH_BYTES
            story = self._tell(apps[_zipf(choices, len(apps))][:num_shared], f"own {number}", num_own)
            sessions.append(Session(f"user {number}", start_s, (self._turn(0, story, f"q{number}", choices, 200),)))
        return Trace("a quarter shared", sessions, shares=True)

    def unshared(self, num_sessions: int, rate: float) -> Trace:
        """No two prompts have a block in common."""
        choices = self._choices("unshared")
        sessions = []
        for number, start_s in enumerate(poisson(choices, num_sessions, rate)):
            story = self._story(f"own {number}", _spread(choices, 2_000))
            sessions.append(Session(f"user {number}", start_s, (self._turn(0, story, f"q{number}", choices, 200),)))
        return Trace("no sharing", sessions, shares=False)

    def _conversations(
        self,
        name: str,
        num_sessions: int,
        rate: float,
        *,
        opening: tuple[int, int],  # how many different ones, tokens of each
        turns: tuple[int, int],
        message: float,
        answer: float,
        pause_s: float,
    ) -> Trace:
        choices = self._choices(name)
        sessions = []
        mean_turns = sum(turns) / 2
        for number, start_s in enumerate(poisson(choices, num_sessions, rate / mean_turns)):
            story = self._story(f"{name} {choices.randrange(opening[0])}", opening[1])
            made: list[Turn] = []
            for index in range(choices.randint(*turns)):
                story = self._tell(story, f"{name} {number} message {index}", _spread(choices, message))
                wait_s = choices.expovariate(1 / pause_s) if made else 0.0
                made.append(self._turn(wait_s, story, f"{name} {number} answer {index}", choices, answer))
                story = made[-1].whole
            sessions.append(Session(f"{name} {number}", start_s, tuple(made)))
        return Trace(name, sessions, shares=True)

    def _choices(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def _story(self, name: str, num_tokens: int) -> bytes:
        return self._tell(b"", name, num_tokens)

    def _tell(self, story: bytes, name: str, num_tokens: int) -> bytes:
        """The hashes of `story` and of so many more tokens, in whole blocks, at least one."""
        return chain(story, name, max(1, round(num_tokens / self._block_size)))

    def _turn(self, wait_s: float, prompt: bytes, name: str, choices: random.Random, answer: float) -> Turn:
        num_output_tokens = _spread(choices, answer)
        whole = self._tell(prompt, f"answer {name}", num_output_tokens)
        num_prompt_tokens = len(prompt) // HASH_BYTES * self._block_size
        return Turn(wait_s, prompt, whole, num_prompt_tokens, num_output_tokens)


MAKERS: tuple[Callable[[TraceMaker, int, float], Trace], ...] = (
    TraceMaker.system_prompts,
    TraceMaker.chats,
    TraceMaker.agents,
    TraceMaker.bursts,
    TraceMaker.quarter_shared,
    TraceMaker.unshared,
)


def _spread(choices: random.Random, mean: float, sigma: float = 0.8) -> int:
    """Log-normal around a mean, at least 1."""
    return max(1, round(choices.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def _zipf(choices: random.Random, count: int) -> int:
    """0 is the most popular."""
    return choices.choices(range(count), weights=[1 / (rank + 1) for rank in range(count)])[0]
