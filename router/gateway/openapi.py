"""The API's description, written from the structs that parse requests and those that answers look like."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import ErrorCode
from common.observability.tracing.context import TRACEPARENT, TRACESTATE
from router.gateway.answering.resume import RESUMABLE_HEADER
from router.gateway.anthropic.answers import AnthropicMessage
from router.gateway.anthropic.bodies import CountBody, MessagesBody
from router.gateway.anthropic.count_tokens import CountedTokens
from router.gateway.openai import answers
from router.gateway.openai.chat_bodies import ChatBody
from router.gateway.openai.completion_bodies import CompletionBody
from router.gateway.openai.token_bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from router.gateway.operators.adapters import LoadAdapterBody, UnloadAdapterBody
from router.gateway.operators.administration import (
    POD_PATH,
    RESET_PATH,
    STEP_TIMES_PATH,
    Drained,
    PrefixCachesReset,
    StepTimesOfModels,
    Undrained,
)
from router.gateway.operators.cluster import CLUSTER_PATH
from router.gateway.operators.timelines import REQUESTS_PATH, RequestList
from router.gateway.pooling import answers as pooling_answers
from router.gateway.pooling.bodies import AnyBody, ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from router.gateway.pooling.endpoints import POOLING_PATHS
from router.gateway.responses.answers import Response
from router.gateway.responses.bodies import ResponsesBody
from router.gateway.status import Health, Liveness, Load, Version
from router.requests.ids import REQUEST_ID_HEADER
from router.requests.terms import ITL_HEADER, SESSION_HEADER, TIMEOUT_HEADER, TTFT_HEADER
from router.security.access import KEY_HEADER
from router.security.http_guard import LOAD_PATH, UNLOAD_PATH
from router.serving.cluster_view import ClusterView
from router.timelines.views import RequestTimeline
from router.wire.errors import ANTHROPIC, MESSAGES_PATH, AnthropicErrorBody, ErrorBody, dialect_of

_JSON = "application/json"
_EVENTS = "text/event-stream"
_DONE = "[DONE]"  # the last event
_REFS = "#/components/schemas/{name}"

_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    CompletionBody,
    ChatBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
    MessagesBody,
    CountBody,
    ResponsesBody,
    EmbeddingBody,
    ClassifyBody,
    ScoreBody,
    RerankBody,
    PoolingBody,
    ErrorBody,
    AnthropicErrorBody,
    AnthropicMessage,
    CountedTokens,
    Response,
    answers.Completion,
    answers.CompletionChunk,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.RouteList,
    LoadAdapterBody,
    UnloadAdapterBody,
    answers.Tokenized,
    answers.Detokenized,
    pooling_answers.EmbeddingList,
    pooling_answers.ClassifiedList,
    pooling_answers.ScoreList,
    pooling_answers.Ranking,
    pooling_answers.PooledList,
    answers.ModelList,
    answers.ModelCard,
    Health,
    Load,
    Drained,
    Undrained,
    StepTimesOfModels,
    PrefixCachesReset,
    ClusterView,
    RequestList,
    RequestTimeline,
    Liveness,
    Version,
)

_ERRORS = {
    ErrorCode.INVALID_ARGUMENT: "The request is malformed or a value is out of range; `param` names the field.",
    ErrorCode.UNAUTHENTICATED: "The API key is missing or invalid.",
    ErrorCode.PERMISSION_DENIED: "The API key is not an operator's.",
    ErrorCode.NOT_FOUND: "The model or pod does not exist.",
    ErrorCode.CONFLICT: "The name is taken, or pods find different weights.",
    ErrorCode.TOO_LARGE: "The body exceeds the router's size limit.",
    ErrorCode.RESOURCE_EXHAUSTED: "The router is overloaded, or a limit of this key is reached.",
    ErrorCode.UNAVAILABLE: "No pod can serve the request now or, without Retry-After, meet its latency limit.",
    ErrorCode.DEADLINE_EXCEEDED: "The request did not arrive or finish in time.",
    ErrorCode.INTERNAL: "Internal error of the router or a pod; see the router's log.",
}
_GENERATION_ERRORS = tuple(code for code in _ERRORS if code is not ErrorCode.CONFLICT)
_POOLED: dict[type[AnyBody], tuple[str, type[msgspec.Struct]]] = {
    EmbeddingBody: ("An embedding of each input.", pooling_answers.EmbeddingList),
    ClassifyBody: ("The probabilities of a classifier's labels for each input.", pooling_answers.ClassifiedList),
    ScoreBody: ("How well the texts of each pair fit.", pooling_answers.ScoreList),
    RerankBody: ("The documents by how well they fit the query.", pooling_answers.Ranking),
    PoolingBody: ("The numbers of each input, or of each of its tokens.", pooling_answers.PooledList),
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until a retry.", "schema": {"type": "integer", "minimum": 0}}}
_SHOULD_RETRY = {
    "x-should-retry": {
        "description": "Sent instead of Retry-After when a retry cannot help.",
        "schema": {"type": "string", "const": "false"},
    }
}
_ERROR_HEADERS: dict[ErrorCode, dict[str, Any]] = {
    ErrorCode.UNAUTHENTICATED: {"WWW-Authenticate": {"description": "Expected scheme.", "schema": {"type": "string"}}},
    ErrorCode.RESOURCE_EXHAUSTED: _RETRY_AFTER,
    ErrorCode.UNAVAILABLE: {**_RETRY_AFTER, **_SHOULD_RETRY},
}


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_REQUEST_ID = {
    REQUEST_ID_HEADER: {"description": "Id of the request in the router's log.", "schema": {"type": "string"}}
}
_REQUEST_ID_PARAMETER = _header(
    REQUEST_ID_HEADER, "Id of the request unless the body has a `request_id`.", {"type": "string"}
)


def describe(document: dict[str, Any], *, needs_key: bool, open_paths: frozenset[str]) -> None:
    """Write paths and components into an OpenAPI document. `needs_key`: but for `open_paths`."""
    document["components"] = {"schemas": _schemas()}
    document["paths"] = _paths()
    for path, item in document["paths"].items():
        if dialect_of(path) is ANTHROPIC:
            _with_errors_of_anthropic(item["post"])
    for operation, path in ((each, path) for path, item in document["paths"].items() for each in item.values()):
        if path in open_paths or not needs_key:
            for status in ("401", "403"):
                operation["responses"].pop(status, None)
            operation["security"] = []
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
        }
        document["security"] = [{"bearer": []}, {"key": []}]


def _paths() -> dict[str, Any]:
    explained = _generation("Where the request would go, and why. Nothing is generated.", [CompletionBody, ChatBody])
    explained["responses"]["200"]["content"] = _json(answers.RouteList)
    explained["parameters"] = header_parameters(resumes=False)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    limit = {
        "name": "limit",
        "in": "query",
        "description": "Most requests in the answer; default 100.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999999},
    }
    tenant = {
        "name": "tenant",
        "in": "query",
        "description": "Only requests of this tenant. For operators; others see their own, whatever it says.",
        "schema": {"type": "string"},
    }
    unauthenticated = (ErrorCode.UNAUTHENTICATED,)
    return {
        "/v1/completions": {"post": _answered_generation(CompletionBody, answers.Completion, answers.CompletionChunk)},
        "/v1/chat/completions": {"post": _answered_generation(ChatBody, answers.ChatCompletion, answers.ChatChunk)},
        MESSAGES_PATH: {"post": _typed_generation(MessagesBody, AnthropicMessage)},
        f"{MESSAGES_PATH}/count_tokens": {"post": _tokens("Tokens of a prompt.", [CountBody], CountedTokens)},
        "/v1/responses": {"post": _typed_generation(ResponsesBody, Response)},
        "/v1/route/explain": {"post": explained, "get": explained},
        "/tokenize": {
            "post": _tokens("Token ids of a prompt.", [TokenizeTextBody, TokenizeChatBody], answers.Tokenized)
        },
        "/detokenize": {"post": _tokens("Text of token ids.", [DetokenizeBody], answers.Detokenized)},
        **{path: {"post": _pooled(kind)} for path, kind in POOLING_PATHS.items()},
        "/v1/models": {"get": _page("The names of the served models.", _json(answers.ModelList), unauthenticated)},
        "/v1/models/{name}": {
            "get": {
                **_page("One model.", _json(answers.ModelCard), (*unauthenticated, ErrorCode.NOT_FOUND)),
                "parameters": [name],
            }
        },
        "/health": {"get": _readiness(_json(Health))},
        "/readyz": {"get": _readiness(_json(Health))},
        "/livez": {"get": _page("The router runs, with or without pods.", _json(Liveness), ())},
        "/ping": {"get": _readiness({}), "post": _readiness({})},
        "/metrics": {
            "get": _page(
                "Prometheus metrics.",
                {"text/plain": {"schema": {"type": "string"}}},
                (*unauthenticated, ErrorCode.PERMISSION_DENIED),
            )
        },
        "/version": {"get": _page("Version of Baton, and the port of its gRPC API.", _json(Version), ())},
        "/load": {"get": _operators("Generations under way.", Load)},
        "/v1/load": {"get": _operators("Generations under way.", Load)},
        f"{POD_PATH}/drain": {"post": _of_pod("The pod takes no new requests; running ones finish.", Drained)},
        f"{POD_PATH}/undrain": {"post": _of_pod("The pod takes requests again.", Undrained)},
        STEP_TIMES_PATH: {"get": _operators("Learned step times of the pods.", StepTimesOfModels)},
        CLUSTER_PATH: {"get": _operators("Pods, their load, and handoffs between them.", ClusterView)},
        REQUESTS_PATH: {
            "get": {
                **_page(
                    "The last requests, the newest first.",
                    _json(RequestList),
                    (*unauthenticated, ErrorCode.INVALID_ARGUMENT),
                ),
                "parameters": [limit, tenant],
            }
        },
        f"{REQUESTS_PATH}/{{request_id}}": {
            "get": {
                **_page(
                    "Where the time of one request went.",
                    _json(RequestTimeline),
                    (*unauthenticated, ErrorCode.NOT_FOUND),
                ),
                "parameters": [{**name, "name": "request_id"}, tenant],
            }
        },
        LOAD_PATH: {"post": _of_adapter("All pods have loaded the adapter.", LoadAdapterBody)},
        UNLOAD_PATH: {"post": _of_adapter("The adapter gets no new requests.", UnloadAdapterBody)},
        RESET_PATH: {
            "post": _operators(
                "All pods have emptied their prefix caches.",
                PrefixCachesReset,
                ErrorCode.UNAVAILABLE,
            )
        },
    }


def _operators(description: str, answer: type[msgspec.Struct], *errors: ErrorCode) -> dict[str, Any]:
    return _page(description, _json(answer), (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED, *errors))


def _of_pod(description: str, answer: type[msgspec.Struct]) -> dict[str, Any]:
    operation = _operators(description, answer, ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)
    address = {"name": "address", "in": "path", "required": True, "description": "host:port of the pod."}
    operation["parameters"] = [{**address, "schema": {"type": "string"}}]
    return operation


def _of_adapter(description: str, body: type[msgspec.Struct]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "requestBody": {"required": True, "content": _json(body)},
        **_page(description, content, tuple(_ERRORS)),
    }


def _tokens(description: str, bodies: list[type[msgspec.Struct]], answer: type[msgspec.Struct]) -> dict[str, Any]:
    operation = _generation(description, bodies)
    operation["responses"]["200"]["content"] = _json(answer)
    operation["parameters"] = [_REQUEST_ID_PARAMETER]
    return operation


def _pooled(body: type[AnyBody]) -> dict[str, Any]:
    description, answer = _POOLED[body]
    operation = _generation(description, [body])
    operation["responses"]["200"]["content"] = _json(answer)
    operation["parameters"] = [
        parameter
        for parameter in header_parameters(resumes=False)
        if parameter["name"] not in (TTFT_HEADER, ITL_HEADER)
    ]
    return operation


def _readiness(content: dict[str, Any]) -> dict[str, Any]:
    why = "; `reason` says why" if content else ""
    return {
        "responses": {
            "200": {"description": "A request can be served.", "content": content},
            "503": {"description": f"None can{why}.", "content": content},
        }
    }


def _answered_generation(
    body: type[msgspec.Struct], answer: type[msgspec.Struct], chunk: type[msgspec.Struct]
) -> dict[str, Any]:
    operation = _generation("The answer; events if `stream` is true; a route if `dry_run` is.", [body])
    operation["parameters"] = header_parameters(resumes=True)
    operation["responses"]["200"]["content"] = {
        _JSON: {"schema": {"anyOf": [_ref(answer), _ref(answers.RouteList)]}},
        _EVENTS: {"schema": _event(chunk)},
    }
    return operation


def _typed_generation(body: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Describes a generation of an API whose events have types."""
    operation = _generation("The answer; events if `stream` is true.", [body])
    operation["parameters"] = header_parameters(resumes=False)
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    operation["responses"]["200"]["content"] = {**_json(answer), _EVENTS: {"schema": event}}
    return operation


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """Describes each event; OpenAPI 3.1 has no word for the stream as a whole."""
    chunk_as_json = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [_ref(chunk), _ref(ErrorBody)]}}
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": f"Only on request, see {RESUMABLE_HEADER}."},
            "data": {"type": "string", "anyOf": [{"const": _DONE}, chunk_as_json]},
        },
        "required": ["data"],
    }


