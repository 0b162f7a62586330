"""The router's address for clients, unless their options name one."""

from __future__ import annotations

import os

from common.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"
URL_VARIABLE = "BATON_URL"


def api_key() -> str:
    """Returns the API key in the environment; empty: there is none. Raises ConfigError, which does not repeat it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{KEY_VARIABLE}: a key has no spaces, control characters or letters beyond ASCII")
    return key
