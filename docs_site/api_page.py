"""Writes docs/api.md from what declares the fields of requests: `make api-docs`, or this as a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import msgspec.inspect as mi

from common.types import SamplingParams
from common.types.parameters import ARGUMENTS, BIASES, TEXTS, TOKEN_IDS, ParameterField, parameters_of
from router.gateway.anthropic.bodies import MessagesBody
from router.gateway.bodies.fields import (
    IGNORED_BY_BOTH,
    IGNORED_BY_CHATS,
    IGNORED_BY_MESSAGES,
    IGNORED_BY_RESPONSES,
    REFUSED_BY_BOTH,
    REFUSED_BY_CHATS,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_MESSAGES,
    REFUSED_BY_RESPONSES,
    REFUSED_BY_TOKENIZED_CHATS,
    Ignored,
    Refused,
)
from router.gateway.bodies.messages import Message
from router.gateway.bodies.stream_options import StreamOptions
from router.gateway.openai.chat_bodies import ChatBody
from router.gateway.openai.completion_bodies import CompletionBody
from router.gateway.openai.token_bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from router.gateway.openapi import header_parameters
from router.gateway.pooling.bodies import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from router.gateway.responses.bodies import ResponsesBody

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"

_INTRODUCTION = """\
# The API

Written by `make api-docs` from the code; a test holds it to that.

`POST /v1/completions` and `POST /v1/chat/completions` take the requests of clients of OpenAI, vLLM and SGLang. Every
field that these know is honoured, accepted without effect, or refused by name with 400 and the reason. A refused field
may come with a value that asks for nothing, such as `null`, which some clients send for all that they know. A field
that is in none of the tables is refused, with the name that was probably meant. `null` is the same as to leave a field
out.

A request's sampling parameters win over `--override-generation-config`, that over the model's `generation_config.json`,
and that over the defaults below. `--generation-config none` ignores the file, and a directory names another one.
`max_new_tokens` of these is the default of `max_tokens`. Set by the operator, it is also the most that a request gets.

