"""Embed, Classify and Score of the gRPC front."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from common.errors import InvalidRequestError
from common.pb import inference_pb2
from common.types import PoolingFacts, PoolingParams
from router.dispatching.pooling import Pooled, PoolingRun
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.gateway.pooling.asked import (
    Asked,
    Options,
    Scored,
    check_num_inputs,
    named,
    prepare,
    running,
    score,
)
from router.requests.ids import check_request_id
from router.requests.request import Prompt, TextPrompt, TokenPrompt
from router.requests.terms import Terms
from router.security.access import AccessControl
from router.serving.service import InferenceService

PoolingRequest = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest
OnStart = Callable[[PoolingRun, float], Awaitable[None]]


class Found(NamedTuple):
    """The numbers of all inputs."""

    request_id: str
    asked: Asked | Scored
    pooled: list[Pooled]
    labels: tuple[str, ...]  # of the model
    usage: inference_pb2.Usage


async def pool(
    service: InferenceService, access: AccessControl, message: PoolingRequest, terms: Terms, on_start: OnStart
) -> Found:
    """Computes what `message` asks for. `on_start` is called once its turn has come, with the seconds that it waited.
    Raises a BatonError."""
    options = _options(message)
    check_request_id(options.request_id, "request_id")
    model = service.asked(options.model, terms.tenant)
    facts = model.model.pooling_facts
    asked = _asked(message, facts)
    requests = await prepare(service, model, asked, options, options.request_id, terms, time.monotonic())
    async with running(service, access.account(terms.tenant), requests) as (run, waited_s):
        await on_start(run, waited_s)
        pooled = await run.results()
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        usage = inference_pb2.Usage(prompt_tokens=num_tokens, cached_tokens=min(num_tokens, run.num_cached_tokens))
    return Found(options.request_id, asked, pooled, facts.labels, usage)


async def embeddings(found: Found, tenant: Tenant) -> inference_pb2.EmbedResponse:
    """The answer of Embed; others have their turn after each embedding."""
    response = inference_pb2.EmbedResponse(request_id=found.request_id, usage=found.usage)
    for pooled in found.pooled:
        response.embeddings.add(values=pooled.numbers[0].tolist())
        await others_turn(tenant)
    return response


def classes(found: Found) -> inference_pb2.ClassifyResponse:
    """The answer of Classify."""
    response = inference_pb2.ClassifyResponse(request_id=found.request_id, labels=found.labels, usage=found.usage)
    for pooled in found.pooled:
        label = found.labels[int(pooled.numbers[0].argmax())]
        response.results.add(label=label, probabilities=pooled.numbers[0].tolist())
    return response


def scores(found: Found) -> inference_pb2.ScoreResponse:
    """The answer of Score."""
    assert isinstance(found.asked, Scored)
    values = found.asked.scores(found.pooled)
    return inference_pb2.ScoreResponse(request_id=found.request_id, scores=values, usage=found.usage)


def _options(message: PoolingRequest) -> Options:
    has_limit = message.HasField("truncate_prompt_tokens")
    return Options(
        model=message.model or None,
        request_id=message.request_id or f"pool-{uuid.uuid4().hex}",
        cache_salt=message.cache_salt,
        priority=message.priority,
        truncate_prompt_tokens=message.truncate_prompt_tokens if has_limit else None,
    )


def _asked(message: PoolingRequest, facts: PoolingFacts) -> Asked | Scored:
    """Raises InvalidRequestError."""
    match message:
        case inference_pb2.EmbedRequest():
            use_activation = message.normalize or not message.HasField("normalize")
            pooling = PoolingParams(task="embed", dimensions=message.dimensions, use_activation=use_activation)
            return Asked(named(_prompts(message.inputs), "inputs"), pooling)
        case inference_pb2.ClassifyRequest():
            use_activation = message.use_activation or not message.HasField("use_activation")
            pooling = PoolingParams(task="classify", use_activation=use_activation)
            return Asked(named(_prompts(message.inputs), "inputs"), pooling)
        case _:
            use_activation = message.use_activation or not message.HasField("use_activation")
            names = ("queries", "documents")
            return score(facts, message.queries, message.documents, names, use_activation=use_activation)


def _prompts(inputs: Sequence[inference_pb2.PoolingInput]) -> list[Prompt]:
    check_num_inputs(len(inputs), "inputs")
    if not inputs:
        raise InvalidRequestError("inputs is empty", param="inputs")
    return [
        TokenPrompt(list(each.tokens.token_ids)) if each.WhichOneof("input") == "tokens" else TextPrompt(each.text)
        for each in inputs
    ]
