"""Fields of requests that Baton does not act on: those without effect, and those refused unless they ask for nothing.

A field of OpenAI's, vLLM's or SGLang's API is in one of four places, each time once: sampling parameters in
`common.types.generation`, what else is honoured in the bodies, the others here. docs/api.md is written
from all of them (`make api-docs`). null asks for nothing, whatever the field.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from common.errors import InvalidRequestError

_MAX_IDLE_BYTES = 64  # longest value that may ask for nothing, such as null or []


class Ignored(NamedTuple):
    """A field that may have any value of its type, which changes nothing."""

    name: str
    kind: Any
    why: str


class Refused(NamedTuple):
    """A field that may only have a value that asks for nothing."""

    name: str
    why: str
    idle: tuple[object, ...] = ()  # values that ask for nothing, beside null


_USE_STRUCTURED = "constrain answers with structured_outputs"
_NO_TRANSFER = "the router arranges transfers between pods itself"
_NO_ADAPTERS = "an adapter is named as model, once an operator has loaded it"
_ONLY_TEXT = "only text goes in and out"
_NO_TRACE = "answers have no such field"
_ONLY_STRINGS = "only texts in `stop` and ids in `stop_token_ids` end an answer"

REFUSED_BY_BOTH = (
    # OpenAI
    # vLLM
    Refused("watermarking", "answers are not watermarked", (False,)),
    Refused("truncation_side", "truncate_prompt_tokens keeps the end of the prompt", ("left",)),
    Refused("logprob_token_ids", "log probabilities are those of the most likely tokens", ([],)),
    Refused("guided_json", _USE_STRUCTURED),
    Refused("guided_regex", _USE_STRUCTURED, ("",)),
    Refused("guided_choice", _USE_STRUCTURED, ([],)),
    Refused("guided_grammar", _USE_STRUCTURED, ("",)),
    Refused("guided_decoding_backend", _USE_STRUCTURED, ("",)),
    Refused("guided_whitespace_pattern", _USE_STRUCTURED, ("",)),
    Refused("structural_tag", _USE_STRUCTURED, ("",)),
    Refused("logits_processors", "there are no custom logits processors", ([],)),
    Refused("return_tokens_as_token_ids", _NO_TRACE, (False,)),
    Refused("return_token_offsets", _NO_TRACE, (False,)),
    Refused("return_prompt_text", _NO_TRACE, (False,)),
    Refused("routed_experts_prompt_start", _NO_TRACE, (0,)),
    Refused("kv_transfer_params", _NO_TRANSFER, ({},)),
    Refused("ec_transfer_params", _NO_TRANSFER, ({},)),
    Refused("repetition_detection", "answers are not searched for repetition", ({},)),
    Refused("stream_interval", "a chunk is sent as soon as there is text", (1,)),
    # SGLang
    Refused("regex", _USE_STRUCTURED, ("",)),
    Refused("ebnf", _USE_STRUCTURED, ("",)),
    Refused("json_schema", _USE_STRUCTURED, ("",)),
    Refused("stop_regex", _ONLY_STRINGS, ("", [])),
    Refused("no_stop_trim", "include_stop_str_in_output is the field for it", (False,)),
    Refused("lora_path", _NO_ADAPTERS, ("", [])),
    Refused("custom_logit_processor", "there are no custom logits processors", ("",)),
    Refused("custom_params", "there are no custom logits processors", ({},)),
    Refused("return_hidden_states", _NO_TRACE, (False,)),
    Refused("return_routed_experts", _NO_TRACE, (False,)),
    Refused("session_params", "name sessions with session_id", ({},)),
    Refused("rid", "name requests with request_id", ("",)),
    Refused("extra_key", "separate caches with cache_salt", ("",)),
    Refused("bootstrap_host", _NO_TRANSFER, ("",)),
    Refused("bootstrap_port", _NO_TRANSFER),
    Refused("bootstrap_room", _NO_TRANSFER),
    Refused("data_parallel_rank", "the router chooses pods itself"),
)
REFUSED_BY_COMPLETIONS = (
    Refused("suffix", "text is not filled in before a suffix", ("",)),
    Refused("prompt_embeds", _ONLY_TEXT, ([],)),
    # Fields of chats, which some clients send everywhere.
    Refused("max_completion_tokens", "it is a field of chats; use max_tokens"),
    Refused("top_logprobs", "it is a field of chats; use logprobs", (0,)),
    Refused("tools", "it is a field of chats", ([],)),
    Refused("tool_choice", "it is a field of chats", ("none", "auto")),
    Refused("reasoning_effort", "it is a field of chats"),
    Refused("chat_template_kwargs", "it is a field of chats", ({},)),
    Refused("documents", "it is a field of chats", ([],)),
    Refused("add_generation_prompt", "it is a field of chats", (True,)),
)
REFUSED_BY_CHATS = (
    # OpenAI
    Refused("functions", "use tools", ([],)),
    Refused("function_call", "use tool_choice", ("none", "auto")),
    Refused("modalities", _ONLY_TEXT, (["text"], [])),
    Refused("audio", _ONLY_TEXT),
    Refused("prediction", "answers are not predicted by the client"),
    Refused("verbosity", "the model's template knows no such setting", ("medium",)),
    Refused("web_search_options", "the web is not searched"),
    # vLLM
    Refused("echo", "it is a field of completions", (False,)),
    Refused("suffix", "it is a field of completions", ("",)),
    Refused("chat_template", "the template is the model's", ("",)),
    Refused("mm_processor_kwargs", _ONLY_TEXT, ({},)),
    Refused("media_io_kwargs", _ONLY_TEXT, ({},)),
)

_ELSEWHERE = "tools run at the client"
REFUSED_BY_MESSAGES = (
    Refused("container", _ELSEWHERE),
    Refused("mcp_servers", _ELSEWHERE, ([],)),
)
REFUSED_BY_RESPONSES = (
    Refused("previous_response_id", "nothing is stored: send the conversation as `input`"),
    Refused("conversation", "nothing is stored: send the conversation as `input`"),
    Refused("background", "an answer is sent on the connection of its request", (False,)),
    Refused("prompt", "there are no stored prompts"),
    Refused("moderation", "texts are not moderated"),
    Refused("truncation", "a prompt that is too long is refused, never cut", ("disabled",)),
    Refused("top_logprobs", "log probabilities are a field of chats", (0,)),
)

_OF_TOKENIZED_CHATS = {"chat_template", "mm_processor_kwargs", "media_io_kwargs"}
REFUSED_BY_TOKENIZED_CHATS = tuple(row for row in REFUSED_BY_CHATS if row.name in _OF_TOKENIZED_CHATS)

IGNORED_BY_BOTH = (
    Ignored("user", str, "says who asks; requests that belong together are named by `session_id` or `x-session-id`"),
    Ignored("metadata", dict, "for stored answers; nothing is stored"),
    Ignored("store", bool, "nothing is stored"),
    Ignored("service_tier", str, "`priority` orders requests"),
    Ignored("safety_identifier", str, "says who asks"),
    Ignored("prompt_cache_retention", str, "blocks stay cached while there is room"),
    Ignored("return_mm_kwargs", bool, "vLLM's render endpoints alone know it"),
)
IGNORED_BY_CHATS = (Ignored("stream_reasoning", bool, "reasoning is streamed as it comes"),)
IGNORED_BY_MESSAGES = (
    Ignored("cache_control", dict, "blocks stay cached while there is room"),
    Ignored("context_management", dict, "the conversation is used as it is sent"),
    Ignored("metadata", dict, "says who asks"),
    Ignored("service_tier", str, "`priority` of chats orders requests"),
    Ignored("inference_geo", str, "there is one place"),
)
IGNORED_BY_RESPONSES = (
    Ignored("store", bool, "nothing is stored; the answer says `store: false`"),
    Ignored("include", list, "nothing beside the answer is kept"),
    Ignored("max_tool_calls", int, "it is for tools that run at the server"),
    Ignored("stream_options", dict, "nothing is obfuscated"),
    Ignored("metadata", dict, "for stored answers; it is repeated in the answer"),
    Ignored("user", str, "says who asks"),
    Ignored("safety_identifier", str, "says who asks"),
    Ignored("service_tier", str, "`priority` of chats orders requests"),
    Ignored("prompt_cache_retention", str, "blocks stay cached while there is room"),
    Ignored("context_management", list, "the conversation is used as it is sent"),
)


def with_fields(base: type[msgspec.Struct], refused: tuple[Refused, ...]) -> type[msgspec.Struct]:
    """`base` with a field for each, kept as it was sent; None: absent."""
    fields: list[tuple[str, Any, Any]] = [(row.name, Raw, None) for row in refused]
    return msgspec.defstruct(f"_{base.__name__}", fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


class RefusedFields:
    """The refused fields of one kind of body."""

    def __init__(self, rows: tuple[Refused, ...]) -> None:
        self._rows = rows
        # One getter for all fields: there are many, and nearly all are absent.
        self._values = operator.attrgetter(*(row.name for row in rows))

    def check(self, body: msgspec.Struct) -> None:
        """Raises InvalidRequestError for a field that asks for what Baton does not do."""
        values = self._values(body)
        if not any(values):
            return
        for row, value in zip(self._rows, values, strict=True):
            if value is not None and not _is_idle(value, row.idle):
                raise InvalidRequestError(f"{row.name} is not supported: {row.why}", param=row.name)


def _is_idle(value: Raw, idle: tuple[object, ...]) -> bool:
    """Whether a value asks for nothing; whatever is long asks for something."""
    if len(bytes(value)) > _MAX_IDLE_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):  # such as a number that is too large
        return False
    # Python takes false for 0 and true for 1.
    return any(decoded == each and isinstance(decoded, bool) == isinstance(each, bool) for each in (None, *idle))