The gRPC API ([inference.proto](../proto/baton/v1/inference.proto)) has the sampling parameters under the same names.
"""

_ENDPOINTS = """\
| endpoint | |
| --- | --- |
| `POST /v1/completions`, `POST /v1/chat/completions` | OpenAI's, streamed or not; most of this page is about them |
| `POST /v1/messages` | [Anthropic's Messages](#anthropics-messages) |
| `POST /v1/responses` | [OpenAI's Responses](#openais-responses); nothing is stored |
| `POST /tokenize`, `POST /detokenize` | [token ids of a text or a chat, and back](#tokens) |
| `POST /v1/embeddings`, `/v1/classify`, `/v1/score`, ... | [embeddings and the like](#embeddings-classes-and-scores) |
| `POST /v1/route/explain` | [where a request would go](routing.md#why-did-it-go-there), as with `"dry_run": true` |
| `GET /v1/models` | the served models, under all their names, and their [adapters](adapters.md) |
| `GET /version` | the version of Baton, and the port of the gRPC API |
| `GET /readyz`, `/health`, `/ping`, `/livez`; `POST /ping` | [probes](discovery.md#probes-of-the-router) |
| `GET /metrics` | [metrics](metrics.md) for Prometheus |
| `GET /` | [the web page](page.md): a playground, the cluster live, the last requests |
| `GET /openapi.json`, `GET /docs` | all of these as an OpenAPI document, and as a page that works offline |
| `POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter` | for operators: [LoRA adapters](adapters.md) |
| `GET /load`, `POST /admin/pods/...`, `POST /reset_prefix_cache` | [for operators](#operation) |
"""

_STREAMS = """\
Each event is one line `data: {...}` and an empty line, the last one `data: [DONE]`. An error within a stream is an
event with OpenAI's error object, before `[DONE]`. Event ids are for
[resuming a stream](survival.md#resuming-a-stream). `stream_options` is refused without `stream`.
"""

_REQUEST_IDS = """\
A request's id is the `request_id` of its body, else its `x-request-id`, else a random one. It is the `id` of the
answer, as it was named, and a header `x-request-id` of every response of the endpoints that take a JSON body, errors
included. Lines of the router's log about the request begin with it, and those of pods name it, with suffixes. An id
is 1 to 128 letters, digits, dots, dashes, colons or underscores. An `x-request-id` that another running request of
the same client has, such as one that a service passes on with several requests, gets a suffix; the same `request_id`
is a 400. A resumed stream keeps its id. A response to what the HTTP server itself refuses, such as a malformed
request line, has none.

HTTP/1.0 is answered, too: without chunks, so that the connection ends with the answer. A request of HTTP/1.0 must have
a `Content-Length`; with `Transfer-Encoding` it is a 400.
"""

_BEAMS = """\
`use_beam_search` answers with the `n` best of `best_of` beams (default: `n`), the same that `transformers` finds with
`num_beams`, `length_penalty` and `early_stopping`. There are at most 16 beams, and at most 20 beams and tokens that end
an answer together. Sampling parameters such as `temperature` have no effect. Penalties, biases, masks, `stop`, `echo`,
log probabilities, structured output, tools, logits processors and streams are refused with it. Each token costs a
request of one token for each beam, of which the prefix cache has all but the last block, so a search takes far longer
than an answer. Over gRPC it is `use_beam_search`, `length_penalty` and `early_stopping` of a `GenerateRequest`.
"""

_BEST_OF = """\
`best_of` generates more answers than the `n` that it returns: those whose tokens together have the highest log
probability, as the model computed it, so that short answers are favoured. (OpenAI's documentation ranks by log
probability per token, vLLM did as Baton does.) All generated tokens count in `usage` and quotas, and all answers in the
limits of `n`. They share the prompt's blocks. It is refused with `stream`. Over gRPC it is `GenerateRequest.best_of`.
"""

_PROCESSORS = """\
Pods load code that changes logits: `--logits-processors` of pods names entry points of the group
`baton.logits_processors`, in the order in which they work; by default there are none. The interface is in
[processors.py](../common/engine/sampling/processors.py). All pods of a cluster must load the same. A processor says
from a request's parameters whether it applies to it; `vllm_xargs` are for its arguments, and are refused where no
processor is loaded. If one raises, the requests that it works for end with an error, and others go on.

```toml
[project.entry-points."baton.logits_processors"]
no_digits = "my_package:NoDigits"
```
"""

_MESSAGES = """\
All of these reach the model's chat template; other fields of messages are dropped. Where the template loops over the
parts of a content, it gets parts; else texts are joined by line feeds. The arguments of `tool_calls` are objects to the
template, and `reasoning` is also `reasoning_content`, and the other way round.
"""


_TOKENS = """\
`POST /tokenize` takes a text or a chat, and answers with `count`, `max_model_len`, `tokens` and `token_strs`, which is
null unless `return_token_strs` is true. `POST /detokenize` answers with `prompt`, the text of `tokens` with special
tokens. Both are vLLM's, and have the keys, quotas and bounds of generations: a call counts as a request, and its tokens
as a prompt's. A prompt longer than the model's context is a 400, and so is a token id outside the vocabulary. While no
decode pod is ready, the context is not known, and the answer is a 503. Of a chat, these are refused as by
`/v1/chat/completions`: {refused}.
"""


_POOLING = """\
[embeddings.md](embeddings.md) is the page of these. `/v1/embeddings` is OpenAI's, the others are vLLM's, and
`/v1/rerank` is that of Jina and Cohere as well. `/classify`, `/score`, `/rerank` and `/v2/rerank` are the same as those
with `/v1`. A field that is not in the table is refused.
"""

_OPERATION = """\
These are for [operators' keys](security.md#api-keys) where there are keys. Without keys all clients may use them, but
no web page. baton.v1.Admin ([admin.proto](../proto/baton/v1/admin.proto)) is the same on gRPC. `ADDRESS` is a pod's
host:port as `/health` has it; another is a 404. A pod that does not answer within 5 s is a 504.
"""

_OPERATION_ROWS = (
    (
        "`GET /load`, `GET /v1/load`",
        (
            "`server_load`: generations under way in this router, waiting ones included. vLLM's counts HTTP requests, "
            "of which one may have several."
        ),
    ),
    (
        "`POST /admin/pods/ADDRESS/drain`",
        (
            "The pod takes no new requests of any router; running ones finish, or go on elsewhere with "
            "`migrate_on_drain_s`. Answers at once; `num_unfinished` is what still runs on it. May be called again."
        ),
    ),
    ("`POST /admin/pods/ADDRESS/undrain`", "The pod takes requests again. 503 if it shuts down."),
    (
        "`GET /admin/step_times`",
        (
            "The step times that this router has learned of each model's prefill and decode pods, from which "
            "[`baton plan`](sizing.md) can plan. HTTP only."
        ),
    ),
    (
        "`GET /v1/cluster`",
        (
            "The pods with state and load, what waits in the router, and handoffs between pods. Counters are from the "
            "pods' start; `at_s` is the router's clock, for rates. [The page](page.md) asks every second. HTTP only."
        ),
    ),
    (
        "`GET /v1/requests`, `GET /v1/requests/ID`",
        (
            "The last requests, and where the time of one went: [Why was this request slow](observability.md"
            "#why-was-this-request-slow). Not for operators only: any key sees its own requests, without pods' "
            "addresses. `limit` of the first is the most that it answers with; `tenant`, for operators, leaves out the "
            "requests of others. HTTP only."
        ),
    ),
    (
        "`POST /v1/load_lora_adapter`",
        (
            "All ready pods of a model load a [LoRA adapter](adapters.md), which requests then name as `model`. "
            "`lora_name`; `lora_path`, a directory as the pods see it or a hub id; `load_inplace`: the name may be "
            "taken; `base_model_name`, where the router serves several models. 400 for one that cannot be used, 409 "
            "for a name that has other weights and for pods that find different ones, 429 if the pods have too many."
        ),
    ),
    (
        "`POST /v1/unload_lora_adapter`",
        (
            "No new requests get the adapter `lora_name`; running ones finish. 404 if there is none; 409 if it is in "
            "the pods' settings."
        ),
    ),
    (
        "`POST /reset_prefix_cache`",
        (
            "All pods empty their prefix caches, but for blocks that requests use, and forget what they have learnt of "
            "answers [to propose drafts](speculation.md). Tiers and stores keep theirs; `baton kv purge` empties a "
            "store. 503 names pods that could not be reset, such as those that are down; the others were. May be "
            "called again."
        ),
    ),
)
_MESSAGES_API = """\
`POST /v1/messages` takes the requests of Anthropic's clients, and `POST /v1/messages/count_tokens` says how many tokens
such a prompt has. Both become chats, with the same limits, quotas and [tools](tools.md); errors have Anthropic's form.
Blocks of a message are `text`, `tool_use`, `tool_result` and `thinking`; `redacted_thinking` is dropped, and others are
refused. Thinking blocks of answers have an empty signature. `input_tokens` does not count tokens that came from the
prefix cache, which are `cache_read_input_tokens`. The last message must be the user's. Streams
cannot be resumed: an event id counts tokens, and a token may bring several events, such as the end of one block, the
start of the next and its first delta. A connection that breaks between these leaves the client with events that no id
names.
Refused: {refused}.
"""


_RESPONSES_API = """\
`POST /v1/responses` takes those requests of OpenAI's Responses API that need no state at the server: `store` is without
effect, the answer says `store: false`, and nothing can be retrieved later. They become chats, with the same limits,
quotas and [tools](tools.md), which must be functions. Items of `input` are messages, `function_call`,
`function_call_output` and `reasoning`; others are refused, also `item_reference`. Reasoning in answers is text, never a
summary. Events have sequence numbers, from 0 on; streams cannot be resumed, as with Messages. Refused: {refused}.
"""


def page() -> str:
    """The whole page."""
    sections = [
        _INTRODUCTION,
        "## Endpoints\n",
        _ENDPOINTS,
        "## Sampling parameters\n",
        _table(("field", "type", "default", "what it does"), map(_parameter_row, _parameters())),
        "## Other fields that are honoured\n",
        _table(("field", "type", "of", "what it does"), _honoured_rows()),
        "### stream_options\n",
        _STREAMS,
        _table(("field", "type", "what it does"), _struct_rows(StreamOptions)),
        "### best_of\n",
        _BEST_OF,
        "### Beam search\n",
        _BEAMS,
        "### Logits processors\n",
        _PROCESSORS,
        "### messages\n",
        _MESSAGES,
        _table(("field", "type"), ((f"`{field.name}`", _type_of(field.type)) for field in _fields(Message))),
        "## Headers\n",
        _table(("header", "what it says"), _header_rows()),
        _REQUEST_IDS,
        "## Tokens\n",
        _TOKENS.format(refused=_names(REFUSED_BY_TOKENIZED_CHATS)),
        _table(("field", "type", "of", "what it does"), _token_rows()),
        "## Embeddings, classes and scores\n",
        _POOLING,
        _table(("field", "type", "of", "what it does"), _pooling_rows()),
        "## Operation\n",
        _OPERATION,
        _table(("endpoint", "what it does"), iter(_OPERATION_ROWS)),
        "## Anthropic's Messages\n",
        _MESSAGES_API.format(refused=_names(REFUSED_BY_MESSAGES)),
        _table(("field", "type", "what it does"), _struct_rows(MessagesBody)),
        "## OpenAI's Responses\n",
        _RESPONSES_API.format(refused=_names(REFUSED_BY_RESPONSES)),
        _table(("field", "type", "what it does"), _struct_rows(ResponsesBody)),
        "## Accepted without effect\n",
        _table(("field", "of", "why"), _ignored_rows()),
        "## Refused, unless they ask for nothing\n",
        _table(("field", "of", "accepted values", "why it is refused"), _refused_rows()),
    ]
    return "\n".join(sections)


def _parameters() -> list[ParameterField]:
    """Returns the parameters that clients give under these names."""
    return [
        field
        for field in parameters_of(SamplingParams).values()
        if field.parameter.option_tag is not None and field.name != "num_logprobs" and not field.is_struct
    ]


def _parameter_row(field: ParameterField) -> tuple[str, ...]:
    names = {
        float: "number",
        int: "integer",
        bool: "boolean",
        TOKEN_IDS: "list of integers",
        TEXTS: "list of strings",
        BIASES: "object of numbers",
        ARGUMENTS: "object",
    }
    kind = names[field.kind]
    allowed = field.parameter.allowed
    bounds = ""
    if allowed is not None:
        bounds = f", at least {allowed.low}" if allowed.high == float("inf") else f" in {allowed.interval}"
    if field.parameter.max_entries is not None:
        bounds += f", at most {field.parameter.max_entries}"
    if field.name == "max_tokens":
        default = "16; of chats what is left of the context"
    else:
        default = "" if field.default in (None, ()) else json.dumps(field.default)
    return f"`{field.name}`", kind + bounds, default, field.parameter.doc


def _honoured_rows() -> Iterator[tuple[str, ...]]:
    apis = {"completions": _described(CompletionBody), "chats": _described(ChatBody)}
    own = {field.name for field in _parameters()}
    for name in dict.fromkeys(name for fields in apis.values() for name in fields if name not in own):
        rows = {api: fields[name] for api, fields in apis.items() if name in fields}
        if len(rows) == len(apis) and len(set(rows.values())) == 1:
            rows = {"both": next(iter(rows.values()))}
        yield from ((f"`{name}`", kind, api, text) for api, (kind, text) in rows.items())


def _described(body: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Type and description of each field that has one; those of the tables in `fields` have none."""
    rows = {field.name: (_type_of(field.type), _description(field.type)) for field in _fields(body)}
    return {name: row for name, row in rows.items() if row[1]}


def _struct_rows(struct: type[msgspec.Struct]) -> Iterator[tuple[str, ...]]:
    for name, (kind, text) in _described(struct).items():
        yield f"`{name}`", kind, text


def _names(rows: tuple[Refused, ...]) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)


def _header_rows() -> Iterator[tuple[str, ...]]:
    for header in header_parameters(resumes=True):
        yield f"`{header['name']}`", header["description"]


def _token_rows() -> Iterator[tuple[str, ...]]:
    bodies: list[tuple[str, type[msgspec.Struct]]] = [
        ("a text", TokenizeTextBody),
        ("a chat", TokenizeChatBody),
        ("`/detokenize`", DetokenizeBody),
    ]
    for of, body in bodies:
        yield from ((f"`{name}`", kind, of, text) for name, (kind, text) in _described(body).items())


def _pooling_rows() -> Iterator[tuple[str, ...]]:
    bodies: dict[str, type[msgspec.Struct]] = {
        "embeddings": EmbeddingBody,
        "classify": ClassifyBody,
        "score": ScoreBody,
        "rerank": RerankBody,
        "pooling": PoolingBody,
    }
    by_row: dict[tuple[str, str, str], list[str]] = {}
    for of, body in bodies.items():
        for name, (kind, text) in _described(body).items():
            by_row.setdefault((name, kind, text), []).append(of)
    for (name, kind, text), of_all in by_row.items():
        yield f"`{name}`", kind, "all" if len(of_all) == len(bodies) else ", ".join(of_all), text


def _ignored_rows() -> Iterator[tuple[str, ...]]:
    groups: list[tuple[str, tuple[Ignored, ...]]] = [
        ("both", IGNORED_BY_BOTH),
        ("chats", IGNORED_BY_CHATS),
        ("Messages", IGNORED_BY_MESSAGES),
        ("Responses", IGNORED_BY_RESPONSES),
    ]
    for api, rows in groups:
        for row in rows:
            yield f"`{row.name}`", api, row.why


def _refused_rows() -> Iterator[tuple[str, ...]]:
    groups: list[tuple[str, tuple[Refused, ...]]] = [
        ("both", REFUSED_BY_BOTH),
        ("completions", REFUSED_BY_COMPLETIONS),
        ("chats", REFUSED_BY_CHATS),
        ("Messages", REFUSED_BY_MESSAGES),
        ("Responses", REFUSED_BY_RESPONSES),
    ]
    for api, rows in groups:
        for row in rows:
            idle = ", ".join(f"`{json.dumps(value)}`" for value in (None, *row.idle))
            yield f"`{row.name}`", api, idle, row.why


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _fields(struct: type[msgspec.Struct]) -> tuple[mi.Field, ...]:
    described = mi.type_info(struct)
    assert isinstance(described, mi.StructType)
    return described.fields


def _description(kind: mi.Type) -> str:
    return str((kind.extra_json_schema or {}).get("description", "")) if isinstance(kind, mi.Metadata) else ""


def _type_of(kind: mi.Type) -> str:
    """In the words of JSON."""
    match kind:
        case mi.Metadata(extra_json_schema={"type": "array"}):  # decoded later
            return "list of object"
        case mi.Metadata():
            return _type_of(kind.type)
        case mi.UnionType():
            return " or ".join(_type_of(each) for each in kind.types if not isinstance(each, mi.NoneType))
        case mi.ListType():
            return f"list of {_type_of(kind.item_type)}"
        case mi.IntType():
            return "integer"
        case mi.FloatType():
            return "number"
        case mi.StrType() | mi.LiteralType():
            return "string"
        case mi.BoolType():
            return "boolean"
        case _:
            return "object"


if __name__ == "__main__":
    PAGE.write_text(page())