def _generation(description: str, bodies: list[type[msgspec.Struct]]) -> dict[str, Any]:
    schema = _ref(bodies[0]) if len(bodies) == 1 else {"anyOf": [_ref(body) for body in bodies]}
    responses: dict[str, Any] = {"200": {"description": description}, **_errors(_GENERATION_ERRORS)}
    for response in responses.values():
        response["headers"] = {**response.get("headers", {}), **_REQUEST_ID}
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": schema}}}, "responses": responses}


def _with_errors_of_anthropic(operation: dict[str, Any]) -> None:
    for status, response in operation["responses"].items():
        if status != "200":
            response["content"] = _json(AnthropicErrorBody)


def _page(description: str, content: dict[str, Any], errors: tuple[ErrorCode, ...]) -> dict[str, Any]:
    return {"responses": {"200": {"description": description, "content": content}, **_errors(errors)}}


def _errors(codes: tuple[ErrorCode, ...]) -> dict[str, Any]:
    return {
        str(code.value.http_status): {
            "description": _ERRORS[code],
            "headers": _ERROR_HEADERS.get(code, {}),
            "content": _json(ErrorBody),
        }
        for code in codes
    }


def header_parameters(*, resumes: bool) -> list[dict[str, Any]]:
    """Headers that say more of a request; `resumes`: those of streams included."""
    milliseconds = {"type": "number", "exclusiveMinimum": 0}
    parameters = [
        _REQUEST_ID_PARAMETER,
        _header(TIMEOUT_HEADER, "Milliseconds until the request is ended as overdue.", milliseconds),
        _header(TTFT_HEADER, "Milliseconds until the first token.", milliseconds),
        _header(ITL_HEADER, "Milliseconds between two tokens.", milliseconds),
        _header(SESSION_HEADER, "Requests of one session may go to the same pods.", {"type": "string"}),
        _header(TRACEPARENT, "W3C trace context: the trace that the request belongs to.", {"type": "string"}),
        _header(TRACESTATE, "What other tracing systems pass on.", {"type": "string"}),
    ]
    if resumes:
        parameters.append(_header(RESUMABLE_HEADER, "1: events of a stream have ids.", {"enum": ["0", "1"]}))
        text = "Id of the last event that came of a stream that broke; the rest of the same request follows."
        parameters.append(_header("Last-Event-ID", text, {"type": "string"}))
    return parameters


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {_JSON: {"schema": _ref(struct)}}


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFS.format(name=struct.__name__)}


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REFS)
    return dict(components)
