"""The public gRPC front: baton.v1.Inference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grpc

from common.errors import DeadlineExceededError, InvalidRequestError
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.convert import finish_reason_to_pb
from common.rpc.errors import rpc_errors
from common.types import FinishReason
from router.dispatching.kept import Running, StreamKey
from router.dispatching.pooling import PoolingRun
from router.dispatching.text_generation import TextDelta, TextGeneration
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.gateway.answering.beams import Found, search_beams, spelled
from router.gateway.answering.choices import (
    best_of,
    candidates_of,
    check_num_logprobs,
    check_num_prompt_logprobs,
    check_num_ruled_tokens,
    log_probability,
    num_choices,
    together,
)
from router.gateway.answering.explain import explain
from router.gateway.answering.resume import Stream, begin, digest_of_bytes, parse_event_id
from router.gateway.bodies.field_names import GRPC_NAMES
from router.gateway.bodies.structured import errors_of_constraint
from router.gateway.grpc import pooling
from router.gateway.grpc.drafts import asked_for, beams_of, draft_of, prompt_of, reply_options
from router.replies.reply import Call, Reasoning, ReplyOptions, ReplyParser, Text
from router.requests.request import STRUCTURED, Draft, GenerationRequest, SpeculationCounts
from router.requests.terms import QUEUED_HEADER, Terms, read_terms
from router.security.access import AccessControl
from router.security.grpc_guard import tenant_of_call
from router.security.grpc_messages import release_message
from router.serving.service import InferenceService
from router.wire.access_log import AccessRecord

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_AT_ONCE = 256  # log probabilities of a prompt that are copied
_LAST_CHUNK_S = 10.0  # seconds after a request's deadline until its client must have read the end

_Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
_StreamContext = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateChunk]
_AnyContext = grpc.aio.ServicerContext[Any, Any]


class _Prepared(NamedTuple):
    """One call, valid."""

    request_id: str
    choices: list[GenerationRequest]
    parsers: list[ReplyParser | None]  # of each choice; None: it is all text
    event_ids: Stream | None  # of a stream that may be resumed
    constraint_name: str  # the field that constrains the answer


@dataclass(frozen=True, slots=True)
class _Job:
    """One call, dispatched."""

    request_id: str
    generations: list[TextGeneration]
    parsers: list[ReplyParser | None]  # see _Prepared
    event_ids: Stream | None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generations[0].generation.request.prompt_token_ids)


class _Gained(NamedTuple):
    """The gain of a choice."""

    text: str
    reasoning: str = ""
    tool_calls: Sequence[inference_pb2.ToolCall] = ()


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves what the HTTP front serves, in messages."""

    def __init__(self, service: InferenceService, access: AccessControl, *, has_access_log: bool) -> None:
        """Its calls come through an ApiKeyInterceptor."""
        self._service = service
        self._access = access
        self._has_access_log = has_access_log

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """Whole answers."""
        if request.use_beam_search:
            async with self._errors(context, "Generate") as record:
                return await self._search(request, self._terms(context), record)
        async with (
            self._errors(context, "Generate") as record,
            self._run(request, context, record, is_stream=False) as job,
        ):
            response = inference_pb2.GenerateResponse(request_id=job.request_id)
            answers = enumerate(zip(job.generations, job.parsers, strict=True))
            scores = await together([_fill(response.choices.add(index=index), *each) for index, each in answers])
            if len(scores) > (request.n or 1):
                response = await _with_best(response, scores, request)
            response.usage.CopyFrom(_usage(job))
            return response

    async def GenerateStream(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self, request: inference_pb2.GenerateRequest, context: _StreamContext
    ) -> None:
        """Answers piece by piece."""
        async with (
            self._errors(context, "GenerateStream") as record,
            self._run(request, context, record, is_stream=True) as job,
        ):
            due = job.generations[0].generation.request.deadline + _LAST_CHUNK_S
            writing = asyncio.Lock()  # one message at a time

            async def pump(index: int, generation: TextGeneration) -> None:
                parser = job.parsers[index]
                has_begun = job.event_ids is not None and job.event_ids.has_begun(index)
                async for delta in generation:
                    if parser is not None and has_begun:
                        await parser.replay(generation.replayed_text, generation.replayed_offsets, tenant_of_call())
                        has_begun = False
                    chunk = _chunk(job, index, delta)
                    async with writing:
                        await context.write(chunk)

            try:
                async with asyncio.timeout(due - time.monotonic()):
                    await together([pump(index, each) for index, each in enumerate(job.generations)])
            except TimeoutError as error:
                raise DeadlineExceededError("the client stopped reading its answer") from error

    async def Embed(  # noqa: N802
        self,
        request: inference_pb2.EmbedRequest,
        context: grpc.aio.ServicerContext[inference_pb2.EmbedRequest, inference_pb2.EmbedResponse],
    ) -> inference_pb2.EmbedResponse:
        """Embeddings of texts."""
        async with self._errors(context, "Embed") as record:
            return await pooling.embeddings(await self._pool(request, context, record), tenant_of_call())

    async def Classify(  # noqa: N802
        self,
        request: inference_pb2.ClassifyRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ClassifyRequest, inference_pb2.ClassifyResponse],
    ) -> inference_pb2.ClassifyResponse:
        """Probabilities of labels."""
        async with self._errors(context, "Classify") as record:
            return pooling.classes(await self._pool(request, context, record))

    async def Score(  # noqa: N802
        self,
        request: inference_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ScoreRequest, inference_pb2.ScoreResponse],
    ) -> inference_pb2.ScoreResponse:
        """Scores of pairs of texts."""
        async with self._errors(context, "Score") as record:
            return pooling.scores(await self._pool(request, context, record))

    async def _pool(self, message: pooling.PoolingRequest, context: _AnyContext, record: AccessRecord) -> pooling.Found:
        async def note_start(run: PoolingRun, waited_s: float) -> None:
            record.request_id, record.timeline = run.request_id, run.timeline
            release_message()
            await context.send_initial_metadata(((QUEUED_HEADER, f"{waited_s * 1000:.0f}"),))

        return await pooling.pool(self._service, self._access, message, self._terms(context), note_start)

    async def Abort(  # noqa: N802
        self,
        request: inference_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[inference_pb2.AbortRequest, inference_pb2.AbortResponse],
    ) -> inference_pb2.AbortResponse:
        """End a generation by its id."""
        service, tenant = self._service, tenant_of_call()
        found = service.abort(request.request_id, tenant) or await service.peers.abort(request.request_id, tenant.name)
        return inference_pb2.AbortResponse(found=found)

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse],
    ) -> inference_pb2.ListModelsResponse:
        """The served models, under all their names."""
        may_use = tenant_of_call().may_use
        response = inference_pb2.ListModelsResponse()
        for model in self._service.models:
            for name in filter(may_use, model.names):
                response.models.add(name=name, max_model_len=model.max_model_len)
            for adapter in self._service.adapters_of(model):
                if may_use(adapter.name):
                    response.models.add(name=adapter.name, max_model_len=model.max_model_len, parent=model.name)
        return response

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse],
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt."""
        tenant = tenant_of_call()
        account = self._access.account(tenant)
        async with self._errors(context, "Tokenize"):
            prompt, param = prompt_of(request)
            model = self._service.asked(request.model, tenant).model
            token_ids = await model.preprocessor.tokenize(prompt, param, tenant)
            account.spend(len(token_ids))
            return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def Detokenize(  # noqa: N802
        self,
        request: inference_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse],
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        tenant = tenant_of_call()
        account = self._access.account(tenant)
        async with self._errors(context, "Detokenize"):
            token_ids = list(request.token_ids)
            preprocessor = self._service.asked(request.model, tenant).model.preprocessor
            text = await preprocessor.detokenize(token_ids, "token_ids", tenant)
            account.spend(len(token_ids))
            return inference_pb2.DetokenizeResponse(text=text)

    async def Explain(  # noqa: N802
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.ExplainResponse],
    ) -> inference_pb2.ExplainResponse:
        """Answers with the route that the request would take."""
        async with self._errors(context, "Explain"):
            terms = self._terms(context)
            self._access.check_operator(terms.tenant)
            account = self._access.account(terms.tenant)
            with account.admit_choices(self._num_choices(request)):
                draft = draft_of(request, terms)
                prepared = await self._valid(draft, reply_options(request, draft.prompt))
                account.spend(len(prepared.prompt_token_ids))
                route = await explain(self._service, [prepared])
                return inference_pb2.ExplainResponse(json=route.decode())

    @asynccontextmanager
    async def _errors(self, context: _AnyContext, method: str) -> AsyncIterator[AccessRecord]:
        """Errors become statuses, and are counted. Logs the call when it has ended."""
        record = AccessRecord("gRPC", f"/{_SERVICE}/{method}", context.peer())
        record.status = "CANCELLED"
        record.tenant_name = tenant_of_call().name
        try:
            async with rpc_errors(context), self._service.counted_errors(), record.noting_errors():
                with GRPC_NAMES.in_errors():
                    yield record
        finally:
            if self._has_access_log:
                record.write()

    @asynccontextmanager
    async def _run(
        self, message: inference_pb2.GenerateRequest, context: _AnyContext, record: AccessRecord, *, is_stream: bool
    ) -> AsyncIterator[_Job]:
        terms = self._terms(context)
        account = self._access.account(terms.tenant)
        with account.admit_choices(self._num_choices(message)):
            prepared = await self._prepare(message, terms, is_stream=is_stream)
            choices, event_ids = prepared.choices, prepared.event_ids
            record.request_id = prepared.request_id
            account.spend(len(choices[0].prompt_token_ids))
            self._service.count_prompts(choices[:1])
            with (
                self._resumable(event_ids, terms.tenant) as resumable,
                errors_of_constraint(prepared.constraint_name),
            ):
                async with self._service.run(choices) as run:
                    await context.send_initial_metadata(((QUEUED_HEADER, f"{run.queued_s * 1000:.0f}"),))
                    record.timeline = run.generations[0].generation.timeline
                    resumable.generations = [each.generation for each in run.generations]
                    with account.spending(run.generations):
                        yield _Job(prepared.request_id, run.generations, prepared.parsers, event_ids)

    async def _search(
        self, message: inference_pb2.GenerateRequest, terms: Terms, record: AccessRecord
    ) -> inference_pb2.GenerateResponse:
        """The n best of its beams. Raises InvalidRequestError."""
        account = self._access.account(terms.tenant)
        with account.admit_choices(self._num_choices(message)):
            _check_not_resumed(message)
            beams = beams_of(message)
            assert beams is not None
            draft = draft_of(message, terms)
            record.request_id = draft.request_id
            request = await self._valid(draft, reply_options(message, draft.prompt))
            account.spend(len(request.prompt_token_ids))
            self._service.count_prompts([request])
            results = await search_beams(self._service, request, beams, account.spend)
            tokenizer = self._service.model_of(request).tokenizer
            choices = [
                _found(index, spelled(request, result, tokenizer))
                for index, result in enumerate(results[: message.n or 1])
            ]
            usage = inference_pb2.Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
            )
            return inference_pb2.GenerateResponse(request_id=draft.request_id, choices=choices, usage=usage)

    def _num_choices(self, message: inference_pb2.GenerateRequest) -> int:
        beams_of(message)  # raises for a search that is refused
        n, limit = message.n or 1, self._service.config.max_choices
        if not message.best_of:
            return num_choices(n, 1, limit)
        if message.best_of < n:
            raise InvalidRequestError(f"best_of must be at least n ({n}), got {message.best_of}", param="best_of")
        return num_choices(message.best_of, 1, limit, "best_of")

    async def _prepare(self, message: inference_pb2.GenerateRequest, terms: Terms, *, is_stream: bool) -> _Prepared:
        """The choices, from where the client has them. Raises InvalidRequestError."""
        if not is_stream:
            _check_not_resumed(message)
        elif message.use_beam_search:
            problem = "use_beam_search is for Generate, not for GenerateStream"
            raise InvalidRequestError(problem, param="use_beam_search")
        n, num = message.n or 1, message.best_of or message.n or 1
        if is_stream and num > n:
            raise InvalidRequestError("best_of greater than n is for Generate, not for GenerateStream", param="best_of")
        last_id = parse_event_id(message.last_event_id) if message.last_event_id else None
        draft = draft_of(message, terms, "" if last_id is None else last_id.request_id)
        if draft.seed is None and last_id is not None:
            draft = replace(draft, seed=last_id.seed)
        options = reply_options(message, draft.prompt)
        request = await self._valid(draft, options)
        num_tokens, limit = num * len(request.prompt_token_ids), self._service.max_request_tokens
        if num_tokens > limit:
            problem = f"the prompt times n has more than the limit of {limit} tokens (max_request_tokens)"
            raise InvalidRequestError(problem, param=draft.prompt_param)
        check_num_logprobs([request], num, "num_logprobs")
        check_num_prompt_logprobs([request], num, "prompt_logprobs")
        check_num_ruled_tokens([request], num)
        choices, event_ids = candidates_of(request, num, n), None
        model = self._service.model_of(request)
        if last_id is not None or message.resumable:
            identity = model.fingerprint + request.adapter_digest
            digest = digest_of_bytes("GenerateRequest", asked_for(message), terms.tenant, identity)
            event_ids, choices = await begin(self._service.streams, last_id, digest, draft.request_id, choices)
        parsers = [model.parsing.parser_for(choice, options) for choice in choices]
        constraint_name = draft.names.get(STRUCTURED, STRUCTURED)
        return _Prepared(draft.request_id, choices, parsers, event_ids, constraint_name)

    async def _valid(self, draft: Draft, options: ReplyOptions) -> GenerationRequest:
        """The request, whose answers are parsed in this way. Raises InvalidRequestError."""
        asked = self._service.asked(draft.model, draft.terms.tenant)
        request = await asked.model.parsing.prepare(draft, options, asked.prepare)
        release_message()
        return request

    def _terms(self, context: _AnyContext) -> Terms:
        """Reads the terms from metadata, which has the names of HTTP's headers."""
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        return read_terms(metadata.get, tenant_of_call(), self._service.tracing.begin(metadata.get))

    def _resumable(self, event_ids: Stream | None, tenant: Tenant) -> AbstractContextManager[Running]:
        """Keeps the stream if it breaks within, where the client can resume it."""
        if event_ids is None:
            return nullcontext(Running(b""))
        return self._service.streams.running(StreamKey(tenant.name, event_ids.request_id), event_ids.identity)


