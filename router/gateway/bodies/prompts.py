"""Prompts in OpenAI's form: a text, token ids, or a list of either."""

from __future__ import annotations

from common.errors import InvalidRequestError
from router.requests.request import Prompt, TextPrompt, TokenPrompt

Prompts = str | list[str | int | list[int]]


def num_prompts(value: Prompts) -> int:
    """How many `read_prompts` returns; costs nothing."""
    if isinstance(value, str) or not value or isinstance(value[0], int):
        return 1
    return len(value)


def read_prompts(value: Prompts, param: str, *, add_special_tokens: bool) -> list[Prompt]:
    """One or many, of what the field `param` holds. Raises InvalidRequestError."""
    if isinstance(value, str):
        return [TextPrompt(value, add_special_tokens)]
    if not value:
        raise InvalidRequestError(f"{param} is empty", param=param)
    if all(isinstance(each, int) for each in value):
        return [TokenPrompt([each for each in value if isinstance(each, int)])]
    prompts: list[Prompt] = []
    for each in value:
        if isinstance(each, int) or type(each) is not type(value[0]):
            raise InvalidRequestError(f"{param} mixes texts and token ids", param=param)
        prompts.append(TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokenPrompt(each))
    return prompts
