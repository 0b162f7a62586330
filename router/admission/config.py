"""Settings of admission."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission: how much runs at once, and how much may wait."""

    DIVIDED: ClassVar[tuple[str, ...]] = ("max_inflight", "max_queued")

    max_inflight: Annotated[int, Meta(ge=1, description="Most generations in flight; more wait.")] = 2048
    max_queued: Annotated[int, Meta(ge=0, description="Most generations that wait; more are refused with 429.")] = 1024
