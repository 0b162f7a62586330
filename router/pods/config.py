"""Settings of how pods' health is judged."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health of pods: when one that reports healthy is ejected all the same."""

    canary_interval_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without a step or an answer after which a pod gets a canary request; 0: never. A "
            "canary may take as long, but no longer than 10 s.",
        ),
    ] = 10.0
    stall_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without a step after which a pod with running requests is ejected and its streams "
            "migrate; more if its load explains longer steps; 0: never.",
        ),
    ] = 2.0
    eject_after_failures: Annotated[
        int,
        Meta(
            ge=0,
            description="Failures in a row that eject a pod; two failed canaries or invalid answers suffice. 0: never.",
        ),
    ] = 5
    eject_base_s: Annotated[
        float,
        Meta(gt=0, description="Seconds of a pod's first ejection; they double each time, up to 60 times as many."),
    ] = 5.0