def _check_not_resumed(message: inference_pb2.GenerateRequest) -> None:
    if message.resumable or message.last_event_id:
        param = "resumable" if message.resumable else "last_event_id"
        raise InvalidRequestError(f"{param} is for GenerateStream", param=param)


def _found(index: int, found: Found) -> inference_pb2.Choice:
    """An answer that was searched for."""
    choice = inference_pb2.Choice(
        index=index,
        text=found.text,
        token_ids=found.token_ids,
        finish_reason=finish_reason_to_pb(found.finish_reason),
    )
    if found.stop_token_id is not None:
        choice.stop_token_id = found.stop_token_id
    return choice


async def _with_best(
    response: inference_pb2.GenerateResponse, scores: Sequence[float], message: inference_pb2.GenerateRequest
) -> inference_pb2.GenerateResponse:
    """The response with the choices that are returned, numbered. Others have their turn while they are copied."""
    best = inference_pb2.GenerateResponse(request_id=response.request_id)
    for index, at in enumerate(best_of(scores, len(scores), message.n or 1)):
        choice = response.choices[at]
        choice.index = index
        if not message.options.HasField("num_logprobs"):
            choice.ClearField("logprobs")
        best.choices.append(choice)
        await others_turn(tenant_of_call())
    return best


async def _fill(choice: inference_pb2.Choice, generation: TextGeneration, parser: ReplyParser | None) -> float:
    """Puts an answer into the response, where it stays: copying it at its end could hold up others. Returns the log
    probability of its tokens together, if pods report theirs."""
    text, reasoning, score = [], [], 0.0
    async for delta in generation:
        gained = _gained(delta, parser)
        text.append(gained.text)
        reasoning.append(gained.reasoning)
        choice.tool_calls.extend(gained.tool_calls)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        score += log_probability(delta)
        choice.finish_reason = finish_reason_to_pb(_reason(delta, parser))
        _set_stop_reason(choice, delta)
    of_prompt = generation.generation.prompt_logprobs
    for start in range(0, len(of_prompt), _AT_ONCE):
        await others_turn(tenant_of_call())
        choice.prompt_logprobs.extend(of_prompt[start : start + _AT_ONCE])
    choice.text, choice.reasoning = "".join(text), "".join(reasoning)
    return score


