"""Layers that keep a state of each text in place of KV: state spaces, linear attention, short convolutions.

Their code in `transformers` reads and writes states by a cache's methods, for whole texts side by side. Here each of
their modules gets a step's packed batch, is called for its decodes at once and for each run of a chunk, and is given
the states of those sequences, from and to a StateStore. Where the device has kernels for the functions by which the
code writes states in decodes, it calls those, and states are read and written where they lie.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from common.engine.devices.adapters import NO_ADAPTERS, AdapterBatch
from common.engine.devices.recurrences import Recurrences
from common.engine.model.scan import SCANS, scan_from_state

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_ALIGNMENT = 64  # bytes, of tensors in a state
_CACHE_METHODS = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
_STEPS = {  # functions of a decode that write to a state
    "update_conv_state": {"causal_conv1d_update"},
    "update_recurrent_state": {
        "mamba2_selective_state_update",
        "mamba_selective_state_update",
        "recurrent_kimi_delta_attention",
        "torch_recurrent_gated_delta_rule",
    },
}

StateKey = tuple[str, int]
"""Names a tensor of a layer's state: its kind and its number."""

States = dict[StateKey, torch.Tensor]
"""A layer's states of some sequences, each [sequences, ...]."""


class StateRun(NamedTuple):
    """Consecutive tokens of one sequence in a batch, after which its state is kept."""

    start: int  # in the batch
    stop: int
    source: torch.Tensor | None  # [1] int64, slot of the state before them; None: they begin the text
    target: torch.Tensor  # [1] int64, slot of the state after them


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The tokens of a step's batch. Decodes are of one token each, the next of a sequence. All tensors are on the
    device."""

    tokens: torch.Tensor  # [num_decodes] int64, of the batch
    sources: torch.Tensor  # [num_decodes] int64, slots of the states before them
    targets: torch.Tensor  # [num_decodes] int64, slots of the states after them
    runs: Sequence[StateRun]  # of all other tokens; those of a sequence in order
    is_all_decodes: bool = False  # they are all tokens of the batch, in order


class StateStore(Protocol):
    """Keeps the states of layers in numbered slots."""

    def read(self, layer: int, slots: torch.Tensor) -> States:
        """Returns copies of the states in `slots` [sequences]."""

    def write(self, layer: int, slots: torch.Tensor, states: States) -> None:
        """Puts states into `slots` [sequences]."""

    def slots(self, layer: int) -> States:
        """Returns the states in all slots, as they lie: each [slots, ...], with the numbers of a slot side by side."""


class StateTensor(NamedTuple):
    """A tensor of a layer's state."""

    key: StateKey
    shape: tuple[int, ...]  # of one sequence
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence, with those that align the next tensor."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class StateLayer(NamedTuple):
    """A module that keeps a state."""

    module: nn.Module
    tensors: tuple[StateTensor, ...]
    block_layer: int = 0  # of this rank's blocks, where its state is kept, see `block_layers_of`

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class SequenceStates:
    """The states of sequences that a module computes, by the methods of a cache of transformers."""

    def __init__(self, states: States | None = None) -> None:
        self.states: States = {} if states is None else states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Last inputs of a convolution [sequences, channels, width]; None at the start of a text."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the state of a recurrence [sequences, ...]; None at the start of a text."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Takes inputs [sequences, channels, tokens], and returns them after those kept so far."""
        before = self.states.get(("conv", state_idx))
        known = inputs if before is None else torch.cat([before, inputs], dim=-1)
        width = inputs.shape[-1] if conv_kernel_size is None else conv_kernel_size
        kept = known[..., -width:]
        self.states["conv", state_idx] = nn.functional.pad(kept, (width - kept.shape[-1], 0))
        return known

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Takes the state after the tokens."""
        self.states["recurrent", state_idx] = state
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether tokens came before."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """False: nothing is taken back."""
        return False

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Returns the state of MiniMax's lightning attention."""
        return self.states.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """Takes it after the tokens."""
        self.states["linear", 0] = state


