"""Sampling parameters of requests that do not give them: the model's own, as vLLM has it.

A request's value wins over `--override-generation-config`, that over the model's generation_config.json, and that over
the default of OpenAI's API, which is that of SamplingParams. `max_new_tokens` is the default of `max_tokens`. Where the
operator set it, by the option or by a generation_config.json of their own, it is also the most that a request gets.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError, quoted
from common.types import SamplingParams
from common.types.validation import RANGES

FILE_NAME = "generation_config.json"
AUTO = "auto"  # the file in the model's directory
NONE = frozenset({"none", "vllm"})  # no file; "vllm" is what vLLM calls it
_MAX_TOKENS = "max_new_tokens"
_FILE_OPTION = "--generation-config"
_OVERRIDE_OPTION = "--override-generation-config"
_FIELDS = {  # of generation_config.json -> of SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    _MAX_TOKENS: "max_tokens",
}


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The parameters of a request that does not say otherwise."""

    values: Mapping[str, float] = {}  # field of SamplingParams, except max_tokens -> value
    max_tokens: int | None = None  # None: that of the API
    max_tokens_limit: int | None = None  # most output tokens, whatever a request asks for; None: no limit
    summary: str = "none but those of OpenAI's API"  # for the log: values, and where they come from

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The given fields, the defaults for the rest. Ranges of given ones are not checked."""
        return SamplingParams(**{**self.values, **given})

    def limit_tokens(self, max_tokens: int) -> int:
        """`max_tokens`, unless the limit is lower."""
        return max_tokens if self.max_tokens_limit is None else min(max_tokens, self.max_tokens_limit)


def read_sampling_defaults(source: str, overrides: Mapping[str, float], model_directory: Path) -> SamplingDefaults:
    """`source`: "auto", "none", or the directory of a generation_config.json, or such a file; `overrides` has names of
    that file. Raises ConfigError that names the option, the file and the field."""
    file = _file_of(source, model_directory)
    in_file = {} if file is None else _read_file(file)
    merged = {**in_file, **_check_overrides(overrides)}
    limit = merged.get(_MAX_TOKENS) if source not in {AUTO, *NONE} or _MAX_TOKENS in overrides else None
    if not merged:
        return SamplingDefaults()
    origins = {name: _OVERRIDE_OPTION if name in overrides else str(file) for name in merged}
    return SamplingDefaults(
        values={_FIELDS[name]: value for name, value in merged.items() if name != _MAX_TOKENS},
        max_tokens=_whole(merged.get(_MAX_TOKENS)),
        max_tokens_limit=_whole(limit),
        summary=", ".join(f"{name}={value} ({origins[name]})" for name, value in merged.items()),
    )


def _file_of(source: str, model_directory: Path) -> Path | None:
    """None: no file is read. Raises ConfigError if one is named that is not there."""
    if source in NONE:
        return None
    if source == AUTO:
        file = model_directory / FILE_NAME
        return file if file.is_file() else None
    path = Path(source).expanduser()
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{_FILE_OPTION}: {source} is neither auto, none nor a directory with a {FILE_NAME}",
            param="generation_config",
        )
    return file


def _read_file(file: Path) -> dict[str, float]:
    """Reads the file's sampling parameters; the rest is not for us."""
    where = f"{_FILE_OPTION}: {file}"
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {error}", param="generation_config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where} does not hold a JSON object", param="generation_config")
    given = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    return {name: _check(name, value, where, "generation_config") for name, value in given.items()}


def _check_overrides(overrides: Mapping[str, float]) -> dict[str, float]:
    for name in overrides:
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_FIELDS)}"
            raise ConfigError(
                f"{_OVERRIDE_OPTION}: {quoted(name)} is not a sampling default; {hint}",
                param="override_generation_config",
            )
    return {
        name: _check(name, value, _OVERRIDE_OPTION, "override_generation_config") for name, value in overrides.items()
    }


def _check(name: str, value: Any, where: str, setting: str) -> float:
    """The value as SamplingParams has it. Raises ConfigError if a request could not give it."""
    if name == "top_k" and value == -1:  # all tokens
        return 0
    allowed = RANGES[_FIELDS[name]]
    if value not in allowed:
        raise ConfigError(f"{where}: {name} must be {allowed}, got {quoted(value)}", param=setting)
    number: float = value
    return number


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
