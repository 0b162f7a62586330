"""The executor Protocol: where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from common.engine.config import Kernels
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import ModelRunnerOutput, SchedulerOutput
from common.engine.kv_connector import ConnectorFacts, WorkerConnector
from common.engine.phases import PhaseClock


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a loaded model for the engine, "auto" resolved."""

    fingerprint: bytes  # 32 bytes: weights identity, config, dtype, KV layout, block size
    vocab_size: int
    max_model_len: int  # the model's own limit
    eos_token_ids: frozenset[int]
    kv_groups: tuple[KVGroupSpec, ...]
    bytes_per_block: int  # the same in all groups
    available_kv_bytes: int  # for the KV cache, from settings and measured free memory
    device: str
    dtype: str
    tokenizer_directory: Path | None = None  # of the model; None: output cannot be constrained
    kernels: Kernels = "torch"
    kernels_failed: bool = False  # compiled ones computed something else
    num_threads: int = 0  # CPU threads of a step; 0: it runs elsewhere


class OpenConnector(NamedTuple):
    """A connector over the executor's KV cache."""

    connector: WorkerConnector
    facts: ConnectorFacts


class RunningStep(Protocol):
    """A step that was submitted."""

    def result(self) -> ModelRunnerOutput:
        """Its outcome; waits for it. Called once, in the order of the steps."""


class FinishedStep(NamedTuple):
    """A RunningStep that was over at once."""

    outcome: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        return self.outcome


class Executor(Protocol):
    """Owns the workers. Called by EngineCore on its one thread, in this order: `load_model`, `initialize_kv_cache`,
    `open_connector`, `measure_steps`, then `submit` once per step, then `close`."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be submitted before the result of the one before is known, if all requests of both
        are simple (see SamplingParams.is_simple): tokens that the first samples are inputs of the second. One step may
        be ahead in this way."""

    @property
    def num_failed_recordings(self) -> int:
        """How often decode steps that were recorded, to be run as one call, computed something else than kernel by
        kernel. They are not used."""

    def load_model(self) -> ModelFacts:
        """Loads weights. Raises ModelLoadError, in one line, for a model that cannot be served."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], block 0 being the null block."""

    def measure_steps(self) -> list[tuple[int, float]]:
        """Run steps of one prompt to see how long they take: tokens, and seconds. Empty: it is left to be learned."""

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """Opens the connector over the KV cache, if there is one; the caller uses it until `close`. `on_settled` may
        be called from any thread, also between steps."""

    def submit(self, step: SchedulerOutput, masks: MaskSource, phases: PhaseClock) -> RunningStep:
        """Begins one step: removes dropped requests, runs the forward pass, samples with `masks`. Called in
        Phase.PREPARE; notes in `phases` what comes after it, also while its result is waited for."""

    def close(self) -> None:
        """Releases everything, the connector included. Idempotent; safe after a partial start."""
