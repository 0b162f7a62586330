"""Settings of survival."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta


class SurvivalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recovery: how long and how often the router tries before a request fails."""

    DIVIDED: ClassVar[tuple[str, ...]] = ("max_kept_bytes",)

    max_attempts: Annotated[
        int,
        Meta(ge=1, description="Pods on which a request is tried in a row without a new token before it fails."),
    ] = 3
    pod_wait_s: Annotated[
        float, Meta(ge=0, description="Seconds that a request waits for a decode pod when none is left.")
    ] = 10.0
    migrate_on_drain_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds after which streams leave a draining decode pod, if others have room; none: they stay "
            "until the pod ends them."
        ),
    ] = None
    resume_window_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which the tokens of a broken stream are kept for a client that resumes it; "
            "0: they are not kept.",
        ),
    ] = 30.0
    max_kept_bytes: Annotated[int, Meta(ge=0, description="Most memory for tokens of broken streams.")] = 64 * 2**20
