"""Protobuf messages that somebody might send: of any content, and good ones with something odd in them."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Kind = TypeVar("Kind", bound=Message)

_ODD_STRINGS = st.sampled_from(["", "\x00", "a\nb", "a\r\n\r\nb", "é", "😀" * 5, "\u2028", "x" * 300, "y\n" * 3000])
_strings = st.text(max_size=8) | _ODD_STRINGS
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: _strings,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_INT32: st.integers(-3, 3) | st.sampled_from([-(2**31), 2**31 - 1]),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 40) | st.sampled_from([511, 2047, 2048, 2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 40) | st.sampled_from([2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 12) | st.sampled_from([-1, 99, 2**31 - 1]),  # also unknown numbers
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Kind]) -> Kind:
    """A message with up to three fields, whatever they may hold."""
    fields = list(kind.DESCRIPTOR.fields)
    chosen = draw(st.lists(st.sampled_from(fields), max_size=3, unique_by=_name)) if fields else []
    return kind(**{field.name: draw(_values(field)) for field in chosen})


@st.composite
def nearly(draw: st.DrawFn, good: st.SearchStrategy[Kind], kind: type[Kind]) -> Kind:
    """A good message with up to three fields that hold something else, or more, or that a good one lacks."""
    message = kind()
    message.CopyFrom(draw(good))
    message.MergeFrom(draw(messages(kind)))
    return message


@st.composite
def bytes_of(draw: st.DrawFn, good: st.SearchStrategy[Message]) -> bytes:
    """A good message's bytes, some of them lost, changed or inserted; or just bytes."""
    sent = bytearray(draw(good).SerializeToString() if draw(st.booleans()) else draw(st.binary(max_size=60)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(sent)))
        sent[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(sent)


def _name(field: FieldDescriptor) -> str:
    return field.name


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_values(part) for part in field.message_type.fields)
        return st.dictionaries(key, value, max_size=4)
    if field.message_type is not None:
        values: st.SearchStrategy[Any] = messages(field.message_type._concrete_class)
    else:
        values = _SCALARS[field.type]
    return st.lists(values, max_size=4) if field.is_repeated else values
