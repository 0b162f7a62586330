"""The executor Protocol: where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.engine.contract.adapters import Adapters
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import RunningStep, SchedulerOutput
from common.engine.kv_connector import OpenConnector
from common.engine.messages import RankFigures
from common.engine.phases import PhaseClock


class Executor(Protocol):
    """Owns the workers. Called by EngineCore on its one thread, in this order: `share_phases`, `watch`,
    `load_model`, `initialize_kv_cache`, `open_connector`, `measure_steps`, `submit` once per step and
    `check` between two, `close`."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be submitted before the result of the one before is known, if all requests of both
        are simple (see SamplingParams.is_simple): tokens that the first samples are inputs of the second. One step may
        be ahead in this way."""

    @property
    def max_concurrent_batches(self) -> int:
        """How many steps may be under way at once, of different requests or of later tokens of the same prompt: one for
        each stage of a pipeline."""

    @property
    def num_failed_recordings(self) -> int:
        """How often decode steps that were recorded, to be run as one call, computed something else than kernel by
        kernel. They are not used."""

    @property
    def rank_figures(self) -> tuple[RankFigures, ...]:
        """Each rank's latest figures of itself, where there are several. Read after each step."""

    @property
    def adapters(self) -> Adapters | None:
        """None: it computes the model alone. Read after `load_model`."""

    def share_phases(self, phases: PhaseClock) -> None:
        """An executor that computes on the caller's thread enters there what it does in a step. The caller enters the
        rest: Phase.PREPARE before it submits a step, and Phase.DEVICE before it waits for the result."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` may be called once, from any thread and also between steps: workers that are elsewhere can do
        no more."""

    def load_model(self) -> ModelFacts:
        """Loads weights. Raises ModelLoadError, in one line, for a model that cannot be served."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim]; block 0 is the null block."""

    def measure_steps(self) -> list[tuple[int, float]]:
        """Run steps of one prompt to see how long they take: tokens, and seconds. Empty: it is left to be learned."""

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """Opens the connector over the KV cache, if there is one; the caller uses it until `close`. `on_settled` may
        be called from any thread, also between steps."""

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """Begins one step: removes dropped requests, runs the forward pass, samples with `masks`."""

    def check(self, known: KnownRequests) -> list[str]:
        """Violations, one line each: every worker has the requests and blocks that the steps so far gave it, and what
        lies between workers and their connector has an owner. Called between steps, after `measure_steps`."""

    def close(self) -> None:
        """Releases everything, the connector included. Idempotent; safe after a partial start."""
