"""The base of structs that say what answers look like."""

from __future__ import annotations

import msgspec


class AnswerStruct(msgspec.Struct, forbid_unknown_fields=True):
    """Has its fields and no others."""
