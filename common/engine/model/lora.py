"""LoRA adapters of a loaded model, from files in PEFT's format.

An adapter is adapter_config.json and adapter_model.safetensors. For each linear layer that it changes there are two
matrices, under the path that the layer has in transformers' model. What else PEFT can do beside that (biases, modules
that are trained whole, decomposed weights) is refused by name, as an adapter without it computes something else.

Requests name an adapter by its digest: SHA-256 over its matrices, by their names, and their scales.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.engine.contract.adapters import AdapterFacts, ReadAdapter, no_such_layer, unusable
from common.engine.devices.adapters import (
    NO_ADAPTER,
    AdaptedLinear,
    AdapterBatch,
    LayerAdapters,
    LoraPair,
    PerRow,
    StepAdapters,
)
from common.engine.devices.base import Device
from common.engine.model.parallel_layers import CutLayer
from common.engine.quantization.base import AnyLinear, QuantizedLinear
from common.errors import quoted

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_BASE = "model."  # of the layers' paths, which adapters of a model without a head do not have
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_REFUSED = {  # settings of PEFT's that change more than the two products, by what they may be
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
}
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")  # initialisations by which PEFT changes the model's own weights
_MAX_CONFIG_BYTES = 1 << 20


class Target(NamedTuple):
    """A linear layer that adapters may change: its place among layers that are computed as one."""

    layer: LayerAdapters
    part: int
    num_parts: int
    in_features: int
    out_features: int
    cut: CutLayer | None = None  # of a rank; sizes are those of the whole layer


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """See ReadAdapter. In host memory: of a rank, its part."""

    facts: AdapterFacts
    pairs: Mapping[str, LoraPair]  # by the path of the layer
    absent: frozenset[str]  # see ReadAdapter


class AdaptedLayers:
    """The linear layers of a model that adapters may change, as they are found."""

    def __init__(self, device: Device, num_slots: int, max_rank: int, *, is_cut: bool, is_staged: bool) -> None:
        """`is_cut`: the model's layers are, over ranks; those of which it is not known how get no adapters.
        `is_staged`: other stages have some of the model's layers."""
        self.is_cut = is_cut
        self.is_staged = is_staged
        self.batch = AdapterBatch(num_slots, device.torch_device)
        self.targets: dict[str, Target] = {}
        self.max_rank = max_rank
        self._device = device

    def adapt(self, prefix: str, layers: Mapping[str, AnyLinear], linear: PerRow) -> PerRow:
        """Adds adapters to `linear`, which computes all of the layers, by their paths after the prefix. Returns it as
        it is if it can have none."""
        sizes = [layer.out_features for layer in layers.values()]
        first = next(iter(layers.values()))
        adapters = self._device.layer_adapters(self.batch, first.in_features, sizes, first.weight.dtype, self.max_rank)
        if adapters is None:
            return linear
        for part, (path, layer) in enumerate(layers.items()):
            cut: CutLayer | None = getattr(layer, "whole", None)
            if cut is not None or not self.is_cut:
                whole = layer if cut is None else cut
                self.targets[prefix + path] = Target(
                    adapters, part, len(layers), whole.in_features, whole.out_features, cut
                )
        return AdaptedLinear(linear, adapters, self.batch)

    def wrap_modules(self, model: nn.Module) -> None:
        """Adds adapters to the linear layers of a model that runs its own code."""
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                sizes = None if isinstance(parent, AdaptedModule) else _sizes_of(child)
                if sizes is not None and path and not _is_refused(f"{path}.{name}"):
                    dtype = next(child.parameters()).dtype
                    adapters = self._device.layer_adapters(self.batch, sizes[0], sizes[1:], dtype, self.max_rank)
                    assert adapters is not None  # such models are not computed with batch_invariant
                    self.targets[f"{path}.{name}"] = Target(adapters, 0, 1, *sizes)
                    setattr(parent, name, AdaptedModule(child, adapters, self.batch))

    def unwrap_modules(self, model: nn.Module) -> None:
        """Takes the adapters of `wrap_modules` away."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, AdaptedModule):
                    setattr(parent, name, child.base)

    def settle(self, model: nn.Module, num_tokens: int) -> None:
        """After a forward pass over so many tokens: of the modules of `wrap_modules`, those that have not got all
        tokens at once, such as an expert, get no adapter."""
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, AdaptedModule):
                    if child.seen != [num_tokens]:
                        del self.targets[f"{path}.{name}"]
                        setattr(parent, name, child.base)
                    child.seen = None


class AdaptedModule(nn.Module):
    """A linear layer of a model that runs its own code, with its adapters."""

    def __init__(self, base: nn.Module, adapters: LayerAdapters, batch: AdapterBatch) -> None:
        super().__init__()
        self.base = base
        self.seen: list[int] | None = []  # tokens of each call, until it is settled that these are a step's
        self._adapters = adapters
        self._batch = batch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self.seen is not None:
            self.seen.append(inputs.numel() // inputs.shape[-1])
        if not self._batch.is_active:
            plain: torch.Tensor = self.base(inputs)
            return plain
        low = self._adapters.down(inputs.reshape(-1, inputs.shape[-1]))
        out: torch.Tensor = self.base(inputs).contiguous()
        self._adapters.up(low, out.view(-1, out.shape[-1]))
        return out

    def __getattr__(self, name: str) -> Any:
        """Gives what the layer has, such as its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def _sizes_of(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None for anything else."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    if type(module) is nn.Linear or isinstance(module, QuantizedLinear) or hasattr(module, "packed"):
        return module.in_features, module.out_features
    return None


def _is_refused(path: str) -> bool:
    """Experts, which get some of the tokens each."""
    return "experts" in path.split(".")


class ModelAdapters:
    """See Adapters. Those of a model on one device; called on the worker's thread but for `read`."""

    def __init__(
        self,
        layers: AdaptedLayers,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._targets = layers.targets
        self.batch = layers.batch
        self._dtype = dtype
        self._device = device
        self._max_rank = layers.max_rank
        self._is_staged = layers.is_staged
        self._installed: dict[bytes, LoraAdapter] = {}
        self._slots: dict[bytes, int] = {}  # of those on the device, least recently used first
        self._free = list(range(self.batch.num_slots - 1, -1, -1))
        self._layers: dict[int, list[LayerAdapters]] = {}  # by slot: those that have something of it

    @property
    def num_slots(self) -> int:
        """Adapters on the device at once."""
        return self.batch.num_slots

    def read(self, directory: str) -> LoraAdapter:
        """See Adapters."""
        adapter = read_lora(
            Path(directory), self._targets, max_rank=self._max_rank, dtype=self._dtype, is_staged=self._is_staged
        )
        for target in self._targets.values():  # all of them, as recorded steps have them all
            target.layer.prepare()
        return adapter

    def install(self, adapter: ReadAdapter) -> None:
        """See Adapters."""
        assert isinstance(adapter, LoraAdapter)
        self._installed[adapter.facts.digest] = adapter

    def remove(self, digest: bytes) -> None:
        """See Adapters."""
        if digest in self._slots:
            self._free.append(self._take_out(digest))
        del self._installed[digest]

    def slot_of(self, digest: bytes, in_use: Iterable[int]) -> int:
        """The slot of an adapter, which is put there if it is in none; not into one of those in use."""
        if digest not in self._slots:
            slot = self._free.pop() if self._free else self._least_recently_used(set(in_use))
            self._put(slot, self._installed[digest])
            self._slots[digest] = slot
        self._slots[digest] = slot = self._slots.pop(digest)
        return slot

    def begin_step(self, step: StepAdapters | None) -> None:
        """Called before each forward pass; see AdapterBatch."""
        self.batch.begin_step(step)

    def _least_recently_used(self, in_use: set[int]) -> int:
        digest = next(digest for digest, slot in self._slots.items() if slot not in in_use)
        return self._take_out(digest)

    def _take_out(self, digest: bytes) -> int:
        slot = self._slots.pop(digest)
        for layer in self._layers.pop(slot):
            layer.remove(slot)
        return slot

    def _put(self, slot: int, adapter: LoraAdapter) -> None:
        by_layer: dict[int, tuple[LayerAdapters, list[LoraPair | None]]] = {}
        for path, pair in adapter.pairs.items():
            target = self._targets[path]
            _, pairs = by_layer.setdefault(id(target.layer), (target.layer, [None] * target.num_parts))
            pairs[target.part] = LoraPair(*(each.to(self._device) for each in pair))
        for layer, pairs in by_layer.values():
            layer.put(slot, pairs)
        self._layers[slot] = [layer for layer, _ in by_layer.values()]


class RequestAdapters:
    """The adapters of a worker's requests, by their rows in its table."""

    def __init__(self, model: ModelAdapters, max_num_seqs: int) -> None:
        self._model = model
        self._slots = np.full(max_num_seqs, NO_ADAPTER, dtype=np.int64)
        self._num_adapted = 0

    def set(self, row: int, digest: bytes) -> None:
        """A request with this adapter, or none if empty, has the row."""
        self.clear([row])
        if digest:
            self._slots[row] = self._model.slot_of(digest, self._slots[self._slots != NO_ADAPTER].tolist())
            self._num_adapted += 1

    def clear(self, rows: Sequence[int]) -> None:
        """Requests have left these rows."""
        for row in rows:
            if self._slots[row] != NO_ADAPTER:
                self._slots[row] = NO_ADAPTER
                self._num_adapted -= 1

    def of_step(self, token_rows: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> StepAdapters | None:
        """The adapters of a step's tokens, by their rows, and of the `wanted` ones of them; None if there are none."""
        if not self._num_adapted:
            return None
        slots = self._slots[token_rows]
        return StepAdapters(slots, slots[wanted]) if (slots != NO_ADAPTER).any() else None


def read_lora(
    directory: Path, targets: Mapping[str, Target], *, max_rank: int, dtype: torch.dtype, is_staged: bool = False
) -> LoraAdapter:
    """Reads an adapter for layers of these paths. If it changes others, they are of other stages where `is_staged`, and
    in its digest only. Raises InvalidRequestError."""
    config = _read_config(directory)
    tensors = _read_tensors(directory)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise unusable(f"{WEIGHTS_FILE} has {quoted(key)}, which is no matrix of a linear layer's adapter")
        halves.setdefault(match["path"], {})[match["which"]] = tensor
    if not halves:
        raise unusable(f"{WEIGHTS_FILE} is empty")
    scale_of = _scales(config)
    digest = hashlib.sha256(b"baton.lora.v1\0")
    pairs: dict[str, LoraPair] = {}
    absent: set[str] = set()
    largest = num_bytes = 0
    for path in sorted(halves):
        rank = _rank_of(path, halves[path])
        scale = scale_of(path, rank)
        for name, tensor in sorted(halves[path].items()):
            digest.update(f"{path}\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{scale!r}\0".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            num_bytes += tensor.numel() * dtype.itemsize
        largest = max(largest, rank)
        layer = path if path in targets else _BASE + path
        if layer not in targets:
            if not is_staged:
                raise no_such_layer(path)
            absent.add(path)
            continue
        if layer in pairs:
            raise unusable(f"{quoted(path)} is there twice")
        a, b = _checked(path, halves[path], targets[layer], max_rank)
        if (cut := targets[layer].cut) is not None:
            own = slice(cut.start, cut.stop)
            a, b = (a, b[own]) if cut.dim == 0 else (a[:, own], b)
        pairs[layer] = LoraPair(a.to(dtype).contiguous(), (b.float() * scale).to(dtype).contiguous())
    base_model = config.get("base_model_name_or_path")
    facts = AdapterFacts(
        digest=digest.digest(),
        rank=largest,
        num_bytes=num_bytes,
        base_model=base_model if isinstance(base_model, str) else "",
    )
    return LoraAdapter(facts, pairs, frozenset(absent))


def _rank_of(path: str, halves: Mapping[str, torch.Tensor]) -> int:
    """The rank of a layer's matrices, if there are two."""
    if set(halves) != {"A", "B"}:
        raise unusable(f"{quoted(path)} has one matrix of two")
    for name, tensor in halves.items():
        if tensor.dim() != 2 or not tensor.numel() or not tensor.dtype.is_floating_point:
            raise unusable(f"lora_{name} of {quoted(path)} is {list(tensor.shape)} of {tensor.dtype}")
    return len(halves["A"])


def _checked(
    path: str, halves: Mapping[str, torch.Tensor], target: Target, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices of a layer, if they fit."""
    a, b = halves["A"], halves["B"]
    rank = len(a)
    if rank > max_rank:
        raise unusable(f"rank {rank} of {quoted(path)} is above max_lora_rank {max_rank}")
    found = [rank, a.shape[1], *b.shape]
    expected = [rank, target.in_features, target.out_features, rank]
    if found != expected:
        raise unusable(
            f"{quoted(path)} has matrices {list(a.shape)} and {list(b.shape)}, but the model's layer has "
            f"{target.in_features} inputs and {target.out_features} outputs: is it of another model?"
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise unusable(f"{quoted(path)} has numbers that are not finite")
    return a, b


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():  # a pipe would be waited for
        raise unusable(f"{directory} has no {CONFIG_FILE}")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES)
        config = json.loads(content)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise unusable(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise unusable(f"{path} is not a JSON object")
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise unusable(f"its peft_type is {quoted(kind)}, not 'LORA'")
    for name, allowed in _REFUSED.items():
        if (value := config.get(name)) not in allowed:
            raise unusable(f"{name} is {quoted(value)}, which is not supported")
    initialisation = config.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGES_WEIGHTS):
        raise unusable(
            f"init_lora_weights is {quoted(initialisation)}, which changes the model's own weights; convert it to LoRA"
        )
    return config


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        raise unusable(
            f"{directory} has no {WEIGHTS_FILE}" + (", and adapter_model.bin is not read" if pickled else "")
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
    except (SafetensorError, OSError, ValueError, TypeError, MemoryError) as error:
        raise unusable(f"{path} is not a safetensors file: {error}") from error


def _scales(config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """The factor of a layer's product, by its path and rank."""
    default = config.get("lora_alpha", config.get("r", 8))
    patterns = config.get("alpha_pattern") or {}
    is_stabilised = bool(config.get("use_rslora"))
    if not isinstance(patterns, dict):
        raise unusable("alpha_pattern is not an object")

    def scale_of(path: str, rank: int) -> float:
        alpha = next((value for pattern, value in patterns.items() if _matches(pattern, path)), default)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise unusable(f"lora_alpha is {quoted(alpha)}, not a number")
        return alpha / (math.sqrt(rank) if is_stabilised else rank)

    return scale_of


def _matches(pattern: str, path: str) -> bool:
    """Whether PEFT would find the path by this pattern: its end after a dot, or with ^ all of it. Regular expressions
    that are more than that are refused, as matching them may take any time."""
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    if not _NAME.fullmatch(name):
        raise unusable(f"alpha_pattern has {quoted(pattern)}, which is not the name of a layer")
    return path == name or (not pattern.startswith("^") and path.endswith(f".{name}"))
