"""Requests for several answers: bounds of their number, and generating them side by side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequestError
from router.dispatching.text_generation import TextDelta
from router.requests.bounds import MAX_LOGPROB_VALUES, MAX_RULED_TOKENS
from router.requests.preprocess import choices_of
from router.requests.request import GenerationRequest

_T = TypeVar("_T")


def num_choices(n: int, num_prompts: int, limit: int, param: str = "n") -> int:
    """Returns the choices of all prompts, to be called before anything is made for each. Raises InvalidRequestError if
    there are too many; `param` is what the client calls `n`."""
    if not 1 <= n <= limit:
        raise InvalidRequestError(f"{param} must be an integer in [1, {limit}], got {n}", param=param)
    if n * num_prompts > limit:
        problem = f"{param} times the number of prompts must be at most {limit}, got {n} times {num_prompts}"
        raise InvalidRequestError(problem, param=param)
    return n * max(1, num_prompts)


def candidates_of(request: GenerationRequest, num: int, n: int) -> list[GenerationRequest]:
    """`num` requests for the same prompt, of which `n` are chosen: by their log probabilities, if there are more."""
    if num > n and request.sampling.num_logprobs is None:
        request = replace(request, sampling=msgspec.structs.replace(request.sampling, num_logprobs=0))
    return choices_of(request, num)


def log_probability(delta: TextDelta) -> float:
    """Returns the log probability of a delta's tokens together, as the model computed them."""
    return math.fsum(each.sampled for each in delta.logprobs)


def best_of(scores: Sequence[float], num: int, n: int) -> list[int]:
    """Positions of the `n` best of each `num` in a row, best first; the first of those that are equal."""
    if num == n:
        return list(range(len(scores)))
    groups = (range(first, first + num) for first in range(0, len(scores), num))
    return [at for group in groups for at in sorted(group, key=lambda position: -scores[position])[:n]]


def check_num_logprobs(requests: Sequence[GenerationRequest], n: int, param: str) -> None:
    """Raises InvalidRequestError if `n` choices of each of `requests`, which have the same num_logprobs, ask for more
    log probabilities than one answer may hold; one choice may always fill the context. `param` is what the client calls
    num_logprobs."""
    sampling = requests[0].sampling
    if sampling.num_logprobs is None or n * len(requests) == 1:
        return
    num_tokens = n * sum(request.sampling.max_tokens or 0 for request in requests)
    if num_tokens * (sampling.num_logprobs + 1) > MAX_LOGPROB_VALUES:
        problem = f"all choices' max_tokens times ({param} + 1) must be at most {MAX_LOGPROB_VALUES}"
        raise InvalidRequestError(f"{param}: {problem}", param=param)


def check_num_prompt_logprobs(requests: Sequence[GenerationRequest], n: int, param: str) -> None:
    """Raises InvalidRequestError if `n` choices of each of `requests` ask for more log probabilities of prompts than
    one answer may hold. `param` is what the client calls them."""
    num_top = requests[0].sampling.prompt_logprobs
    if num_top is None:
        return
    num_tokens = n * sum(len(request.prompt_token_ids) for request in requests)
    if num_tokens * (num_top + 1) > MAX_LOGPROB_VALUES:
        problem = f"prompt tokens of all choices times ({param} + 1) must be at most {MAX_LOGPROB_VALUES}"
        raise InvalidRequestError(f"{param}: {problem}", param=param)


def check_num_ruled_tokens(requests: Sequence[GenerationRequest], n: int) -> None:
    """Raises InvalidRequestError if biases, masks and bad words of `n` choices of each of `requests`, for all of which
    they are the same, name more tokens than a pod should keep for one client."""
    sampling, num = requests[0].sampling, n * len(requests)
    named = {
        "logit_bias": len(sampling.logit_bias or ()),
        "allowed_token_ids": len(sampling.allowed_token_ids),
        "bad_words": sum(map(len, sampling.bad_word_token_ids)),
    }
    if num > 1 and num * sum(named.values()) > MAX_RULED_TOKENS:
        problem = f"the choices times the tokens of {', '.join(named)} must be at most {MAX_RULED_TOKENS}"
        param = max(named, key=named.__getitem__)
        raise InvalidRequestError(f"{param}: {problem}", param=param)


async def together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Returns the results of all coroutines; the first failure cancels the others and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
