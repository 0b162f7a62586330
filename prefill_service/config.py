"""Settings of a prefill pod."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.pod.config import PodConfig


class PrefillConfig(PodConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefill pod: what every pod has, and the bounds of its transfers."""

    max_transfers: Annotated[int, Meta(ge=1, description="Most handoffs open at once; more are refused.")] = 4096
    transfer_lease_s: Annotated[
        float, Meta(gt=0, description="Seconds that one side of a handoff waits for news of the other.")
    ] = 30.0
    handoff_quarantine_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds for which decode pods that have lost this one keep blocks reserved to which it may "
            "still write (direct connectors). Default: the connector's timeout_s, plus 30 to notice the loss and for a "
            "step."
        ),
    ] = None
