"""Settings of survival."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SurvivalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how often the router tries before a request fails."""

    max_attempts: Annotated[
        int,
        Meta(ge=1, description="Pods that a request is tried on in a row without a new token before it fails."),
    ] = 3
    pod_wait_s: Annotated[
        float, Meta(ge=0, description="Seconds a started request waits for a decode pod after losing its own.")
    ] = 10.0
    max_concurrent_migrations: Annotated[
        int,
        Meta(
            ge=1,
            description="Most requests that are being computed again at once after losing their decode pod; the "
            "others wait in line.",
        ),
    ] = 32
    migrate_on_drain_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds after which streams leave a decode pod that drains, if others have room; none: they "
            "stay until the pod ends them."
        ),
    ] = None
    resume_window_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which the tokens of a stream that broke are kept, so that a client that resumes "
            "it does not wait for them again; 0: not at all.",
        ),
    ] = 30.0
    max_kept_streams: Annotated[int, Meta(ge=0, description="Most such streams.")] = 1024
    max_kept_bytes: Annotated[int, Meta(ge=0, description="Most memory for such streams.")] = 64 * 2**20