def _chunk(job: _Job, index: int, delta: TextDelta) -> inference_pb2.GenerateChunk:
    generation, ids = job.generations[index], job.event_ids
    ended = delta.finish_reason is not None
    parser = job.parsers[index]
    gained = _gained(delta, parser)
    chunk = inference_pb2.GenerateChunk(
        request_id=job.request_id,
        index=index,
        text=gained.text,
        token_ids=delta.token_ids,
        start_index=delta.start_index,
        logprobs=delta.logprobs,
        finish_reason=finish_reason_to_pb(_reason(delta, parser)),
        usage=_usage(job, index) if ended else None,
        event_id="" if ids is None else ids.advance_id(index, delta.token_ids, ended=ended).decode(),
        prompt_logprobs=generation.generation.prompt_logprobs if delta.start_index == 0 else (),
        reasoning=gained.reasoning,
        tool_calls=gained.tool_calls,
    )
    _set_stop_reason(chunk, delta)
    return chunk


def _gained(delta: TextDelta, parser: ReplyParser | None) -> _Gained:
    if parser is None:
        return _Gained(delta.text)
    parts = parser.take(delta)
    return _Gained(
        "".join([part.text for part in parts if isinstance(part, Text)]),
        "".join([part.text for part in parts if isinstance(part, Reasoning)]),
        [_call(part) for part in parts if isinstance(part, Call)],
    )


