"""Reads what the router needs of its models: names, tokenizers, sampling defaults, how answers are parsed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from common.errors import ConfigError
from common.generation_config import read_sampling_defaults
from common.setting_values import show
from common.tokenization import Tokenizer
from router.replies.reply import ReplyParsing
from router.requests.bounds import MAX_MODEL_CHARS
from router.serving.config import ModelsConfig, is_model_name, names_by_location
from router.serving.model_files import resolve_model
from router.serving.served_model import ModelSource

logger = logging.getLogger(__name__)

_FILE_OPTION = "--models-file"


class ModelSpec(NamedTuple):
    """A model as an operator names it."""

    names: tuple[str, ...]
    location: str  # directory or hub id


def read_models(config: ModelsConfig) -> list[ModelSource]:
    """Reads the models that the router starts with. Raises ConfigError."""
    if config.models_file:
        return [read_model(config, spec, _FILE_OPTION) for spec in read_models_file(config.models_file)]
    if config.models:
        return [read_model(config, spec, "--models") for spec in _specs(config.models)]
    directory, name = resolve_model(config.model, config.revision)
    return [_read(config, ModelSpec(tuple(config.served_model_name) or (name,), config.model), directory)]


def read_model(config: ModelsConfig, spec: ModelSpec, option: str = _FILE_OPTION) -> ModelSource:
    """Reads one model. Takes up to seconds, and longer if it comes from the hub. Raises ConfigError."""
    return _read(config, spec, resolve_model(spec.location, None, option)[0])


def read_models_file(file: str) -> list[ModelSpec]:
    """Reads the names and locations of the models in a file. Raises ConfigError."""
    try:
        document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _invalid(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    models = {} if document is None else document
    if not isinstance(models, dict):
        raise _invalid(f"{file}: expected name: directory or name: hub id, got {show(models)}")
    for name, location in models.items():
        if not (isinstance(name, str) and is_model_name(name)):
            raise _invalid(
                f"{file}: a name must be a text of 1 to {MAX_MODEL_CHARS} printable characters, got {show(name)}"
            )
        if not (isinstance(location, str) and location):
            raise _invalid(f"{file}: {name}: expected a directory or a hub id, got {show(location)}")
    return _specs(models)


def _invalid(problem: str) -> ConfigError:
    return ConfigError(f"{_FILE_OPTION}: {problem}", param="models_file")


def _specs(models: Mapping[str, str]) -> list[ModelSpec]:
    return [ModelSpec(tuple(names), location) for location, names in names_by_location(models).items()]


def _read(config: ModelsConfig, spec: ModelSpec, directory: Path) -> ModelSource:
    defaults = read_sampling_defaults(config.generation_config, config.override_generation_config, directory)
    logger.info("sampling defaults of %s: %s", spec.names[0], defaults.summary)
    tokenizer = Tokenizer.from_directory(directory)
    parsing = ReplyParsing(tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)
    return ModelSource(spec.names, spec.location, tokenizer, defaults, parsing)
