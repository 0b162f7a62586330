"""Settings of the router's security."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask."""

    api_keys_file: Annotated[
        str,
        Meta(
            description="YAML file of the API keys, see docs/security.md; read anew when it changes and on SIGHUP. "
            "Empty, and no BATON_API_KEYS in the environment: everybody may ask."
        ),
    ] = ""
    metrics_need_key: Annotated[
        bool, Meta(description="Where there are API keys, /metrics needs one as well: it tells of all tenants.")
    ] = True
