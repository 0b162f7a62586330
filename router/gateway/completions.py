"""POST /v1/completions, /v1/chat/completions and /v1/route/explain.

The status is known before the first byte is sent: a stream begins with the first delta of any choice, and a failure
before that is an ordinary error response.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from common.errors import BatonError, ErrorCode, InvalidRequestError, RequestCancelledError
from common.types.validation import SEED_LIMIT
from router.gateway.chunks import Answer, AnswerFormat, ChatFormat, CompletionFormat, usage_of
from router.gateway.exchange import Exchange, Receive, Scope, Send
from router.gateway.explain import explain
from router.gateway.protocol import ChatBody, CompletionBody, parse_any, parse_chat, parse_completion
from router.gateway.resume import HEADER, EventId, Stream, begin, digest_of, new_seed, read_event_id
from router.output import TextGeneration
from router.preprocess import choices_of
from router.request import GenerationRequest, TextPrompt
from router.security.gate import Gate
from router.service import InferenceService
from router.survival.kept import Running, StreamKey
from router.terms import QUEUED_HEADER, Tenant, Terms, read_terms

logger = logging.getLogger(__name__)

_LAST_CHUNK_S = 10.0  # seconds after a request's deadline until its client must have read the end
_INTERNAL = "internal error; the router's log has the details"


@dataclass(frozen=True, slots=True)
class Api:
    """What distinguishes the two endpoints."""

    id_prefix: str
    parse: Callable[[bytes], CompletionBody | ChatBody]
    format: type[AnswerFormat]
    explains: bool = False  # answers with the route that the request would take


COMPLETIONS = Api("cmpl-", parse_completion, CompletionFormat)
CHAT = Api("chatcmpl-", parse_chat, ChatFormat)
EXPLAIN = Api("route-", parse_any, CompletionFormat, explains=True)


@dataclass(frozen=True, slots=True)
class _Job:
    """One HTTP request, valid."""

    choices: list[GenerationRequest]
    echoes: list[str]  # what precedes the text of each choice
    num_prompt_tokens: int  # of all prompts, each counted once
    format: AnswerFormat
    stream: Stream | None  # of events; None: one body
    include_usage: bool


class CompletionsEndpoint:
    """An ASGI application for one of the APIs."""

    def __init__(self, api: Api, service: InferenceService, gate: Gate) -> None:
        self._api = api
        self._service = service
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every failure becomes an error object."""
        arrived_at = time.monotonic()
        config = self._service.config
        exchange = Exchange(scope, receive, send)
        try:
            parsed = self._api.parse(await exchange.read_json(config.max_body_bytes, config.request_timeout_s))
            work = self._serve(parsed, exchange, arrived_at)
            del parsed  # a long prompt must not be kept as long as its answer takes
            async with asyncio.timeout(config.request_timeout_s + _LAST_CHUNK_S):
                await exchange.run_while_connected(work)
        except RequestCancelledError:
            pass  # nobody is there to be told; the generation counted it
        except TimeoutError:
            self._service.metrics.errors.labels(ErrorCode.DEADLINE_EXCEEDED.label).inc()
            logger.warning("a client stopped reading its answer; its connection is closed")
        except BatonError as error:
            await self._refuse(exchange, error)
        except Exception:
            logger.exception("a request failed for an unforeseen reason")
            await self._refuse(exchange, BatonError(_INTERNAL))

    async def _refuse(self, exchange: Exchange, error: BatonError) -> None:
        self._service.metrics.errors.labels(error.code.label).inc()
        await exchange.send_error(error)

    async def _serve(self, parsed: CompletionBody | ChatBody, exchange: Exchange, arrived_at: float) -> None:
        terms = read_terms(exchange.header, exchange.tenant)
        account = self._gate.account(terms.tenant)
        if self._api.explains or parsed.dry_run:
            self._gate.check_operator(terms.tenant)
            with account.admit(1):
                request_id = parsed.request_id or f"{self._api.id_prefix}{uuid.uuid4().hex}"
                drafts = parsed.drafts(request_id, arrived_at, terms)
                await exchange.send_json(await explain(self._service, drafts))
            return
        with account.admit(_num_generations(parsed)):
            job = await self._prepare(parsed, read_event_id(exchange.header(HEADER), parsed), arrived_at, terms)
            del parsed
            account.spend(job.num_prompt_tokens)
            with self._resumable(job, terms.tenant) as resumable:
                async with self._service.run(job.choices) as run:
                    exchange.add_header(QUEUED_HEADER, f"{run.queued_s * 1000:.0f}")
                    resumable.generations = [each.generation for each in run.generations]
                    with account.spending(run.generations):
                        if job.stream is not None:
                            await self._stream(job, job.stream, run.generations, exchange)
                        else:
                            await self._answer(job, run.generations, exchange)

    def _resumable(self, job: _Job, tenant: Tenant) -> AbstractContextManager[Running]:
        """A stream that may be resumed if it breaks within; an answer that is whole or not at all may not."""
        if job.stream is None:
            return nullcontext(Running(b""))
        return self._service.streams.running(StreamKey(tenant.name, job.stream.request_id), job.stream.identity)

    async def _prepare(
        self, body: CompletionBody | ChatBody, event_id: EventId | None, arrived_at: float, terms: Terms
    ) -> _Job:
        n = 1 if body.n is None else body.n
        if event_id is not None:
            request_id, seed = event_id.request_id, event_id.seed
        else:
            request_id, seed = body.request_id or f"{self._api.id_prefix}{uuid.uuid4().hex}", new_seed()
        limit = self._service.config.max_choices
        if not 1 <= n <= limit:
            raise InvalidRequestError(f"n must be an integer in [1, {limit}], got {n}", param="n")
        if n * body.num_prompts > limit:  # before anything is made for each of what may be millions
            problem = f"n times the number of prompts must be at most {limit}, got {n} times {body.num_prompts}"
            raise InvalidRequestError(problem, param="n")
        choices: list[GenerationRequest] = []
        echoes: list[str] = []
        num_prompt_tokens = 0
        for number, draft in enumerate(body.drafts(request_id, arrived_at, terms)):
            seed_of_prompt = (seed + number * n) % SEED_LIMIT if draft.seed is None else draft.seed
            request = await self._service.prepare(replace(draft, seed=seed_of_prompt))
            num_prompt_tokens += len(request.prompt_token_ids)
            choices += choices_of(request, n)
            echo = ""
            if isinstance(body, CompletionBody) and body.echo:
                given = draft.prompt.text if isinstance(draft.prompt, TextPrompt) else None
                echo = self._service.tokenizer.decode(request.prompt_token_ids) if given is None else given
            echoes += [echo] * n
        stream = None
        if body.stream:
            model = self._service.cluster.model
            digest = digest_of(body, terms.tenant, b"" if model is None else model.fingerprint)
            stream, choices = await begin(self._service.streams, event_id, digest, request_id, choices)
        answer_format = self._api.format(
            request_id,
            int(time.time()),
            self._service.model_name,
            self._service.tokenizer,
            wants_logprobs=choices[0].sampling.num_logprobs is not None,
            usage_in_chunks=body.include_usage,
        )
        return _Job(choices, echoes, num_prompt_tokens, answer_format, stream, body.include_usage)

    async def _answer(self, job: _Job, generations: list[TextGeneration], exchange: Exchange) -> None:
        async def collect(generation: TextGeneration) -> Answer:
            answer = Answer()
            async for delta in generation:
                answer.add(delta)
            return answer

        answers = await _together([collect(generation) for generation in generations])
        await exchange.send_json(job.format.whole(answers, job.echoes, _usage(job, generations)))

    async def _stream(self, job: _Job, stream: Stream, generations: list[TextGeneration], exchange: Exchange) -> None:
        async def pump(index: int, generation: TextGeneration) -> None:
            opening, echo = b"", ""
            if not stream.has_begun(index):
                opening, echo = job.format.opening(index), job.echoes[index]
            async for delta in generation:
                event_id = stream.advance(index, delta.token_ids, ended=delta.finish_reason is not None)
                if opening or delta.text or delta.logprobs or delta.finish_reason is not None:
                    await exchange.send_events(opening + event_id + job.format.chunk(index, delta, echo))
                    opening, echo = b"", ""

        await _together([pump(index, generation) for index, generation in enumerate(generations)])
        last = job.format.usage_chunk(_usage(job, generations)) if job.include_usage else b""
        await exchange.end_events(last)


def _num_generations(body: CompletionBody | ChatBody) -> int:
    """As many as are asked for; whether that is allowed at all is checked later."""
    return max(1, body.n or 1) * max(1, body.num_prompts)


async def _together(work: list[Any]) -> list[Any]:
    """Results of all coroutines; the first failure cancels the others and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _usage(job: _Job, generations: list[TextGeneration]) -> dict[str, Any]:
    return usage_of(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=sum(generation.num_tokens for generation in generations),
        cached_tokens=min(job.num_prompt_tokens, sum(each.generation.num_cached_tokens for each in generations)),
    )
