from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BlockCorruptError
from common.types import BlockHash
from kv_store.block_format import HEADER_BYTES, BlockFormat, BlockLayout, parse_header

LAYOUT = BlockLayout("bfloat16", num_layers=2, num_kv_heads=3, block_size=4, head_dim=8)
FORMAT = BlockFormat(bytes(range(32)), LAYOUT, b"L" * 16)
WITH_FEATURES = dataclasses.replace(FORMAT, layout=dataclasses.replace(LAYOUT, num_feature_layers=1))
FORMATS = pytest.mark.parametrize("block_format", [FORMAT, WITH_FEATURES])
KEY = BlockHash(b"k" * 16)
NUM_TOKENS = 3


def sealed(block_format: BlockFormat = FORMAT) -> bytearray:
    frame = bytearray(block_format.frame_bytes)
    frame[HEADER_BYTES:] = bytes(index % 251 for index in range(block_format.layout.slab_bytes))
    block_format.seal(memoryview(frame), KEY, NUM_TOKENS)
    return frame


def verify(
    frame: bytearray | bytes,
    block_format: BlockFormat = FORMAT,
    *,
    size: int | None = None,
    key: BlockHash = KEY,
    num_tokens: int = NUM_TOKENS,
):
    block_format.verify(memoryview(frame), len(frame) if size is None else size, key, num_tokens)


def test_sizes():
    assert HEADER_BYTES == 192
    assert LAYOUT.payload_bytes == 2 * 2 * 3 * 4 * 8 * 2
    assert dataclasses.replace(LAYOUT, dtype="float32").payload_bytes == 2 * LAYOUT.payload_bytes
    assert 2 * dataclasses.replace(LAYOUT, num_planes=1).payload_bytes == LAYOUT.payload_bytes


def test_sealed_frame_is_verified_and_can_be_inspected():
    frame = sealed()
    verify(frame)
    assert parse_header(frame) == parse_header(frame[:HEADER_BYTES])
    header = parse_header(frame)._replace(digest=b"")
    assert header == (
        "bfloat16",
        LAYOUT.shape,
        3,
        LAYOUT.payload_bytes,
        bytes(range(32)),
        KEY,
        b"",
        b"L" * 16,
        0,
        bytes(16),
    )


@pytest.mark.parametrize(
    ("expected_field", "changes"),
    [
        ("dtype", {"dtype": "float16"}),
        ("shape", {"num_layers": 3, "num_kv_heads": 2}),
        ("shape", {"block_size": 8, "head_dim": 4}),
        ("shape", {"num_planes": 1, "num_kv_heads": 6}),
        ("length", {"num_layers": 4}),
    ],
)
def test_another_layout_is_refused(expected_field, changes):
    frame = sealed(dataclasses.replace(FORMAT, layout=dataclasses.replace(LAYOUT, **changes)))
    with pytest.raises(BlockCorruptError) as caught:
        verify(frame)
    assert caught.value.param == expected_field


@pytest.mark.parametrize(
    ("expected_field", "expectation"),
    [
        ("block_hash", {"key": BlockHash(b"K" * 16)}),
        ("num_tokens", {"num_tokens": 4}),
        ("length", {"size": FORMAT.frame_bytes - 1}),
        ("length", {"size": FORMAT.frame_bytes + 1}),
        ("length", {"size": 0}),
    ],
)
def test_another_block_is_refused(expected_field, expectation):
    with pytest.raises(BlockCorruptError) as caught:
        verify(sealed(), **expectation)
    assert caught.value.param == expected_field


def test_another_model_is_refused():
    with pytest.raises(BlockCorruptError) as caught:
        verify(sealed(dataclasses.replace(FORMAT, fingerprint=bytes(32))))
    assert caught.value.param == "fingerprint"
    assert caught.value.message == f"fingerprint is {'00' * 32}, not {bytes(range(32)).hex()}"


def test_another_layout_of_the_same_shape_is_refused():
    """Its groups have other layers, say."""
    with pytest.raises(BlockCorruptError) as caught:
        verify(sealed(dataclasses.replace(FORMAT, layout_digest=bytes(16))))
    assert caught.value.param == "layout"


@FORMATS
def test_every_single_bit_counts(block_format):
    frame = sealed(block_format)
    last = range(8 * (len(frame) - 4), 8 * len(frame))
    for bit in (*range(8 * (HEADER_BYTES + 4)), *last):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockCorruptError):
            verify(frame, block_format)
        frame[bit // 8] ^= 1 << bit % 8
    verify(frame, block_format)


def test_features_are_left_out_where_there_is_no_room_for_them():
    frame = sealed(WITH_FEATURES)
    verify(frame[: FORMAT.frame_bytes], size=len(frame))
    larger = dataclasses.replace(FORMAT, layout=dataclasses.replace(LAYOUT, num_feature_layers=2))
    for stored in (sealed(), frame):
        own = bytearray(b"x" * larger.frame_bytes)  # what was there before
        own[: len(stored)] = stored
        verify(own, larger, size=len(stored))
        assert own[: FORMAT.frame_bytes] == stored[: FORMAT.frame_bytes]
        assert not any(own[FORMAT.frame_bytes :])


def test_features_have_a_digest_of_their_own():
    frame = sealed(WITH_FEATURES)
    frame[-1] ^= 1
    with pytest.raises(BlockCorruptError) as caught:
        verify(frame, WITH_FEATURES)
    assert caught.value.param == "feature_digest"


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_garbage_is_corrupt_and_nothing_else(garbage):
    with pytest.raises(BlockCorruptError):
        parse_header(garbage)
    with pytest.raises(BlockCorruptError):
        verify(garbage)


@given(position=st.integers(0, FORMAT.frame_bytes - 1), patch=st.binary(min_size=1, max_size=64))
def test_a_patched_frame_is_corrupt_and_nothing_else(position, patch):
    frame = sealed()
    frame[position : position + len(patch)] = patch
    del frame[FORMAT.frame_bytes :]
    if frame == sealed():
        verify(frame)
    else:
        with pytest.raises(BlockCorruptError):
            verify(frame)


def test_a_fingerprint_has_its_length():
    with pytest.raises(ValueError, match="32 bytes"):
        BlockFormat(b"short", LAYOUT, bytes(16))


def test_other_layouts_and_models_have_namespaces_of_their_own():
    others = [dataclasses.replace(FORMAT, layout_digest=b"y" * 16), dataclasses.replace(FORMAT, fingerprint=b"y" * 32)]
    assert len({each.namespace for each in (FORMAT, *others)}) == 3
    assert WITH_FEATURES.namespace == FORMAT.namespace
