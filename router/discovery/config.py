"""Settings of discovery."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where pods are looked for besides the lists."""

    registry: Annotated[
        str | None,
        Meta(description="redis://[user:password@]host[:port][/db] where pods announce themselves; none: no registry."),
    ] = None
    registry_namespace: Annotated[
        str, Meta(min_length=1, pattern="^[A-Za-z0-9._-]+$", description="Name of the cluster within the registry.")
    ] = "default"
    registry_poll_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds between two looks at the registry; its news is heard in between."),
    ] = 5.0
    dns_interval_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds between two lookups of a name written dns:NAME:PORT.")
    ] = 5.0
