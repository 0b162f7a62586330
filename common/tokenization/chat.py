"""A model's chat template: messages in, prompt text out.

The environment offers what templates on the hub expect of `transformers` (loop controls, `raise_exception`,
`strftime_now`, an unescaped `tojson`, `{% generation %}` blocks). It is jinja2's immutable sandbox, since a template
is third-party code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequestError


class ChatTemplate:
    """A compiled chat template. Raises ConfigError if `source` is not a valid template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the variables a template may use, such as bos_token."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid: {error} (line {error.lineno})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders the prompt for a conversation, oldest message first; `variables`: further variables of the template.

        Raises InvalidRequestError if the template rejects the messages, for example an unknown role.
        """
        fixed = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, **fixed}
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequestError(
                f"the model's chat template rejects these messages: {error}", param="messages"
            ) from error


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}` ... `{% endgeneration %}`, which marks text for training only."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().astimezone().strftime(fmt)
