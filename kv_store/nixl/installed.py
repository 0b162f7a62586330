"""Checks whether NIXL is installed without loading it, which takes seconds and imports torch."""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError


def check_installed() -> None:
    """Raises ConfigError if NIXL is not installed. It may still fail to load, see `load_nixl`."""
    if importlib.util.find_spec("nixl") is None:
        raise not_usable("it is not installed")


def not_usable(reason: object) -> ConfigError:
    """Returns the error for a NIXL that cannot be used."""
    return ConfigError(
        f"--connector: nixl needs the library NIXL, on Linux only: pip install 'baton-llm[nixl]' ({reason})",
        param="connector",
    )
