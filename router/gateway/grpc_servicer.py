"""The public gRPC front: baton.v1.Inference."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from common.errors import DeadlineExceededError, InvalidRequestError
from common.pb import common_pb2, inference_pb2, inference_pb2_grpc
from common.rpc.convert import finish_reason_to_pb, parameters_from_pb
from common.rpc.errors import rpc_errors
from common.types import SamplingParams
from common.types.parameters import parameters_of
from common.types.validation import check_num_entries
from router.dispatching.text_generation import TextDelta, TextGeneration
from router.requests.bounds import MAX_MESSAGES, MAX_STOPS
from router.requests.request import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from router.requests.terms import QUEUED_HEADER, Terms, read_terms
from router.security.access import AccessControl
from router.security.grpc_guard import tenant_of_call
from router.service import InferenceService

_LAST_CHUNK_S = 10.0  # seconds after a request's deadline until its client must have read the end

_COLLECTIONS = [
    field
    for field in parameters_of(SamplingParams).values()
    if field.parameter.max_entries is not None and field.parameter.option_tag is not None
]

_Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
_StreamContext = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateChunk]

_KV_FAILURE_POLICIES: dict[int, str | None] = {
    common_pb2.KV_FAILURE_POLICY_UNSPECIFIED: None,
    common_pb2.KV_FAILURE_POLICY_RECOMPUTE: "recompute",
    common_pb2.KV_FAILURE_POLICY_FAIL: "fail",
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves what the HTTP front serves, in messages."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        """Its calls come through an ApiKeyInterceptor."""
        self._service = service
        self._access = access

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """A whole answer."""
        response = inference_pb2.GenerateResponse()
        async with self._errors(context), self._run(request, context) as generation:
            response.request_id = generation.generation.request.request_id
            text = []
            async for delta in generation:
                text.append(delta.text)
                response.token_ids.extend(delta.token_ids)
                response.logprobs.extend(delta.logprobs)
                response.finish_reason = finish_reason_to_pb(delta.finish_reason)
                _set_stop_reason(response, delta)
            response.prompt_logprobs.extend(generation.generation.prompt_logprobs)
            response.text = "".join(text)
            response.usage.CopyFrom(_usage(generation))
        return response

    async def GenerateStream(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self, request: inference_pb2.GenerateRequest, context: _StreamContext
    ) -> None:
        """An answer piece by piece."""
        async with self._errors(context), self._run(request, context) as generation:
            due = generation.generation.request.deadline + _LAST_CHUNK_S
            try:
                async with asyncio.timeout(due - time.monotonic()):
                    async for delta in generation:
                        await context.write(_chunk(generation, delta))
            except TimeoutError as error:
                raise DeadlineExceededError("the client stopped reading its answer") from error

    async def Abort(  # noqa: N802
        self,
        request: inference_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[inference_pb2.AbortRequest, inference_pb2.AbortResponse],
    ) -> inference_pb2.AbortResponse:
        """End a generation by its id."""
        return inference_pb2.AbortResponse(found=self._service.abort(request.request_id, tenant_of_call()))

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse],
    ) -> inference_pb2.ListModelsResponse:
        """The served model."""
        card = inference_pb2.ModelCard(name=self._service.model_name, max_model_len=self._service.cluster.max_model_len)
        return inference_pb2.ListModelsResponse(models=[card])

    @asynccontextmanager
    async def _errors(self, context: _Context | _StreamContext) -> AsyncIterator[None]:
        """Errors become statuses, and are counted."""
        async with rpc_errors(context), self._service.counted_errors():
            yield

    @asynccontextmanager
    async def _run(
        self, message: inference_pb2.GenerateRequest, context: _Context | _StreamContext
    ) -> AsyncIterator[TextGeneration]:
        terms = _terms(context)
        account = self._access.account(terms.tenant)
        with account.admit(1):
            request = await self._service.prepare(replace(_draft(message), terms=terms))
            account.spend(len(request.prompt_token_ids))
            self._service.count_prompts([request])
            async with self._service.run([request]) as run:
                await context.send_initial_metadata(((QUEUED_HEADER, f"{run.queued_s * 1000:.0f}"),))
                with account.spending(run.generations):
                    yield run.generations[0]


def _draft(message: inference_pb2.GenerateRequest) -> Draft:
    """Raises InvalidRequestError if there is no prompt, or a list is too long to be looked at."""
    options = message.options
    _check_length(options.stop, MAX_STOPS, "stop")
    _check_length(message.chat.messages, MAX_MESSAGES, "chat")
    for field in _COLLECTIONS:
        check_num_entries(field, getattr(options, field.name), field.name)
    given = parameters_from_pb(options)  # zeros that were set included
    stops = tuple(given.pop("stop", ()))
    prompt, param = _prompt(message)
    return Draft(
        request_id=message.request_id or f"gen-{uuid.uuid4().hex}",
        model=message.model or None,
        prompt=prompt,
        prompt_param=param,
        max_tokens=given.pop("max_tokens", None),
        default_max_tokens=None,
        seed=given.pop("seed", None),
        sampling=given,  # of what is left
        stops=stops,
        cache_salt=message.cache_salt,
        priority=message.priority,
        kv_failure_policy=_kv_failure_policy(message.kv_failure_policy),
        arrived_at=time.monotonic(),
    )


def _terms(context: _Context | _StreamContext) -> Terms:
    """As HTTP clients say them in headers of the same names."""
    metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
    return read_terms(lambda name: metadata.get(name, ""), tenant_of_call())


def _kv_failure_policy(number: int) -> str | None:
    """What HTTP clients would write; a number from the future as it is, to be refused by name."""
    return _KV_FAILURE_POLICIES.get(number, str(number))


def _check_length(items: Sized, limit: int, name: str) -> None:
    if len(items) > limit:
        raise InvalidRequestError(f"{name} must have at most {limit} entries, got {len(items)}", param=name)


def _prompt(message: inference_pb2.GenerateRequest) -> tuple[Prompt, str]:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text), "text"
        case "tokens":
            return TokenPrompt(list(message.tokens.token_ids)), "tokens"
        case "chat" if message.chat.messages:
            messages = [{"role": each.role, "content": each.content} for each in message.chat.messages]
            return ChatPrompt(messages, num_chars=sum(len(each["content"]) for each in messages)), "chat"
        case "chat":
            raise InvalidRequestError("chat has no messages", param="chat")
        case _:
            raise InvalidRequestError("a prompt is required: one of text, tokens, chat", param="prompt")


def _chunk(generation: TextGeneration, delta: TextDelta) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        request_id=generation.generation.request.request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        start_index=delta.start_index,
        logprobs=delta.logprobs,
        finish_reason=finish_reason_to_pb(delta.finish_reason),
        usage=_usage(generation) if delta.finish_reason is not None else None,
        prompt_logprobs=generation.generation.prompt_logprobs if delta.start_index == 0 else (),
    )
    _set_stop_reason(chunk, delta)
    return chunk


def _set_stop_reason(message: inference_pb2.GenerateResponse | inference_pb2.GenerateChunk, delta: TextDelta) -> None:
    if isinstance(delta.stop_reason, str):
        message.stop_text = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason


def _usage(generation: TextGeneration) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=len(generation.generation.request.prompt_token_ids),
        completion_tokens=generation.num_tokens,
        cached_tokens=generation.generation.num_cached_tokens,
    )
