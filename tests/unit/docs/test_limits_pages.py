"""docs/security.md and docs/structured_output.md against the limits in the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from common.engine.config import GrammarConfig
from common.errors import JSON_DEPTH, InvalidRequestError
from common.types import Constraint, SamplingParams, constraint
from common.types.constraint import check_constraint
from common.types.generation import MAX_LOGPROBS
from common.types.parameters import parameters_of
from router.config import RouterConfig
from router.gateway.bodies import beam_options, fields
from router.replies.tools.base import MAX_NAME_CHARS
from router.replies.tools.json_scanner import MAX_DEPTH
from router.requests import bounds, ids
from router.security import http_connection, message_size
from tests.unit.common.engine.grammar.test_compiler import Compiling

DOCS = Path(__file__).parents[3] / "docs"
SECURITY, STRUCTURED = (DOCS / f"{page}.md" for page in ("security", "structured_output"))
ROUTER = RouterConfig()
LIMITS, SERVING = ROUTER.limits, ROUTER.serving
PARAMETERS = {name: field.parameter for name, field in parameters_of(SamplingParams).items()}

# Each of these must be in the table of fields.
CONSTANTS: dict[str, float] = {
    name: value for module in (bounds, constraint) for name, value in vars(module).items() if name.startswith("MAX_")
} | {
    f"{name}.{bound}": value
    for name, parameter in PARAMETERS.items()
    for bound in ("max_entries", "max_chars")
    if parameter.option_tag is not None and (value := getattr(parameter, bound))
}

TRAFFIC: dict[str, list[float]] = {
    "HTTP connections": [http_connection._RESERVED_FILES],
    "headers and request line": [LIMITS.max_header_bytes, http_connection._MAX_HEADERS],
    "time of the headers": [LIMITS.header_timeout_s],
    "trailers, and the framing of chunks": [LIMITS.max_header_bytes, http_connection._FRAMING_PER_BYTE],
    "requests at once on a connection": [1],
    "a body": [SERVING.max_body_bytes],
    "a field of a JSON body": [],
    "values of a JSON body": [SERVING.max_body_values],
    "levels of a JSON body, or of JSON in a text": [JSON_DEPTH],
    "time of a body": [LIMITS.body_timeout_s],
    "pace of a body": [LIMITS.min_body_rate, LIMITS.body_grace_s],
    "bodies of one address, until they are tokenised": [],
    "bodies of all clients, until they are tokenised": [LIMITS.max_unfinished_body_bytes],
    "time for which an answer is not read": [LIMITS.send_timeout_s],
    "a request as a whole": [SERVING.request_timeout_s],
    "a prompt": [],
    "prompt tokens over all prompts times n, or best_of": [SERVING.max_request_tokens],
    "prompts times n, or best_of": [SERVING.max_choices],
    "fields of a gRPC message": [message_size.MAX_FIELDS],
    "time of a gRPC message": [LIMITS.body_timeout_s],
    "gRPC messages of one address that are read at once": [ROUTER.max_client_body_bytes // SERVING.max_body_bytes],
    "gRPC messages of all clients that are read at once": [LIMITS.max_unfinished_body_bytes // SERVING.max_body_bytes],
    "gRPC messages that wait to be tokenised": [],
    "calls at once on a gRPC connection": [LIMITS.max_grpc_streams],
}

FIELDS: dict[str, list[float | str]] = {
    "model, reasoning_effort, a message's role, name and tool_call_id": ["MAX_MODEL_CHARS"],
    "request_id": [ids._MAX_CHARS],
    "messages": ["MAX_MESSAGES", "MAX_CONTENT_PARTS"],
    "chat_template_kwargs": ["MAX_TEMPLATE_BYTES"],
    "documents, a message's tool_calls and function_call": ["MAX_FIELD_VALUES"],
    "tools": ["MAX_TOOLS", "MAX_TOOLS_BYTES", "MAX_FIELD_VALUES", MAX_NAME_CHARS, MAX_DEPTH],
    "response_format, structured_outputs": [
        "MAX_CONSTRAINT_BYTES",
        "MAX_CONSTRAINT_DEPTH",
        "MAX_CONSTRAINT_VALUES",
        "MAX_WHITESPACE_PATTERN_CHARS",
    ],
    "choice": ["MAX_CHOICES"],
    "stop": ["MAX_STOPS", "MAX_STOP_CHARS"],
    "stop_token_ids": ["stop_token_ids.max_entries"],
    "logit_bias": ["logit_bias.max_entries", -100, 100],
    "allowed_token_ids": ["allowed_token_ids.max_entries"],
    "vllm_xargs": ["vllm_xargs.max_entries", "vllm_xargs.max_chars"],
    "bad_words": [
        "bad_words.max_entries",
        "bad_words.max_chars",
        PARAMETERS["bad_word_token_ids"].max_entries or 0,
        PARAMETERS["bad_word_token_ids"].max_token_ids or 0,
    ],
    "cache_salt": ["MAX_SALT_CHARS"],
    "session_id, user, prompt_cache_key, x-session-id": ["MAX_SESSION_CHARS"],
    "metadata": ["MAX_METADATA", "MAX_METADATA_CHARS"],
    "other texts without effect (service_tier, ...)": ["MAX_NAME_CHARS"],
    "fields that are not supported (regex, ...)": [fields._MAX_IDLE_BYTES],
    "logprobs, top_logprobs, prompt_logprobs": [MAX_LOGPROBS],
    "n or best_of with use_beam_search": ["MAX_BEAMS", MAX_LOGPROBS],
    "length_penalty": [beam_options._LENGTH_PENALTIES.low, beam_options._LENGTH_PENALTIES.high],
    "input, documents, text_1, text_2": ["MAX_POOLED_INPUTS"],
    "tokens of logit_bias, allowed_token_ids and bad_words together, with several choices": ["MAX_RULED_TOKENS"],
    "log probabilities of an answer with several choices": ["MAX_LOGPROB_VALUES", 1],
    "log probabilities of prompts, also by echo with logprobs": ["MAX_LOGPROB_VALUES", 1],
    "repetition_penalty": [0.01, 100],
}

_NUMBER = re.compile(r"(?<!\w)(-?\d[\d,]*(?:\.\d+)?)(?: ([KMG])iB)?")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def table(page: Path, header: str) -> dict[str, list[str]]:
    """The rows of the table whose header begins so: their cells, by the first one without its markup."""
    lines = page.read_text().split(f"\n| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0].replace("`", ""): row[1:] for row in rows}


def numbers(cell: str) -> list[float]:
    found = [(each[1].replace(",", ""), each[2] or "") for each in _NUMBER.finditer(cell)]
    return [float(number) * _UNITS[unit] for number, unit in found]


def test_what_a_client_may_send() -> None:
    rows = table(SECURITY, "what | bound | setting")
    assert {name: numbers(cells[0]) for name, cells in rows.items()} == TRAFFIC
    settings = set(re.findall(r"`(\w+)`", " ".join(cells[1] for cells in rows.values())))
    known = {*LIMITS.__struct_fields__, *SERVING.__struct_fields__}
    assert settings <= known
    named = set(re.findall(r"`(\w+)`", SECURITY.read_text().split("## What a client may send")[1]))
    assert set(LIMITS.__struct_fields__) <= named


def test_the_fields_of_a_request() -> None:
    rows = table(SECURITY, "field | bound")
    wanted = {
        name: [CONSTANTS[each] if isinstance(each, str) else each for each in bounds] for name, bounds in FIELDS.items()
    }
    assert {name: numbers(cells[0]) for name, cells in rows.items()} == wanted
    assert {each for row in FIELDS.values() for each in row if isinstance(each, str)} == set(CONSTANTS)


@pytest.mark.parametrize("name", ["logit_bias", "repetition_penalty"])
def test_ranges(name: str) -> None:
    allowed = PARAMETERS[name].allowed
    assert allowed is not None
    assert FIELDS[name][-2:] == [allowed.low, allowed.high]


def test_the_settings_of_grammars() -> None:
    shown: dict[str, str] = {}
    for names, cells in table(STRUCTURED, "setting of pods | default").items():
        shown |= zip(names.split(", "), cells[0].split(", "), strict=True)
    defaults = {field.encode_name: field.default for field in msgspec.structs.fields(GrammarConfig)}
    assert shown.keys() == defaults.keys()
    for name, default in defaults.items():
        wanted = [default] if isinstance(default, int | float) and not isinstance(default, bool) else []
        assert numbers(shown[name]) == wanted, name
        assert wanted or shown[name] == str(default).lower(), name


def bombs() -> list[str]:
    """The expressions that the pages say are refused."""
    text = SECURITY.read_text() + STRUCTURED.read_text()
    named = re.findall(r"`([^`]+)` written ([\d,]+) times", text)
    return list(dict.fromkeys(part * int(times.replace(",", "")) for part, times in named))


@pytest.mark.parametrize("bomb", bombs(), ids=lambda bomb: bomb[:20])
def test_what_the_pages_call_a_bomb_is_refused(bomb: str) -> None:
    constraint = Constraint.regex(bomb)
    check_constraint(constraint, "structured_outputs")  # small enough to be tried
    compiling = Compiling()
    try:
        result = compiling.result(constraint)
    finally:
        compiling.compiler.close()
    assert isinstance(result, InvalidRequestError)
    assert "to compile" in result.message
