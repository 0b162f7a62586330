"""Settings of a decode pod."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.pod.config import PodConfig


class DecodeConfig(PodConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Handoffs: when a decode pod computes a prompt itself, on top of what every pod has."""

    handoff_queue_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a prompt may wait in a prefill pod's queue.")
    ] = 120.0
    kv_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What happens if the KV of a prompt does not arrive, unless the request has its own policy. "
            "recompute: this pod computes the prompt; fail: the request fails."
        ),
    ] = "recompute"