def _reason(delta: TextDelta, parser: ReplyParser | None) -> FinishReason | None:
    """Why the answer ended, once the parser has taken the delta."""
    return delta.finish_reason if parser is None else parser.finish_reason(delta.finish_reason)


def _call(call: Call) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments, index=call.number)


def _set_stop_reason(message: inference_pb2.Choice | inference_pb2.GenerateChunk, delta: TextDelta) -> None:
    if isinstance(delta.stop_reason, str):
        message.stop_text = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason


def _usage(job: _Job, index: int | None = None) -> inference_pb2.Usage:
    """Returns the token counts of this choice, by default of all. The prompt counts once."""
    counted = slice(None) if index is None else slice(index, index + 1)
    generations = job.generations[counted]
    reasoning = [each.num_reasoning_tokens for each in job.parsers[counted] if each is not None]
    num_reasoning = [num for num in reasoning if num is not None]
    num_verified, num_accepted = SpeculationCounts.sum(each.generation.speculation for each in generations)
    return inference_pb2.Usage(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=sum(each.num_tokens for each in generations),
        cached_tokens=min(job.num_prompt_tokens, sum(each.generation.num_cached_tokens for each in generations)),
        reasoning_tokens=sum(num_reasoning) if num_reasoning else None,
        accepted_prediction_tokens=num_accepted if num_verified else None,
        rejected_prediction_tokens=num_verified - num_accepted if num_verified else None,
    )
