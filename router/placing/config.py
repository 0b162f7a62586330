"""Settings of routing."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.placing.policy_registry import POLICIES, parse_policy

RemotePrefill = Literal["auto", "prefer", "always", "never"]


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routing: which pods a request goes to."""

    prefill_policy: Annotated[
        str,
        Meta(description=f"How a prefill pod is chosen: {', '.join(POLICIES)}, or several with weights (a:2,b:1)."),
    ] = "kv_aware"
    decode_policy: Annotated[str, Meta(description="How a decode pod is chosen; the same policies.")] = "kv_aware"
    remote_prefill: Annotated[
        RemotePrefill,
        Meta(
            description="When a prefill pod computes the prompt. auto: where that gives the first token sooner or "
            "keeps the decode pod's target_itl_ms; prefer: whenever one is ready; always: requests are refused while "
            "none is ready; never: decode pods compute all prompts."
        ),
    ] = "auto"
    min_remote_prefill_tokens: Annotated[
        int,
        Meta(ge=0, description="With auto, prompts with fewer uncached tokens stay on the decode pod."),
    ] = 0
    max_index_blocks: Annotated[
        int,
        Meta(ge=0, description="Most blocks in the index of what pods have cached; about 200 bytes each."),
    ] = 2_000_000

    def __post_init__(self) -> None:
        for setting in ("prefill_policy", "decode_policy"):
            try:
                parse_policy(getattr(self, setting))
            except ValueError as error:
                raise ValueError(f"--{setting.replace('_', '-')}: {error}") from error