def block_layers_of(num_states: int, num_layers: int) -> list[int]:
    """The layer of a block that keeps each of a model's states, of so many: in order, and equally many in each.
    Where stages or ranks have parts of a block, this says which parts the bytes of a state are in."""
    return [number * num_layers // num_states for number in range(num_states)]


def state_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep a state, in layer order."""
    return [module for module in model.modules() if _keeps_state(module)]


def _keeps_state(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return not _CACHE_METHODS.isdisjoint(forward.__code__.co_names)


class StateHook:
    """Lets the modules compute a step's batch with states in a store."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        store: StateStore,
        recurrences: Recurrences | None = None,
        adapters: AdapterBatch | None = None,
    ) -> None:
        """`adapters`: of layers in the modules, which get a part of a step's tokens at a time."""
        self._adapters = NO_ADAPTERS if adapters is None else adapters
        self._modules = modules
        self._store = store
        self._recurrences = recurrences
        self._batch: StateBatch | None = None
        functions = {} if recurrences is None else recurrences.functions
        codes = {kind: _Code.of(kind, functions) for kind in {type(module) for module in modules}}
        for layer, module in enumerate(modules):
            module.forward = _Forward(self, layer, module, codes[type(module)])

    def remove(self) -> None:
        """Lets them compute as transformers does."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def begin_step(self, batch: StateBatch) -> None:
        """Called before each forward pass."""
        self._batch = batch
        if self._recurrences is not None:
            self._recurrences.begin_step(batch.sources, batch.targets)

    def compute(self, layer: int, forward: _Forward, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
        """Calls the module for each part of the batch. `hidden` is [1, tokens, size]."""
        batch, store = self._batch, self._store
        assert batch is not None
        if batch.is_all_decodes:
            found = self._decode(layer, forward, hidden.transpose(0, 1), arguments)
            outputs = _outputs(found).transpose(0, 1)
            return (outputs, None) if isinstance(found, tuple) else outputs
        outputs = torch.empty_like(hidden)
        found = None
        if len(batch.tokens):
            with self._adapters.narrowed(batch.tokens):
                found = self._decode(layer, forward, hidden[0, batch.tokens, None], arguments)
            outputs[0, batch.tokens] = _outputs(found)[:, 0]
        for run in batch.runs:
            states = SequenceStates() if run.source is None else SequenceStates(store.read(layer, run.source))
            with self._adapters.narrowed(slice(run.start, run.stop)):
                found = forward.own(hidden[:, run.start : run.stop], states, arguments)
            outputs[:, run.start : run.stop] = _outputs(found)
            store.write(layer, run.target, states.states)
        return (outputs, None) if isinstance(found, tuple) else outputs

    def _decode(self, layer: int, forward: _Forward, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
        """Calls the module for the decodes [sequences, 1, size]."""
        batch, store = self._batch, self._store
        assert batch is not None
        if forward.writes_in_place:
            return forward.in_place(hidden, store.slots(layer), arguments)
        states = SequenceStates(store.read(layer, batch.sources))
        found = forward.own(hidden, states, arguments)
        store.write(layer, batch.targets, states.states)
        return found


def _outputs(found: Any) -> torch.Tensor:
    """The output of a module, which may return something beside it."""
    outputs: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return outputs


class _Code(NamedTuple):
    """The code of a kind of module, with functions of our own."""

    own: FunctionType
    in_place: FunctionType | None  # of decodes, which gets the states of all slots; None: there are no kernels for it

    @classmethod
    def of(cls, kind: type[nn.Module], functions: Mapping[str, Callable[..., Any]]) -> _Code:
        """`functions`: see Recurrences."""
        own = inspect.unwrap(kind.forward)
        names = set(own.__code__.co_names)
        is_covered = all(_STEPS.get(each, set()) & names & functions.keys() for each in names & _CACHE_METHODS)
        return cls(_calling(own, SCANS), _calling(own, functions) if is_covered else None)


def _calling(code: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same code, which calls these functions where it calls others of their names."""
    found = FunctionType(
        code.__code__, {**code.__globals__, **functions}, code.__name__, code.__defaults__, code.__closure__
    )
    found.__kwdefaults__ = code.__kwdefaults__
    return found


class _Forward:
    """A module's forward method."""

    def __init__(self, hook: StateHook, layer: int, module: nn.Module, code: _Code) -> None:
        self._hook = hook
        self._layer = layer
        self._names = list(inspect.signature(code.own).parameters)[1:]
        self._hidden = self._names[0]
        self._cache = next(name for name in _CACHE_ARGUMENTS if name in self._names)
        self._own = MethodType(code.own, module)
        self._in_place = None if code.in_place is None else MethodType(code.in_place, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        hidden = arguments.pop(self._hidden)
        arguments.pop(self._cache, None)
        if "attention_mask" in self._names:
            arguments["attention_mask"] = None
        return self._hook.compute(self._layer, self, hidden, arguments)

    @property
    def writes_in_place(self) -> bool:
        """Whether decodes may be computed `in_place`."""
        return self._in_place is not None

    def own(self, hidden: torch.Tensor, states: SequenceStates, arguments: Mapping[str, Any]) -> Any:
        """Calls the module's code with hidden states [sequences, tokens, size]."""
        with scan_from_state(states.get_recurrent_state(self._layer)):
            return self._own(**arguments, **{self._hidden: hidden, self._cache: states})

    def in_place(self, hidden: torch.Tensor, slots: States, arguments: Mapping[str, Any]) -> Any:
        """The same for decodes [sequences, 1, size], with the states of all slots."""
        assert self._in_place is not None
        return self._in_place(**arguments, **{self._hidden: hidden, self._cache: SequenceStates(slots)})
