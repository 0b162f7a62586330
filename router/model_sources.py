"""Reads what the router needs of its models: names, tokenizers, sampling defaults, how answers are parsed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from common.generation_config import read_sampling_defaults
from common.tokenization import Tokenizer
from router.config import RouterConfig
from router.gateway.reply import ReplyParsing
from router.requests.model_files import resolve_model
from router.served_model import ModelSource

logger = logging.getLogger(__name__)


def read_models(config: RouterConfig) -> list[ModelSource]:
    """Reads the models that the router is started with. Raises ConfigError."""
    if not config.models:
        directory, name = resolve_model(config.model, config.revision)
        return [_read(config, directory, tuple(config.served_model_name) or (name,))]
    return [
        _read(config, resolve_model(model, None, "--models")[0], names)
        for model, names in by_model(config.models).items()
    ]


def by_model(models: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns the names of each model."""
    names: dict[str, list[str]] = {}
    for name, model in models.items():
        names.setdefault(model, []).append(name)
    return {model: tuple(each) for model, each in names.items()}


def _read(config: RouterConfig, directory: Path, names: tuple[str, ...]) -> ModelSource:
    defaults = read_sampling_defaults(config.generation_config, config.override_generation_config, directory)
    logger.info("sampling defaults of %s: %s", names[0], defaults.summary)
    tokenizer = Tokenizer.from_directory(directory)
    parsing = ReplyParsing(tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)
    return ModelSource(names, tokenizer, defaults, parsing)
