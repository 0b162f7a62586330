"""How a client wants an answer streamed."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta


class UsageReports(enum.Enum):
    """Which chunks of a stream carry token counts."""

    NONE = enum.auto()
    LAST_CHUNK = enum.auto()
    EVERY_CHUNK = enum.auto()


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: Annotated[bool | None, Meta(description="A last chunk with token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: token counts so far in every chunk.")
    ] = None
    include_event_ids: Annotated[
        bool | None, Meta(description="Events have ids, as with the header `x-baton-resumable: 1`.")
    ] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Of no effect: nothing is obfuscated.")] = None

    @property
    def is_idle(self) -> bool:
        """True if no option is given."""
        return all(getattr(self, name) is None for name in self.__struct_fields__)
