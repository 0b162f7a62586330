"""Settings of discovery."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pods: where they are found besides the lists."""

    registry: Annotated[
        str | None,
        Meta(description="Redis where pods announce themselves, redis://[user:password@]host[:port][/db]."),
    ] = None
    registry_namespace: Annotated[
        str, Meta(min_length=1, pattern="^[A-Za-z0-9._-]+$", description="Name of the cluster within the registry.")
    ] = "default"
