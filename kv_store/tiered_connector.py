"""A direct connector with tiers: two connectors as one, one for handoffs between pods and one for what a pod keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from common.engine.contract.layout import KVLayout
from common.engine.kv_connector import (
    NO_FENCES,
    BlockTransfer,
    ConnectorFacts,
    Fences,
    SplitConnector,
    TransferResult,
    WorkerConnector,
)
from common.errors import ConfigError
from kv_store.nixl.connector import NixlOptions

if TYPE_CHECKING:
    import torch


class NixlTierOptions(NixlOptions, frozen=True, kw_only=True):
    """Options of the nixl connector and of its tiers."""

    host_bytes: Annotated[int, Meta(ge=0, description="Host memory of each pod for KV blocks; 0: none.")] = 0
    store: Annotated[
        str, Meta(description="Store that keeps blocks: redis or shared-storage; its options as store.NAME=VALUE.")
    ] = ""
    offload: Annotated[
        bool | None, Meta(description="Save every full block; default: if host_bytes or store is given.")
    ] = None


_OWN_OPTIONS = ("host_bytes", "offload")  # of the tiers; all others stand below `store.`


class TieredWorkerConnector:
    """Forwards each job to one of the two connectors. Job ids come from the engine, so they are unique across both."""

    def __init__(self, direct: WorkerConnector, tiers: WorkerConnector) -> None:
        self._direct = direct
        self._tiers = tiers

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """See WorkerConnector. The tiers first, as they fail faster if they cannot be used."""
        try:
            kept = self._tiers.register_kv_cache(kv_cache, fingerprint, layout, on_settled, fences, rank)
        except ConfigError as error:
            raise _named_below_store(error) from error
        facts = self._direct.register_kv_cache(kv_cache, fingerprint, layout, on_settled, fences, rank)
        return replace(facts, keeps_blocks=kept.keeps_blocks, wants_offloads=kept.wants_offloads)

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=self._direct, per_engine=self._tiers)

    def start_load(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._connector_of(transfer).start_load(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._connector_of(transfer).start_save(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._tiers.start_lookup(transfer)

    def cancel(self, job_id: int) -> None:
        """See WorkerConnector. The connector that does not know the job ignores it."""
        self._direct.cancel(job_id)
        self._tiers.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See WorkerConnector."""
        return [*self._direct.poll(), *self._tiers.poll()]

    def close(self) -> None:
        """See WorkerConnector."""
        try:
            self._direct.close()
        finally:
            self._tiers.close()

    def _connector_of(self, transfer: BlockTransfer) -> WorkerConnector:
        return self._tiers if transfer.is_for_tier else self._direct


def _named_below_store(error: ConfigError) -> ConfigError:
    """Rewrites the error with the name that the setting has here."""
    if error.param is None or error.param in _OWN_OPTIONS:
        return error
    setting = f"store.{error.param}"
    return ConfigError(f"{setting}: {error.message.partition(': ')[2] or error.message}", param=setting)
