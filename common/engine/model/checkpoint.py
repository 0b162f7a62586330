"""Finds a model's files and reads what they say, before weights are loaded; errors are one line."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from common.engine.config import ModelConfig
from common.engine.devices.base import Device
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.quantization.checkpoints.gguf import GGUF_SUFFIX
from common.errors import ConfigError, ModelLoadError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_MAX_MODEL_LEN = 2048  # of models that state no limit
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def model_directory(config: ModelConfig, files: Sequence[str] = HUB_FILES) -> Path:
    """The local directory of the model. Of a hub id, these `files` are downloaded."""
    path = Path(os.path.expanduser(config.model))  # unlike Path's, it takes a user whom there is not
    if os.path.isdir(path):  # unlike Path's, of names that are too long as well
        return path
    if not config.model:
        raise ModelLoadError("no model given", param="model")
    if os.path.exists(path):
        raise ModelLoadError(f"{path} is not a directory", param="model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise ModelLoadError(f"{config.model} does not exist", param="model")
    try:
        return Path(snapshot_download(config.model, revision=config.revision, allow_patterns=[*files]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{config.model} is neither a local directory nor a model on the hub: {first_line(error)}",
            param="model",
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Its config.json. Raises ModelLoadError."""
    path = directory / "config.json"
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{directory} has no config.json", param="model") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {first_line(error)}", param="model") from error
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} is not a JSON object", param="model")
    return parsed


def find_weights(directory: Path) -> list[Path]:
    """The safetensors files that transformers will load, or the GGUF file where there are none."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file() and len(found := sorted(directory.glob(f"*{GGUF_SUFFIX}"))) == 1:
        return found
    if not index.is_file():
        raise ModelLoadError(f"{directory} has no safetensors weights (model.safetensors)", param="model")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read: {first_line(error)}", param="model") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory} has no weight file {missing[0]}", param="model")
    return [directory / name for name in names]


def read_model_config(directory: Path) -> Any:
    """The same for transformers. Raises ModelLoadError, and whatever transformers raises; see `unusable`."""
    model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(model_config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{model_config.model_type} is an encoder-decoder, not a causal LM", param="model")
    return model_config


@contextlib.contextmanager
def unusable(directory: Path) -> Iterator[None]:
    """Turns what goes wrong with a model into a ModelLoadError."""
    try:
        yield
    except ConfigError:
        raise
    except KeyError as error:
        no_interface = error.args == (ATTENTION_NAME,)  # looked up in a table of the architecture's own
        reason = "its attention implementation cannot be replaced" if no_interface else f"it lacks {error}"
        raise ModelLoadError(f"{directory} cannot be served: {reason}", param="model") from error
    except Exception as error:  # third-party code over user files: any exception means unusable
        raise ModelLoadError(f"{directory} cannot be loaded: {first_line(error)}", param="model") from error


def resolve_dtype(config: ModelConfig, model_config: Any, device: Device) -> torch.dtype:
    """Returns the type of the setting; for "auto", one that suits checkpoint and device."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    own = getattr(model_config.get_text_config(), "dtype", None)
    return device.default_dtype(own if isinstance(own, torch.dtype) and own in _DTYPES.values() else torch.float32)


def vocabulary_size(config: ModelConfig) -> int:
    """The number of tokens, by the model's configuration. Raises ModelLoadError."""
    directory = model_directory(config, ["config.json"])
    read_config(directory)
    with quiet_transformers(), unusable(directory):
        return int(read_model_config(directory).get_text_config().vocab_size)


def max_model_len_of(text_config: Any) -> int:
    """The model's limit; where rotary frequencies change with the length of the text, the length at which they do.

    Frequencies of a batch follow its longest sequence in transformers, so that beyond that length a request would
    answer differently beside a longer one, and keys cached before would not fit those computed after.
    """
    named = (getattr(text_config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = int(next(filter(None, named), _DEFAULT_MAX_MODEL_LEN))
    rope = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_layer_type or [rope]:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit


def eos_token_ids_of(model: Any, text_config: Any) -> frozenset[int]:
    """Returns the tokens that end a text: those of generation_config.json, or else of config.json."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off progress bars and warnings; errors are raised."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Returns what an error says, in one line: its first, and the next one if that ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
