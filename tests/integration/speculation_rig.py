"""Proposers for the tests of speculation, which know what requests will sample, and clients that ask at once."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from common.engine.config import EngineConfig
from common.engine.contract.step import Asked
from common.engine.scheduler import scheduler
from common.engine.scheduler.draft_depth import Candidate, DraftDepth
from common.engine.speculation import guard
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.fake import Accuracy, FakeProposer
from common.engine.speculation.guard import GuardedProposer
from common.engine.worker import worker
from router.runtime import Router
from tests.tiny_models import prompt_of

SETTINGS: dict[str, object] = {  # of engines; prompts are cut by the budget alone, whatever steps take
    "block_size": 4,
    "num_blocks": 128,
    "max_num_batched_tokens": 40,
    "num_threads": 1,
    "target_itl_ms": None,
}
NUM_DRAFTS = 4
LONG_S = 1e3  # to compute a prompt
ANSWERS: list[list[int]] = []  # prompts with all that follows; set by tests
ANSWERS_FILE = "answers.json"  # the same, beside the model, for pods in processes
MISTAKEN_EVERY = 11  # tokens
GUESSES = (5, 6, 7)
LAST: list[CountingProposer] = []


class AllDrafts(DraftDepth):
    """Has every draft verified, whether it pays or not."""

    def choose(self, candidates: Sequence[Candidate], num_rows: int, num_context_tokens: int, room: int) -> list[int]:
        """See DraftDepth."""
        depths = []
        for each in candidates:
            depths.append(min(each.num_drafts, room))
            room -= depths[-1]
        return depths

    def would_choose(self, candidates: Sequence[Candidate], num_rows: int, num_context_tokens: int, room: int) -> bool:
        """See DraftDepth."""
        return True

    def ask(self, chances: Sequence[Callable[[int], float]], num_rows: int, num_context_tokens: int) -> Asked:
        """See DraftDepth."""
        return Asked(self._most_asked.num_drafts, LONG_S)

    def ask_beside_prompts(self, step_s: float) -> Asked:
        """See DraftDepth."""
        return Asked(0, LONG_S)


def ask_and_verify_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposers are asked for drafts, all of which are verified, whatever they and steps take."""

    def guarded(proposer: Proposer, vocab_size: int, _: float) -> GuardedProposer:
        return GuardedProposer(proposer, vocab_size, math.inf)

    monkeypatch.setattr(scheduler, "DraftDepth", AllDrafts)
    monkeypatch.setattr(guard, "_MOST_SPARE_S", math.inf)
    monkeypatch.setattr(worker, "GuardedProposer", guarded)


class CountingProposer(FakeProposer):
    """Counts its drafts."""

    num_calls = 0
    num_proposed = 0

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        drafts = super().propose(requests)
        self.num_calls += 1
        self.num_proposed += sum(map(len, drafts))
        return drafts


def _oracle(token_ids: Sequence[int], _: Context, answers: Sequence[Sequence[int]] = ANSWERS) -> int:
    known = list(token_ids)
    return next(
        (answer[len(known)] for answer in answers if answer[: len(known)] == known and len(answer) > len(known)), 0
    )


def _create(accuracy: Accuracy) -> Proposer:
    LAST[:] = [CountingProposer(_oracle, accuracy, NUM_DRAFTS, vocab_size=64)]
    return LAST[0]


def right(_: EngineConfig) -> Proposer:
    """All drafts are right."""
    return _create("right")


def wrong(_: EngineConfig) -> Proposer:
    """None is."""
    return _create("wrong")


def half(_: EngineConfig) -> Proposer:
    """The first half of them is."""
    return _create("half")


def guessing(_: EngineConfig) -> Proposer:
    """One of GUESSES, of which some are right by chance."""

    def oracle(token_ids: Sequence[int], _: Context) -> int:
        return GUESSES[sum(token_ids) % len(GUESSES)]

    return FakeProposer(oracle, "right", NUM_DRAFTS, vocab_size=64)


def mostly_right(config: EngineConfig) -> Proposer:
    """Most drafts are, of the answers in ANSWERS_FILE."""
    answers = json.loads((Path(config.model.model) / ANSWERS_FILE).read_text())

    def oracle(token_ids: Sequence[int], context: Context) -> int:
        return _oracle(token_ids, context, answers) if len(token_ids) % MISTAKEN_EVERY else 0

    return FakeProposer(oracle, "right", NUM_DRAFTS, vocab_size=64)


NUM_CALLS: Counter[str] = Counter()  # of those that fail, by name


class _Failing:
    """Goes wrong in one way."""

    def __init__(self, name: str) -> None:
        self._name = name
        NUM_CALLS[name] = 0

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        if self._name == "forgetting_badly":
            return [[5] for _ in requests]
        NUM_CALLS[self._name] += 1
        if self._name == "raising":
            raise RuntimeError("broken")
        return [[5, -1, 10**9], *([10**6] * 1000 for _ in requests)]

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer."""
        if self._name == "forgetting_badly":
            NUM_CALLS[self._name] += 1
            raise RuntimeError("broken")

    def reset(self) -> None:
        """See Proposer."""

    def check(self) -> list[str]:
        """See Proposer."""
        return []


def raising(_: EngineConfig) -> Proposer:
    """Raises whenever it is asked."""
    return _Failing("raising")


def answering_garbage(_: EngineConfig) -> Proposer:
    """Answers for one request too many, with tokens that there are not."""
    return _Failing("answering_garbage")


def forgetting_badly(_: EngineConfig) -> Proposer:
    """Raises when requests have ended."""
    return _Failing("forgetting_badly")


def unwilling(_: EngineConfig) -> Proposer:
    """Is not even made."""
    raise RuntimeError("no such device")


def aimless(_: EngineConfig) -> Proposer:
    """Makes nothing."""
    return None  # type: ignore[return-value]


class EightStreams(NamedTuple):
    """What eight clients of a router are told at once."""

    texts: list[str]
    num_accepted: int  # drafts, by their usage
    num_rejected: int


async def eight_streams(router: Router, **options: object) -> EightStreams:
    """Asks for answers that repeat, each with a seed of its own."""
    fixed = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "allowed_token_ids": [5, 6, 7],
        "max_tokens": 40,
    }

    async def one(client: httpx.AsyncClient, seed: int) -> tuple[str, dict[str, int]]:
        body = {"prompt": prompt_of(9 + seed), "seed": seed, **fixed, **options}
        response = await client.post("/v1/completions", json=body)
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return text, chunks[-1]["usage"].get("completion_tokens_details", {})

    async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as client:
        answers = await asyncio.gather(*(one(client, seed) for seed in range(8)))
    counts = [
        sum(details.get(f"{name}_prediction_tokens", 0) for _, details in answers) for name in ("accepted", "rejected")
    ]
    return EightStreams([text for text, _ in answers], *counts)
