"""The pooling that a checkpoint asks for: its architecture, the files of sentence-transformers, its labels.

A checkpoint with a head for text generates; so that it can be served to both, its hidden states can be pooled as well.
A classifier, a model without any head and one with the files of sentence-transformers generate nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from common.errors import ModelLoadError
from common.types import PoolingFacts
from common.types.pooling import GENERATE, Activation, PoolingMethod

_MODULES = "modules.json"
_HEAD_NAMES = ("score", "classifier")
_SEQUENCE, _TOKEN = "ForSequenceClassification", "ForTokenClassification"
_ALWAYS_DECODERS = frozenset({"gpt_neox", "gpt_neox_japanese"})  # whose code never looks at `is_decoder`
_METHODS: dict[str, PoolingMethod] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_BY_PROBLEM: dict[str, Activation] = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}


class Checkpoint(NamedTuple):
    """The findings."""

    facts: PoolingFacts
    has_text_head: bool  # else the one of the model's class has no weights


def read_checkpoint(directory: Path, raw_config: dict[str, Any], model_config: Any) -> Checkpoint:
    """`model_config` is what transformers makes of `raw_config`. Raises ModelLoadError."""
    architecture = _architecture(raw_config)
    text_config = model_config.get_text_config()
    size = int(getattr(text_config, "hidden_size", 0) or 0)
    if architecture.endswith((_SEQUENCE, _TOKEN)):
        labels = tuple(str(model_config.id2label[index]) for index in range(len(model_config.id2label)))
        is_sequence = architecture.endswith(_SEQUENCE)
        facts = PoolingFacts(
            tasks=("classify",) if is_sequence else ("token_classify",),
            labels=labels,
            activation=_activation(raw_config, len(labels)) if is_sequence else "softmax",
        )
        return Checkpoint(facts, has_text_head=False)
    modules = _read_json(directory / _MODULES)
    generates = modules is None and architecture != _class_without_head(model_config.model_type)
    method: PoolingMethod = "last"
    normalizes = True
    if modules is not None:
        method, normalizes = _read_modules(directory, modules)
    tasks = (GENERATE,) if generates else ()
    facts = PoolingFacts(
        tasks=(*tasks, "embed", "token_embed"), method=method, normalizes=normalizes, embedding_size=size
    )
    return Checkpoint(facts, has_text_head=generates)


def check_direction(raw_config: dict[str, Any], model_config: Any) -> None:
    """Raises ModelLoadError for an encoder, whose tokens see those after them."""
    text_config = model_config.get_text_config()
    is_encoder = (
        (getattr(text_config, "is_decoder", None) is False and text_config.model_type not in _ALWAYS_DECODERS)
        or getattr(text_config, "use_bidirectional_attention", None) in (True, "all")  # else of images, for example
        or raw_config.get("is_causal") is False
    )
    if is_encoder:
        problem = f"{model_config.model_type} is an encoder here: its tokens see those after them"
        raise ModelLoadError(f"{problem}, which cannot be served; decoders can", param="model")


def read_head(weight_files: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [labels, size] and bias [labels] of a classification head. Raises ModelLoadError."""
    found: dict[str, torch.Tensor] = {}
    for path in weight_files:
        with safe_open(path, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in (f"{head}.{part}" for head in _HEAD_NAMES for part in ("weight", "bias")):
                if name in names:
                    found[name] = tensors.get_tensor(name)
    for head in _HEAD_NAMES:
        if (weight := found.get(f"{head}.weight")) is not None:
            return weight, found.get(f"{head}.bias")
    raise ModelLoadError("the checkpoint has no classification head (score.weight)", param="model")


def _class_without_head(model_type: str) -> str:
    """Returns the name of the class; empty: it is not known."""
    names = MODEL_MAPPING_NAMES.get(model_type, "")
    return names if isinstance(names, str) else names[0]


def _architecture(raw_config: dict[str, Any]) -> str:
    names = raw_config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _activation(raw_config: dict[str, Any], num_labels: int) -> Activation:
    """Returns what turns outputs into probabilities: as sentence-transformers was told, else by the problem's type."""
    own = raw_config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or raw_config.get("sbert_ce_default_activation_function")
    if named:
        name = str(named).rsplit(".", 1)[-1]
        if name not in _ACTIVATIONS:
            raise ModelLoadError(f"the classification head's activation {name} is not supported", param="model")
        return _ACTIVATIONS[name]
    problem = raw_config.get("problem_type")
    return _BY_PROBLEM.get(str(problem), "sigmoid" if num_labels == 1 else "softmax")


def _read_modules(directory: Path, modules: Any) -> tuple[PoolingMethod, bool]:
    """The method, and whether embeddings are normalised. Raises ModelLoadError."""
    method: PoolingMethod | None = None
    normalizes = False
    try:
        kinds = [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in modules]
    except (TypeError, KeyError) as error:
        raise ModelLoadError(f"{directory / _MODULES} is not a list of modules", param="model") from error
    for kind, path in kinds:
        match kind:
            case "Transformer":
                continue
            case "Pooling":
                method = _read_method(directory / path / "config.json")
            case "Normalize":
                normalizes = True
            case _:
                problem = f"{directory} has a module {kind} ({_MODULES}), which is not supported"
                raise ModelLoadError(problem, param="model")
    if method is None:
        raise ModelLoadError(f"{directory} has no Pooling module in {_MODULES}", param="model")
    return method, normalizes


def _read_method(path: Path) -> PoolingMethod:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is missing or no JSON object", param="model")
    chosen = sorted(name for name, value in config.items() if name.startswith("pooling_mode_") and value is True)
    if len(chosen) != 1 or chosen[0] not in _METHODS:
        raise ModelLoadError(
            f"{path} asks for {', '.join(chosen) or 'no pooling'}; one of {', '.join(sorted(_METHODS))} is supported",
            param="model",
        )
    return _METHODS[chosen[0]]


def _read_json(path: Path) -> Any:
    """None: there is no such file. Raises ModelLoadError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", param="model") from error
