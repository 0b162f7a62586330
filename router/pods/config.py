"""Settings of how pods' health is judged."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a pod that says it is healthy is not believed."""

    canary_interval_s: Annotated[
        float,
        Meta(ge=0, description="Seconds without a sign of work after which a pod gets a canary request; 0: never."),
    ] = 10.0
    canary_timeout_s: Annotated[float, Meta(gt=0, description="Seconds that a canary request may take.")] = 10.0
    stall_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without a step after which a pod with running requests is ejected and its streams "
            "move; longer if its load explains longer steps; 0: never.",
        ),
    ] = 2.0
    eject_after_failures: Annotated[
        int, Meta(ge=1, description="Failures in a row that eject a pod; two canary requests are enough.")
    ] = 5
    eject_base_s: Annotated[
        float, Meta(gt=0, description="Seconds of a pod's first ejection; each further one takes twice as long.")
    ] = 5.0
    eject_max_s: Annotated[float, Meta(gt=0, description="Most seconds of one ejection.")] = 300.0
    max_ejected_share: Annotated[
        float, Meta(ge=0, le=1, description="Most of a role's pods that are ejected at once; never the last ready one.")
    ] = 0.5
