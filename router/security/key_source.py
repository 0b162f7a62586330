"""Sources of API keys: a file, the environment, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import ConfigError
from router.security.keys import ApiKey, KeyTable, parse_key_file, parse_key_list

ENVIRONMENT = "BATON_API_KEYS"
_OPTION = "--api-keys-file"


def load_keys(file: str, environment: Mapping[str, str]) -> KeyTable | None:
    """The keys that are configured; None if there are none. Raises ConfigError, which repeats none of them."""
    listed = environment.get(ENVIRONMENT, "").strip()
    if not file and not listed:
        return None
    keys: list[ApiKey] = []
    if listed:
        keys += _named(ENVIRONMENT, lambda: parse_key_list(listed))
    if file:
        keys += _named(f"{_OPTION}: {file}", lambda: parse_key_file(_read(file)))
    try:
        return KeyTable(keys)
    except ConfigError as error:
        raise ConfigError(f"{_OPTION if file else ENVIRONMENT}: {error.message}", param="api_keys_file") from error


def _named(where: str, parse: Callable[[], list[ApiKey]]) -> list[ApiKey]:
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", param="api_keys_file") from error


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8") from None
