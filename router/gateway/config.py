"""Settings of the fronts."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fronts."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"Process": ("page", "access_log")}

    page: Annotated[
        bool,
        Meta(description="Serve the web page at /: a playground, the cluster live, the last requests."),
    ] = True
    access_log: Annotated[
        bool,
        Meta(description="Log a line for each request that has ended, at level info; probes and scrapes have none."),
    ] = True
