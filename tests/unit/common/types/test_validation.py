import math

import msgspec
import pytest

from common.errors import InvalidRequestError, PromptTooLongError
from common.types import SamplingParams
from common.types.parameters import parameters_of
from common.types.validation import validate_prompt, validate_sampling

GOOD = SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", GOOD.max_tokens + 1),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        validate_sampling(msgspec.structs.replace(GOOD, **{field: value}), vocab_size=10)
    assert raised.value.param == field


def test_sequences_are_bounded_together() -> None:
    limit = parameters_of(SamplingParams)["bad_word_token_ids"].parameter.max_token_ids
    assert limit is not None
    longest = ((1,) * (limit - 2), (2, 3))
    validate_sampling(SamplingParams(bad_word_token_ids=longest), vocab_size=10)
    with pytest.raises(InvalidRequestError, match=f"at most {limit} token ids in all"):
        validate_sampling(SamplingParams(bad_word_token_ids=(*longest, (1,))), vocab_size=10)


def test_bounds_are_accepted() -> None:
    validate_sampling(
        SamplingParams(
            temperature=2.0,
            top_p=1.0,
            min_p=1.0,
            max_tokens=1,
            min_tokens=1,
            num_logprobs=20,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=10.0,
            stop_token_ids=(0, 9),
            seed=2**64 - 1,
        ),
        vocab_size=10,
    )


def test_stop_token_outside_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids has token id 10") as raised:
        validate_sampling(SamplingParams(stop_token_ids=(10,)), vocab_size=10)
    assert raised.value.param == "stop_token_ids"


def test_names_of_the_callers_protocol() -> None:
    with pytest.raises(InvalidRequestError, match="top_logprobs") as raised:
        validate_sampling(SamplingParams(num_logprobs=99), names={"num_logprobs": "top_logprobs"})
    assert raised.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ([], InvalidRequestError),
        ([1, 10], InvalidRequestError),
        ([-1], InvalidRequestError),
        (["a"], InvalidRequestError),
        ([1] * 5, PromptTooLongError),
    ],
)
def test_bad_prompt(token_ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        validate_prompt(token_ids, vocab_size=10, max_model_len=8, max_tokens=4, param="input")
    assert raised.value.param == "input"
    validate_prompt([1] * 4, vocab_size=10, max_model_len=8, max_tokens=4)
