"""Decodes of layers that keep a state, by a device's kernels or without them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from common.engine.config import ModelConfig
from common.engine.devices.cpu import recurrences
from common.engine.model import probe
from common.engine.model.loader import LoadedModel, load_model
from common.engine.model.stages import Stage
from common.engine.model.states import StateBatch, StateHook, StateRun, States
from tests.architectures.models import model_dir


class Store:
    """See StateStore. Counts the copies."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        self.num_copies = 0
        self._states = [
            {tensor.key: torch.randn(num_slots, *tensor.shape).to(tensor.dtype) for tensor in layer.tensors}
            for layer in loaded.state_layers
        ]

    def read(self, layer: int, slots: torch.Tensor) -> States:
        self.num_copies += 1
        return {key: states[slots] for key, states in self._states[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: States) -> None:
        for key, state in states.items():
            self._states[layer][key][slots] = state

    def slots(self, layer: int) -> States:
        return dict(self._states[layer])

    def all(self) -> list[torch.Tensor]:
        return [states for layer in self._states for states in layer.values()]


def load(model: str) -> LoadedModel:
    return load_model(ModelConfig(model=str(model_dir(model)), dtype="float32", num_threads=1))


SOURCES, TARGETS = torch.tensor([4, 1, 2]), torch.tensor([4, 0, 2])  # slots; one state moves on to another slot
RUN = StateRun(1, 2, torch.tensor([3]), torch.tensor([3]))
BATCHES = [
    StateBatch(torch.tensor([0, 3, 2]), SOURCES, TARGETS, [RUN]),
    StateBatch(torch.tensor([0, 1, 2]), SOURCES, TARGETS, [], is_all_decodes=True),
]


@pytest.mark.parametrize("model", ["qwen3_next", "kimi_linear", "jamba", "bamba", "lfm2"])
def test_decodes_write_states_in_place(model: str) -> None:
    """As the modules' own code would, from copies."""
    loaded = load(model)
    assert loaded.recurrences is not None
    modules = [layer.module for layer in loaded.state_layers]
    for batch in BATCHES:
        hidden = torch.randn(1, 3 + len(batch.runs), loaded.model.config.hidden_size)
        results, stores = [], []
        for kernels in (None, loaded.recurrences):
            torch.manual_seed(0)
            stores.append(Store(loaded, num_slots=6))
            hook = StateHook(modules, stores[-1], kernels)
            hook.begin_step(batch)
            with torch.inference_mode():
                found: Any = modules[0](hidden)
            results.append(found[0] if isinstance(found, tuple) else found)
            hook.remove()
        assert results[0].shape == hidden.shape
        torch.testing.assert_close(*results)
        torch.testing.assert_close(stores[0].all(), stores[1].all())
        assert [store.num_copies for store in stores] == [1 + len(batch.runs), len(batch.runs)]


def test_kernels_that_compute_something_else_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Even if only the states that they leave are wrong."""

    class Wrong(recurrences.CpuRecurrences):
        def _convolve(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super()._convolve(hidden_states, conv_state.clone(), *args, **kwargs)

    with mock.patch("common.engine.devices.cpu.device.CpuRecurrences", Wrong):
        loaded = load("lfm2")
    assert (loaded.recurrences, loaded.kernels_failed) == (None, True)
    assert "using torch's operators instead of compiled kernels" in caplog.text


def test_kernels_that_differ_with_one_prompt_are_used() -> None:
    """As if it had a token for which two experts are as good."""
    numbers: list[int] = []
    inputs_of = probe._inputs_of

    def note(model: Any, stage: Stage, vocab_size: int, number: int) -> torch.Tensor:
        numbers.append(number)
        return inputs_of(model, stage, vocab_size, number)

    class Chaotic(recurrences.CpuRecurrences):
        def _convolve(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super()._convolve(hidden_states, *args, **kwargs) + (numbers[-1] == 0)

    with (
        mock.patch("common.engine.devices.cpu.device.CpuRecurrences", Chaotic),
        mock.patch.object(probe, "_inputs_of", note),
    ):
        loaded = load("lfm2")
    assert (isinstance(loaded.recurrences, Chaotic), loaded.kernels_failed) == (True, False)
    assert max(numbers) == 1


def test_layers_without_a_kernel_decode_with_torchs_operators() -> None:
    with mock.patch.object(recurrences, "can_convolve", return_value=False):
        loaded = load("lfm2")
    assert (loaded.recurrences, loaded.kernels_failed) == (None, False)
