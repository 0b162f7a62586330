"""Bounds of constraints."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.types import constraint
from common.types.constraint import check_json_shape

VALUES = st.recursive(
    st.none() | st.text('a"\\[]{},é') | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def depth_of(value):
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0)


def num_containers_and_commas(value):
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return 1 + max(0, len(inner) - 1) + sum(map(num_containers_and_commas, inner))


@settings(max_examples=300, deadline=None)
@given(value=VALUES, max_depth=st.integers(1, 4), max_values=st.integers(1, 12))
@example(value=[[["a"]], []], max_depth=2, max_values=12)
def test_the_shape_of_json_is_what_it_holds(value, max_depth, max_values):
    fits = depth_of(value) <= max_depth and num_containers_and_commas(value) <= max_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint, "MAX_CONSTRAINT_DEPTH", max_depth)
        patch.setattr(constraint, "MAX_CONSTRAINT_VALUES", max_values)
        for encoded in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            if fits:
                check_json_shape(encoded.encode(), "x")
            else:
                with pytest.raises(InvalidRequestError):
                    check_json_shape(encoded.encode(), "x")


@pytest.mark.parametrize("text", ["[[[", "]][[", '["]', '"\\', '["a\\"', "", "[1,]"])
def test_what_is_no_json_is_left_to_the_decoder(text):
    check_json_shape(text.encode(), "x")
