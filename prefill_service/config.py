"""Settings of a prefill pod."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.engine.config import EngineConfig, ForHeadsConfig, SpeculationConfig
from common.engine.speculative import HeadOptions
from common.pod.config import PodConfig


class PrefillConfig(PodConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Handoffs: how long a prefill pod waits for a decode pod, on top of what every pod has."""

    transfer_lease_s: Annotated[
        float, Meta(gt=0, description="Seconds that one side of a handoff waits for a message from the other.")
    ] = 30.0
    handoff_quarantine_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds for which a decode pod that lost its connection to this pod keeps the blocks reserved "
            "to which it may still write (direct connectors). Default: the connector's timeout_s, plus 30 to notice "
            "the loss and to finish a step."
        ),
    ] = None

    def engine_config(self) -> EngineConfig:
        """See PodConfig. Requests leave this pod with their first token, so that there is nothing to propose."""
        config = super().engine_config()
        text, method = config.speculation.speculative, config.speculation.method
        is_head = method is not None and isinstance(method.options, HeadOptions)
        for_heads = ForHeadsConfig(speculative=text) if text and is_head else None
        return msgspec.structs.replace(config, speculation=SpeculationConfig(), for_heads=for_heads)
