"""JSON with long lists, whose entries are encoded as they come and sent in parts. To encode or to join all of an answer
at its end would hold up others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

_MARK = b"\0"  # a byte that JSON never contains
_PART_BYTES = 2**18


class EncodedList:
    """A JSON array that grows at its end."""

    __slots__ = ("_last", "_parts")

    def __init__(self, entries: Sequence[object] = ()) -> None:
        self._parts: list[bytes] = []
        self._last = bytearray()  # the part that grows
        self.extend(entries)

    def extend(self, entries: Sequence[object]) -> None:
        """Encodes them now."""
        if not entries:
            return
        if self:
            self._last += b","
        self._last += msgspec.json.encode(entries)[1:-1]
        if len(self._last) >= _PART_BYTES:
            self._parts.append(bytes(self._last))
            self._last.clear()

    def __bool__(self) -> bool:
        return bool(self._parts or self._last)

    def whole(self) -> Raw:
        """All of it."""
        return Raw(b"[%b]" % b"".join(self.parts()))

    def parts(self) -> list[bytes]:
        """Returns the list's parts, without the brackets."""
        return [*self._parts, bytes(self._last)]


def encode_parts(value: object) -> list[bytes]:
    """Returns the parts of `value` as JSON. It may have EncodedLists anywhere, which are not copied into one."""
    lists: list[EncodedList] = []

    def mark(found: object) -> Raw:
        assert isinstance(found, EncodedList)
        lists.append(found)
        return Raw(b"[%b]" % _MARK)

    first, *others = msgspec.json.encode(value, enc_hook=mark).split(_MARK)
    parts = [first]
    for found, after in zip(lists, others, strict=True):
        parts += [*found.parts(), after]
    return parts
