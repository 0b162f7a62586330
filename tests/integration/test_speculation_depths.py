"""Answers are the same with any number of drafts at once, also where they end or are bound within a run of drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration import speculation_rig as rig
from tests.integration.cluster import DEADLINE_S, Cluster, running_cluster, with_tokenizer
from tests.integration.test_structured_output import CONSTRAINTS, PROMPT, TEMPLATE
from tests.tiny_models import random_model, tiny_config

MAX_TOKENS = 40
LETTERS = list(range(64, 70))  # tokens of the tiny models' tokenizer, each of which is a letter
FREE = {"prompt": PROMPT, "allowed_token_ids": LETTERS, "max_tokens": MAX_TOKENS}
DRAWN = {**FREE, "temperature": 1.0, "seed": 5}
GREEDY = {**FREE, "temperature": 0.0}
MAX_DEPTH = 8
DEPTHS = [pytest.param(depth, marks=() if depth in (2, 7) else pytest.mark.matrix) for depth in range(1, MAX_DEPTH + 1)]
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "logprobs": 2},
    "drawn": {**DRAWN, "logprobs": 2},
    "choices": {**DRAWN, "n": 3, "logprobs": 1},
    "echo": {**DRAWN, "echo": True, "logprobs": 1},
    "echo of choices": {**DRAWN, "echo": True, "n": 3},
    "penalties": {**DRAWN, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "penalties, greedy": {**GREEDY, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    **{f"{number} tokens": {**DRAWN, "max_tokens": number} for number in range(1, MAX_DEPTH + 3)},
    **{
        f"{name}, {sampling['temperature']}": {**fields, **sampling}
        for name, fields in CONSTRAINTS.items()
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "n": 3})
    },
}
EXPECTED: dict[str, dict[str, Any]] = {}  # answers without drafts, by name of the body; made once


def further_bodies(text: str) -> dict[str, dict[str, Any]]:
    """Those that follow from the text of the drawn answer: what stops it, or must not be in it, is in it."""
    places = range(10, 10 + MAX_DEPTH)
    return {
        **{f"stop at {at}": {**DRAWN, "stop": [text[at : at + 3]]} for at in places},
        **{
            f"stop at {at}, included": {**DRAWN, "stop": text[at : at + 4], "include_stop_str_in_output": True}
            for at in places
        },
        **{f"bad words at {at}": {**DRAWN, "bad_words": [text[at : at + 2], text[at + 3 : at + 6]]} for at in places},
    }


async def answers_to(cluster: Cluster, bodies: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client:

        async def answer(body: dict[str, Any]) -> dict[str, Any]:
            is_chat = "tools" in body
            prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            response = await client.post(path, json={"max_tokens": 60, **prompt, **body, "return_token_ids": True})
            assert response.status_code == 200, response.text
            return response.json()

        return dict(zip(bodies, await asyncio.gather(*map(answer, bodies.values())), strict=True))


def said(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Choices of an answer; names of calls are drawn."""
    choices = answer["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id", None)
    return choices


def assert_same(found: Any, expected: Any, name: str) -> None:
    """Numbers may differ in the last bits, as log probabilities do."""
    match expected:
        case float():
            assert found == pytest.approx(expected, abs=1e-5), name
        case dict():
            assert found.keys() == expected.keys(), name
            for key, value in expected.items():
                assert_same(found[key], value, f"{name}: {key}")
        case list():
            assert len(found) == len(expected), name
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other, name)
        case _:
            assert found == expected, name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("depths")
    random_model(tiny_config("LlamaConfig", tie_word_embeddings=True)).save_pretrained(path / "plain")
    return with_tokenizer(path / "plain", path / "model")


@pytest.fixture
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    rig.ask_and_verify_always(monkeypatch)
    monkeypatch.setattr(rig, "NUM_DRAFTS", request.param)
    return request.param


async def expect(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path / "plain", model, num_prefill=0, chat_template=TEMPLATE) as cluster:
        EXPECTED.update(await answers_to(cluster, BODIES))
        further = further_bodies(EXPECTED["drawn"]["choices"][0]["text"])
        BODIES.update(further)
        EXPECTED.update(await answers_to(cluster, further))
    sequences = [
        (choice.get("prompt_token_ids") or answer["prompt_token_ids"]) + choice["token_ids"]
        for answer in EXPECTED.values()
        for choice in answer["choices"]
    ]
    (model / rig.ANSWERS_FILE).write_text(json.dumps(sequences))


@pytest.mark.parametrize("depth", DEPTHS, indirect=True)
async def test_every_depth_gives_the_same_answers(depth: int, tmp_path: Path, model: Path) -> None:
    if not EXPECTED:
        await expect(tmp_path, model)
    speculative = f"{rig.__name__}:mostly_right"
    async with running_cluster(
        tmp_path, model, num_prefill=0, speculative=speculative, chat_template=TEMPLATE
    ) as cluster:
        answers = await answers_to(cluster, BODIES)
        drafts = (await cluster.decode[0].context.engine.stats()).drafts
    for name, expected in EXPECTED.items():
        assert_same(said(answers[name]), said(expected), name)
    assert drafts.accepted_by_position[depth - 1] > 0
