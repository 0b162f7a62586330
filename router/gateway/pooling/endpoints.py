"""POST /v1/embeddings, /v1/classify, /v1/score, /v1/rerank and /pooling."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.errors import RequestCancelledError
from router.dispatching.pooling import Pooled
from router.fairness.turns import others_turn
from router.gateway.endpoint import JsonEndpoint
from router.gateway.pooling.asked import Scored, prepare, running, usage_of
from router.gateway.pooling.bodies import (
    AnyBody,
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    parse,
)
from router.requests.ids import RunningIds, check_request_id
from router.requests.terms import QUEUED_HEADER, read_terms
from router.security.access import AccessControl
from router.serving.service import InferenceService
from router.wire.exchange import Exchange

_encode = msgspec.json.encode
_MANY_NUMBERS = 2**14  # that are encoded without letting others have the event loop, in a millisecond or two


class _Found(NamedTuple):
    """The numbers of all prompts, and who computed them."""

    body: AnyBody
    asked: Any  # Asked, or Scored of bodies that are scored
    pooled: Sequence[Pooled]
    labels: tuple[str, ...]


class PoolingEndpoint(JsonEndpoint[AnyBody]):
    """An ASGI application for one kind of body."""

    def __init__(
        self,
        kind: type[AnyBody],
        service: InferenceService,
        access: AccessControl,
        ids: RunningIds,
    ) -> None:
        """`ids` are those of all endpoints whose requests can be aborted."""
        super().__init__(_PREFIXES[kind], service, access)
        self._kind = kind
        self._ids = ids

    def _parse(self, body: bytes) -> AnyBody:
        return parse(self._kind, body)

    async def _serve(self, parsed: AnyBody, exchange: Exchange, arrived_at: float) -> None:
        header = exchange.given_header
        terms = read_terms(header, exchange.tenant, self._service.tracing.begin(header))
        account, options = self._access.account(terms.tenant), parsed.options
        model = self._service.asked(options.model, terms.tenant)
        facts = model.model.pooling_facts
        asked = parsed.asked(facts)
        with self._named(options.request_id, exchange) as request_id:
            requests = await prepare(self._service, model, asked, options, request_id, terms, arrived_at)
            exchange.release_body()
            try:
                async with running(self._service, account, requests) as (run, waited_s):
                    exchange.add_header(QUEUED_HEADER, f"{waited_s * 1000:.0f}")
                    exchange.note_generation(run.timeline)
                    found = _Found(parsed, asked, await run.results(), facts.labels)
                    usage = usage_of(run)
            except RequestCancelledError as error:  # by its id; a client that has gone cancels this task
                await exchange.send_error(error)
                return
        parts = [part async for part in self._encoded(found, exchange)]
        head: dict[str, Any] = {"id": request_id, "model": model.name}
        if not isinstance(parsed, RerankBody):
            head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model.name}
        opening, name = _encode(head)[:-1], b"results" if isinstance(parsed, RerankBody) else b"data"
        closing = b'],"usage":' + _encode(usage) + b"}"
        await exchange.send_json([opening + b',"' + name + b'":[', *parts, closing])

    async def _encoded(self, found: _Found, exchange: Exchange) -> AsyncIterator[bytes]:
        """The entries of the answer, encoded, with commas between them; others have their turn where there are many
        numbers."""
        num_numbers = 0
        for number, entry in enumerate(_ENTRIES[self._kind](found)):
            if number:
                yield b","
            for part in _parts_of(entry):
                num_numbers += len(part) // 16
                if num_numbers > _MANY_NUMBERS:
                    num_numbers = 0
                    await others_turn(exchange.tenant)
                yield part

    @contextmanager
    def _named(self, named: str, exchange: Exchange) -> Iterator[str]:
        """Settles the request's id: the body's, else the header's, else a random one. Raises InvalidRequestError."""
        if named:
            check_request_id(named, "request_id")
            exchange.request_id = named
            yield named
        else:
            with self._ids.distinct(exchange.tenant, exchange.request_id) as exchange.request_id:
                yield exchange.request_id


def _embeddings(found: _Found) -> Iterator[dict[str, Any]]:
    assert isinstance(found.body, EmbeddingBody)
    for index, pooled in enumerate(found.pooled):
        yield {"object": "embedding", "index": index, "embedding": _numbers(pooled, found.body.encoding_format)}


def _poolings(found: _Found) -> Iterator[dict[str, Any]]:
    assert isinstance(found.body, PoolingBody)
    is_per_token = found.asked.pooling.task in ("token_embed", "token_classify")
    for index, pooled in enumerate(found.pooled):
        numbers = _numbers(pooled, found.body.encoding_format)
        data = pooled.numbers if is_per_token and not isinstance(numbers, str) else numbers
        yield {"object": "pooling", "index": index, "data": data}


def _parts_of(entry: dict[str, Any]) -> Iterator[bytes]:
    """An entry's JSON; of vectors [tokens, size] as its data, one after the other, as they may be many."""
    data = entry.get("data")
    if not isinstance(data, np.ndarray):
        yield _encode(entry)
        return
    yield _encode({name: value for name, value in entry.items() if name != "data"})[:-1] + b',"data":['
    for number, vector in enumerate(data):
        yield (b"," if number else b"") + _encode(vector.tolist())
    yield b"]}"


def _classifications(found: _Found) -> Iterator[dict[str, Any]]:
    for index, pooled in enumerate(found.pooled):
        label = found.labels[int(pooled.numbers[0].argmax())]
        probabilities = pooled.numbers[0].tolist()
        yield {"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)}


def _scores(found: _Found) -> Iterator[dict[str, Any]]:
    assert isinstance(found.asked, Scored)
    for index, score in enumerate(found.asked.scores(found.pooled)):
        yield {"index": index, "object": "score", "score": score}


def _ranking(found: _Found) -> Iterator[dict[str, Any]]:
    assert isinstance(found.asked, Scored)
    assert isinstance(found.body, RerankBody)
    scores, texts = found.asked.scores(found.pooled), found.body.texts
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    for index in best[: found.body.top_n or None]:
        document = {} if found.body.return_documents is False else {"document": {"text": texts[index]}}
        yield {"index": index, "relevance_score": scores[index], **document}


def _numbers(pooled: Pooled, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(pooled.numbers.tobytes()).decode()
    numbers: list[float] = pooled.numbers[0].tolist()
    return numbers


_ENTRIES: dict[type[AnyBody], Callable[[_Found], Iterator[dict[str, Any]]]] = {
    EmbeddingBody: _embeddings,
    PoolingBody: _poolings,
    ClassifyBody: _classifications,
    ScoreBody: _scores,
    RerankBody: _ranking,
}
_PREFIXES: dict[type[AnyBody], str] = {
    EmbeddingBody: "embd-",
    PoolingBody: "pool-",
    ClassifyBody: "classify-",
    ScoreBody: "score-",
    RerankBody: "rerank-",
}
POOLING_PATHS: dict[str, type[AnyBody]] = {
    "/v1/embeddings": EmbeddingBody,
    "/v1/classify": ClassifyBody,
    "/classify": ClassifyBody,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/rerank": RerankBody,
    "/pooling": PoolingBody,
}
