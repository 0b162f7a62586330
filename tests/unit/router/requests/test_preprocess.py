"""What becomes of a client's sampling parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidRequestError
from common.types import validation
from common.types.constraint import Constraint
from tests.unit.router.dispatching.test_two_legs import _draft


async def test_sampling_is_checked_once_where_there_are_bad_words(start_cluster, monkeypatch):
    cluster = await start_cluster()
    checked = []
    check = validation.check_constraint
    monkeypatch.setattr(validation, "check_constraint", lambda *args: (checked.append(args), check(*args)))
    sampling = {"bad_words": ("cat", "dog"), "structured_outputs": Constraint.regex("a+")}
    request = await cluster.router.service.model("").prepare(replace(_draft("a"), sampling=sampling))
    assert len(checked) == 1
    assert len(request.sampling.bad_word_token_ids) >= 2


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"bad_words": ("cat", " ")}, "words"),
        ({"bad_words": ("~" * 256,) * 128}, "words"),  # too many tokens in all
        ({"bad_words": ("cat",), "temperature": 3.0}, "temperature"),
    ],
)
async def test_what_is_wrong_beside_bad_words_is_named_as_the_client_calls_it(start_cluster, sampling, param):
    cluster = await start_cluster()
    draft = replace(_draft("a"), sampling=sampling, names={"bad_words": "words"})
    with pytest.raises(InvalidRequestError) as raised:
        await cluster.router.service.model("").prepare(draft)
    assert raised.value.param == param


async def test_a_request_without_a_seed_gets_one_of_its_own(start_cluster):
    model = (await start_cluster()).router.service.model("")
    seeds = [(await model.prepare(replace(_draft("a"), seed=seed))).sampling.seed for seed in (None, None, 0, 7)]
    assert len(set(seeds)) == 4
    assert seeds[2:] == [0, 7]
