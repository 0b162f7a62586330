"""Finds the files of a model that the router reads."""

from __future__ import annotations

import logging
from pathlib import Path

from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from common.errors import ConfigError
from common.generation_config import FILE_NAME

logger = logging.getLogger(__name__)

_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", FILE_NAME]


def resolve_model(model: str, revision: str | None, option: str = "--model") -> tuple[Path, str]:
    """Directory with these files of `model` (a directory, a hub id, or empty for the demo model), and its name.

    Raises ConfigError, which names `option`, if it is neither a directory nor to be had from the hub.
    """
    if not model:
        return demo_model_path(), DEMO_MODEL_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_absolute() or model.count("/") > 1 or model.startswith("."):
        raise ConfigError(f"{option}: {model} is no directory", param=option.removeprefix("--"))
    return _download(model, revision, option), model


def _download(model: str, revision: str | None, option: str) -> Path:
    from huggingface_hub import snapshot_download  # only now: it is not needed for a local model
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("reading the tokenizer of %s from the hub, or from its cache", model)
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{option}: {model} is no directory and cannot be had from the hub: {detail}",
            param=option.removeprefix("--"),
        ) from error
