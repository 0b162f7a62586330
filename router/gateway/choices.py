"""Requests for several answers: bounds of their number, and generating them side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from common.errors import InvalidRequestError
from router.requests.bounds import MAX_LOGPROB_VALUES
from router.requests.request import GenerationRequest

_T = TypeVar("_T")


def num_choices(n: int, num_prompts: int, limit: int) -> int:
    """Returns the choices of all prompts, to be called before anything is made for each. Raises InvalidRequestError if
    there are too many."""
    if not 1 <= n <= limit:
        raise InvalidRequestError(f"n must be an integer in [1, {limit}], got {n}", param="n")
    if n * num_prompts > limit:
        problem = f"n times the number of prompts must be at most {limit}, got {n} times {num_prompts}"
        raise InvalidRequestError(problem, param="n")
    return n * max(1, num_prompts)


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
