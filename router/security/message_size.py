"""How many values a protobuf message holds, counted before it is parsed.

Eight megabytes may hold four million messages, or as many million numbers, which take half a second to parse and a
quarter of a gigabyte.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from common.errors import PayloadTooLargeError

MAX_FIELDS = 2**15  # of a message and of those within it; 4096 messages of a chat have 12,288

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)
_CONTINUED = bytes(range(128, 256))  # bytes of a number that are not its last
_OPAQUE = frozenset({FieldDescriptor.CPPTYPE_STRING})  # bytes, too


def check_num_values(data: bytes, kind: Descriptor, max_values: int) -> None:
    """Raises PayloadTooLargeError for more than MAX_FIELDS fields or a packed list of more than `max_values` numbers.
    What is malformed is left to the parser."""
    num_fields = 0
    pending = [(0, len(data), kind)]
    while pending:
        at, end, kind = pending.pop()
        nested = _nested(kind)
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise PayloadTooLargeError(f"the message has more than {MAX_FIELDS} fields")
            tag, at = _varint(data, at, end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _varint(data, at, end)
            elif wire_type == _FIXED64:
                at += 8
            elif wire_type == _FIXED32:
                at += 4
            elif wire_type == _BYTES:
                size, at = _varint(data, at, end)
                within = nested.get(tag >> 3)
                if isinstance(within, Descriptor):
                    pending.append((at, min(end, at + size), within))
                elif within is not None and size > max_values:
                    _check_packed(data[at : at + size], within, max_values)
                at += size
            elif wire_type not in _GROUPS:
                return


def _check_packed(numbers: bytes, name: str, max_values: int) -> None:
    if len(numbers.translate(None, _CONTINUED)) > max_values:
        problem = f"{name} has more values than the limit of {max_values} (max_body_values)"
        raise PayloadTooLargeError(problem, param=name)


@functools.cache
def _nested(kind: Descriptor) -> Mapping[int, Descriptor | str]:
    """By number: the kind of a field that holds messages, the name of one that may hold packed numbers."""
    return {
        field.number: field.message_type if field.message_type is not None else field.name
        for field in kind.fields
        if field.cpp_type not in _OPAQUE
    }


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at` and where it ends, `end` at the latest."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            break
        shift += 7
    return value, at
