"""Settings of a decode pod."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.pod.config import PodConfig


class DecodeConfig(PodConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode pod: what every pod has, and how long it waits for a handoff before it computes by itself."""

    handoff_connect_timeout_s: Annotated[float, Meta(gt=0, description="Seconds to connect to a prefill pod.")] = 2.0
    handoff_queue_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a prefill may wait for its turn.")
    ] = 120.0
    handoff_stall_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds between two events of a prefill that is being computed.")
    ] = 30.0
    kv_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What becomes of a request that does not say it if its KV does not come: it is computed here, "
            "or the request fails."
        ),
    ] = "recompute"
    max_quarantined_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of the KV blocks in quarantine above which no new handoff begins.")
    ] = 0.5
