"""The front of a prefill pod: its servicers and the transfers they share."""

from __future__ import annotations

import grpc

from common.pb.pods_pb2_grpc import add_HandoffServicer_to_server, add_PrefillServicer_to_server
from common.pod import pooling
from common.pod.context import PodContext
from common.rpc.options import KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS
from prefill_service.config import PrefillConfig
from prefill_service.servicers import HandoffServicer, PrefillServicer
from prefill_service.transfers import TransferRegistry

# Open at once; more are refused. It bounds the memory for transfers whose other leg never comes; a pod that queues and
# runs as many requests as it may does not reach it.
_MAX_TRANSFERS = 4096
_NOTICING_S = (KEEPALIVE_INTERVAL_MS + KEEPALIVE_TIMEOUT_MS) / 1000  # until a broken connection is noticed
_STEP_S = 15.0  # for the step that is running then; longer than any


class PrefillFront:
    """See common.pod.runtime.Front."""

    service_names = ("baton.v1.Prefill", "baton.v1.Handoff", pooling.SERVICE)

    def __init__(self, pod: PodContext, config: PrefillConfig, *, max_transfers: int = _MAX_TRANSFERS) -> None:
        self.transfers = TransferRegistry(
            pod.admission,
            max_transfers=max_transfers,
            lease_s=config.transfer_lease_s,
            is_direct=pod.spec.is_direct,
        )
        self._prefill = PrefillServicer(pod, self.transfers)
        self._pooling = pooling.PoolingServicer(pod)
        quarantine_s = config.handoff_quarantine_s or pod.spec.max_write_s + _NOTICING_S + _STEP_S
        self._handoff = HandoffServicer(pod, self.transfers, quarantine_s=quarantine_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicers."""
        add_PrefillServicer_to_server(self._prefill, server)
        add_HandoffServicer_to_server(self._handoff, server)
        self._pooling.add_to(server)

    @property
    def num_handoffs(self) -> int:
        """Transfers that have not failed and are not finished."""
        return self.transfers.num_open

    def violations(self) -> list[str]:
        """Broken invariants, one line each."""
        return self.transfers.violations()

    async def close(self) -> None:
        """Fails open transfers and notifies decode pods. Stopping the server ends the calls."""
        self.transfers.close()
        await self._handoff.close()
        self.transfers.forget()
