"""The asynchronous engine client Protocol that pods are written against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from common.engine.contract.adapters import AdapterFacts
from common.engine.messages import (
    AddRequest,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    ProfileReport,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.types import RequestId


class EngineProfile(NamedTuple):
    """A profile that was taken."""

    report: ProfileReport
    trace: Path  # in Chrome's format, compressed by gzip; exists within the context only


class EngineClient(Protocol):
    """One engine, or several, of which each request is in one, seen from an asyncio event loop. All methods are called
    on that loop.

    Commands are delivered in order. After the engine has died, every method raises EngineDeadError.
    """

    async def start(self) -> EngineSpec:
        """Starts the engine and waits until it can serve. Raises ConfigError if a setting or the model is at fault."""

    def least_loaded(self) -> int:
        """Number of the engine that should get the next request, which counts as sent there."""

    def add_request(self, request: AddRequest) -> None:
        """Starts a generation. A request that cannot be admitted ends with FinishReason.ERROR in the outputs."""

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """Ends generations; each live one still answers, with FinishReason.ABORT."""

    def update_transfer(self, command: TransferUpdate) -> None:
        """Passes on an update of a consumer's handoff."""

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        """Reports that a producer no longer writes to a consumer's blocks."""

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Gives a producer the blocks to which a direct connector writes."""

    def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """Yields the engine's outputs, one item per step. Iterated once, by one task; ends with `close`, raises
        EngineDeadError if the engine dies."""

    async def spec(self) -> EngineSpec:
        """Facts of the started engine."""

    async def stats(self) -> EngineStats:
        """Returns the current statistics."""

    async def stats_by_engine(self) -> list[EngineStats]:
        """Returns the current statistics of each engine."""

    async def check_integrity(self) -> IntegrityReport:
        """Checks the engine's invariants."""

    def profile(self, *, seconds: float, max_steps: int = 0) -> AbstractAsyncContextManager[EngineProfile]:
        """Takes a profile for so long, or so many steps unless 0, and provides it within the context. Raises
        UnavailableError if it failed, DeadlineExceededError if the engine does not answer. One at a time."""

    async def reset_prefix_cache(self) -> None:
        """Removes all cached blocks that no request owns."""

    async def load_adapter(self, directory: str) -> AdapterFacts:
        """Loads a LoRA adapter from a local directory, for requests with its digest. Raises InvalidRequestError if it
        cannot be used, OverloadedError if there are too many."""

    async def unload_adapter(self, digest: bytes) -> None:
        """Forgets an adapter; requests that it has go on. Raises UnknownModelError if it is not loaded."""

    async def close(self) -> None:
        """Ends the engine. Idempotent; safe after a partial start."""
