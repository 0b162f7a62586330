"""From what a front was asked for to the prompts that are pooled, and back from their numbers to scores.

A score is that of a classifier for both texts together, if the model is one; else the cosine of their embeddings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from common.errors import InvalidRequestError
from common.types import PoolingFacts, PoolingParams
from common.types.pooling import MAX_POOLED_REQUEST_BYTES, NUMBER_BYTES
from router.dispatching.pooling import Pooled, PoolingRun
from router.fairness.turns import others_turn
from router.requests.bounds import MAX_POOLED_INPUTS
from router.requests.request import Draft, GenerationRequest, PairPrompt, Prompt, TextPrompt
from router.requests.terms import Terms
from router.security.quotas import Account
from router.serving.service import Asked as AskedModel
from router.serving.service import InferenceService

_AT_ONCE = 128  # prompts of one request: enough to fill steps, while others have their turn

Named = list[tuple[str, Prompt]]  # with the name of the field, or of the entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of all inputs of a request."""

    model: str | None
    request_id: str  # empty: the front's
    cache_salt: str
    priority: int
    truncate_prompt_tokens: int | None


class Asked(NamedTuple):
    """Prompts, and what is wanted of them."""

    prompts: Named
    pooling: PoolingParams


class Scored(NamedTuple):
    """Prompts whose numbers give scores."""

    prompts: Named
    pooling: PoolingParams
    pairs: list[tuple[int, int]]  # indices of the prompts of each score; both the same: of a classifier

    def scores(self, found: Sequence[Pooled]) -> list[float]:
        """One for each pair."""
        if self.pooling.task == "classify":
            return [float(found[index].numbers[0, -1]) for index, _ in self.pairs]
        vectors = np.concatenate([each.numbers for each in found]).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        first, second = np.array(self.pairs).T
        scores: list[float] = (vectors[first] * vectors[second]).sum(axis=1).tolist()
        return scores


def score(
    facts: PoolingFacts,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    *,
    use_activation: bool,
) -> Scored:
    """Compares texts of `first`, one for all or one for each, with those of `second`. `names` are those of the fields.
    Raises InvalidRequestError."""
    for texts, name in zip((first, second), names, strict=True):
        if not texts:
            raise InvalidRequestError(f"{name} is empty", param=name)
        check_num_inputs(len(texts), name)
    if len(first) not in (1, len(second)):
        problem = f"{names[0]} has {len(first)} texts; it must have one, or {len(second)} as {names[1]} has"
        raise InvalidRequestError(problem, param=names[0])
    if "classify" in facts.tasks:
        if len(facts.labels) not in (1, 2):
            problem = f"the model has {len(facts.labels)} labels; a score needs a classifier of one or two"
            raise InvalidRequestError(problem, param="model")
        texts = list(first) * (len(second) // len(first))
        pairs: list[Prompt] = [PairPrompt(*pair) for pair in zip(texts, second, strict=True)]
        pooling = PoolingParams(task="classify", use_activation=use_activation)
        return Scored(named(pairs, names[1]), pooling, [(index, index) for index in range(len(pairs))])
    own: list[Prompt] = [TextPrompt(text) for text in first]
    others: list[Prompt] = [TextPrompt(text) for text in second]
    prompts = named(own, names[0]) + named(others, names[1])
    indices = [(min(index, len(first) - 1), len(first) + index) for index in range(len(second))]
    return Scored(prompts, PoolingParams(task="embed"), indices)


def named(prompts: Sequence[Prompt], param: str) -> Named:
    """Each with its name: the field's, or with its number if there are several."""
    if len(prompts) == 1:
        return [(param, prompts[0])]
    return [(f"{param}[{index}]", prompt) for index, prompt in enumerate(prompts)]


def check_num_inputs(num_inputs: int, param: str) -> None:
    """Raises InvalidRequestError for more than one request may have."""
    if num_inputs > MAX_POOLED_INPUTS:
        problem = f"{param} has {num_inputs} entries, more than the limit of {MAX_POOLED_INPUTS}"
        raise InvalidRequestError(problem, param=param)


async def prepare(
    service: InferenceService,
    model: AskedModel,
    asked: Asked | Scored,
    options: Options,
    request_id: str,
    terms: Terms,
    arrived_at: float,
) -> list[GenerationRequest]:
    """Each prompt validated and tokenised. Raises InvalidRequestError, and UnavailableError without a pod."""
    limit, truncated = service.max_request_tokens, options.truncate_prompt_tokens
    if truncated is not None and truncated != -1 and truncated < 1:
        problem = f"truncate_prompt_tokens must be -1 or an integer of at least 1, got {truncated}"
        raise InvalidRequestError(problem, param="truncate_prompt_tokens")
    first = Draft(
        request_id=request_id,
        model=options.model,
        prompt=asked.prompts[0][1],
        prompt_param="",
        sampling={} if truncated is None else {"truncate_prompt_tokens": truncated},
        max_tokens=None,
        default_max_tokens=None,
        seed=0,
        pooling=asked.pooling,
        cache_salt=options.cache_salt,
        priority=options.priority,
        terms=terms,
        arrived_at=arrived_at,
    )
    requests: list[GenerationRequest] = []
    num_tokens = num_bytes = 0
    for number, (param, prompt) in enumerate(asked.prompts):
        if number:
            await others_turn(terms.tenant)  # one may take a few milliseconds, and there may be many
        own_id = request_id if number == 0 else f"{request_id}-{number}"
        request = await model.prepare(replace(first, request_id=own_id[:128], prompt=prompt, prompt_param=param))
        num_tokens += len(request.prompt_token_ids)
        if num_tokens > limit:
            problem = f"the inputs have more than the limit of {limit} tokens (max_request_tokens)"
            raise InvalidRequestError(problem, param=param.partition("[")[0])
        num_bytes += NUMBER_BYTES * model.model.pooling_facts.num_numbers(asked.pooling, len(request.prompt_token_ids))
        if num_bytes > MAX_POOLED_REQUEST_BYTES:
            problem = f"{asked.pooling.task} of the inputs takes more than {MAX_POOLED_REQUEST_BYTES} bytes; send fewer"
            raise InvalidRequestError(problem, param=param.partition("[")[0])
        requests.append(request)
    return requests


@asynccontextmanager
async def running(
    service: InferenceService, account: Account, requests: Sequence[GenerationRequest]
) -> AsyncIterator[tuple[PoolingRun, float]]:
    """Admits a request with its prompts under its tenant's quota, and pools them when it is its turn. See
    InferenceService.pool."""
    account.spend(sum(len(request.prompt_token_ids) for request in requests))
    service.count_prompts(requests)
    at_once = min(len(requests), _AT_ONCE, account.quota.max_concurrent or _AT_ONCE, service.max_pooled_at_once)
    with account.admit_choices(at_once):
        async with service.pool(requests, at_once) as (run, waited_s):
            yield run, waited_s


def usage_of(run: PoolingRun) -> dict[str, object]:
    """Token counts, as OpenAI has them."""
    num_tokens = sum(len(request.prompt_token_ids) for request in run.requests)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": min(num_tokens, run.num_cached_tokens)},
    }
