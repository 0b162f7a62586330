"""An API's names for the fields of the chat that its requests become, for errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from common.errors import BatonError

_QUOTED = r"""'[^']*'|"[^"]*\""""  # values of clients are repeated as they are
_ANY_INDEX = "[]"


class FieldNames:
    """Renames fields in errors. What is within a field goes with it."""

    def __init__(self, names: Mapping[str, str] = MappingProxyType({})) -> None:
        """The API's names of fields of the chat; `[]` stands for any index, the same in both names."""
        self._names = dict(names)
        alternatives = "|".join(map(_pattern_of, sorted(names, key=len, reverse=True)))
        self._pattern = re.compile(rf"{_QUOTED}|(?<![\w.])(?:{alternatives})(?!\w)") if names else None

    def get(self, name: str) -> str:
        """The API's name of this field of a chat; empty: it has no other."""
        return self._names.get(name, "")

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Renames the fields that errors raised within name."""
        try:
            yield
        except BatonError as error:
            if self._pattern is None or error.param is None:
                raise
            raise self._renamed(error, error.param) from error

    def _renamed(self, error: BatonError, param: str) -> BatonError:
        renamed = copy.copy(error)
        renamed.param, renamed.message = self._in_text(param, param), self._in_text(error.message, param)
        return renamed

    def _in_text(self, text: str, param: str) -> str:
        """Names of one English word, such as "stop", are renamed only where they are those of the error's field."""

        def new_name(match: re.Match[str]) -> str:
            found = match[0]
            index = re.search(r"\[\d+\]", found)
            name = found if index is None else found.replace(index[0], _ANY_INDEX)
            if name not in self._names or not ("_" in name or param.startswith(found)):
                return found
            return self._names[name].replace(_ANY_INDEX, index[0] if index else "")

        assert self._pattern is not None
        return self._pattern.sub(new_name, text)


def _pattern_of(name: str) -> str:
    return re.escape(name).replace(re.escape(_ANY_INDEX), r"\[\d+\]")


CHAT_NAMES = FieldNames()
GRPC_NAMES = FieldNames({"tools[].function": "tools[]"})
MESSAGES_NAMES = FieldNames(
    {
        "tools[].function": "tools[]",
        "tools[].function.parameters": "tools[].input_schema",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "structured_outputs": "output_config.format",
        "chat_template_kwargs": "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
        "stop": "stop_sequences",
    }
)
RESPONSES_NAMES = FieldNames(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "tools[].function": "tools[]",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "structured_outputs": "text.format",
    }
)
