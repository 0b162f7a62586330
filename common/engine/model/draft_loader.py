"""Loads the smaller model that proposes drafts, after a look at whether its tokens are those of the model."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from common.engine.config import ModelConfig
from common.engine.model.checkpoint import model_directory, vocabulary_size
from common.engine.model.kv_groups import all_in_one
from common.engine.model.loader import LoadedModel, load_model
from common.engine.speculative import DraftModelOptions
from common.errors import ConfigError, ModelLoadError

_TOKENIZER = "tokenizer.json"


def load_draft_model(config: ModelConfig, options: DraftModelOptions, device_number: int) -> LoadedModel:
    """Loads it whole, however the model that `config` names is cut, whose weights are not read. Raises ConfigError that
    names the option, or the setting that both models have."""
    own = msgspec.structs.replace(
        config, model=options.model, revision=options.revision, max_model_len=None, batch_invariant=False
    )
    try:
        draft_size = vocabulary_size(own)
    except ModelLoadError as error:
        raise _refused(error.message) from error
    size = vocabulary_size(config)
    if draft_size != size:
        raise _refused(f"{options.model} has a vocabulary of {draft_size} tokens, and {config.model} one of {size}")
    _compare_tokenizers(own, config)
    try:
        loaded = load_model(own, device_number, all_in_one)  # its KV is under the model's own block ids
    except ModelLoadError as error:
        raise _refused(error.message) from error
    if loaded.state_bytes:
        raise _refused(f"{options.model} has layers that keep a state, which cannot go back to before a wrong draft")
    if loaded.position_dims > 1:
        raise _refused(f"{options.model} has positions of {loaded.position_dims} dimensions, which drafts have not")
    return loaded


def _compare_tokenizers(draft: ModelConfig, config: ModelConfig) -> None:
    """Raises ConfigError if both have one and the same number stands for different tokens."""
    paths = [model_directory(each, [_TOKENIZER]) / _TOKENIZER for each in (draft, config)]
    if not all(path.is_file() for path in paths):
        return
    try:
        one, other = (Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) for path in paths)
    except Exception as error:  # whatever tokenizers raises for a bad file
        raise _refused(f"the tokenizers of {draft.model} and {config.model} cannot be compared: {error}") from error
    if one != other:
        token, number = min(one.items() ^ other.items(), key=lambda item: (item[1], item[0]))
        raise _refused(f"{draft.model} has another vocabulary than {config.model}: token {number}, {token!r}, differs")


def _refused(reason: str) -> ConfigError:
    return ConfigError.of("speculative", f"draft:model: {reason}")
