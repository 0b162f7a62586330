"""JSON that is encoded as it comes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.answering.encoded import EncodedList, encode_parts


@given(lists=st.lists(st.lists(st.lists(st.text("\0a,[é\u2028"), max_size=3), max_size=4), max_size=4))
def test_parts_joined_are_the_whole(lists):
    encoded = []
    for pieces in lists:
        encoded.append(EncodedList())
        for piece in pieces:
            encoded[-1].extend(piece)
    plain = [[entry for piece in pieces for entry in piece] for pieces in lists]
    value = {"text": "a\0b", "lists": plain, "again": {"first": plain[:1]}}
    parts = encode_parts({"text": "a\0b", "lists": encoded, "again": {"first": encoded[:1]}})
    assert json.loads(b"".join(parts)) == value
    assert [json.loads(bytes(each.whole())) for each in encoded] == plain
    assert list(map(bool, encoded)) == list(map(bool, plain))


def test_no_part_is_as_long_as_the_whole():
    encoded = EncodedList(["x" * 1000] * 5)
    for _ in range(1000):
        encoded.extend(["x" * 1000] * 5)
    parts = encode_parts({"a": encoded, "b": [encoded]})
    assert sum(map(len, parts)) > 10_000_000
    assert max(map(len, parts)) < 300_000
