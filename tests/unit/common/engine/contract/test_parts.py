import pytest

from common.engine.contract.layout import Part
from common.engine.contract.parts import (
    PartDigest,
    decode_addresses,
    digests_of_rank,
    encode_address,
    encode_digests,
    encode_place,
)

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def of_heads(rank, head, num_heads, digest):
    """Of all of three layers."""
    return PartDigest(rank, 0, 3, head, num_heads, digest)


def test_each_rank_finds_its_parts_whichever_rank_wrote_them():
    of_ranks = [
        encode_digests([of_heads(0, 0, 1, A), of_heads(1, 0, 1, B)]),
        encode_digests([of_heads(1, 1, 1, C), of_heads(0, 1, 1, B)]),
    ]
    for joined in (b"".join(of_ranks), b"".join(reversed(of_ranks))):
        assert digests_of_rank(joined, 0, 3, 2) == [of_heads(0, 0, 1, A), of_heads(0, 1, 1, B)]
        assert digests_of_rank(joined, 1, 3, 2) == [of_heads(1, 0, 1, B), of_heads(1, 1, 1, C)]


def test_layers_of_several_stages():
    parts = [PartDigest(0, 0, 2, 0, 1, A), PartDigest(0, 0, 2, 1, 1, B), PartDigest(0, 2, 1, 0, 2, C)]
    assert digests_of_rank(encode_digests(reversed(parts)), 0, 3, 2) == parts


def test_only_features_may_be_missing():
    encoded = encode_digests([of_heads(0, 0, 1, A), of_heads(0, 1, 1, B)])
    for num_layers, is_whole in ((3, True), (4, False), (5, True), (6, False)):
        assert bool(digests_of_rank(encoded, 0, num_layers, 2, num_feature_layers=2)) == is_whole
    with_some = encode_digests([PartDigest(0, 0, 4, 0, 2, A)])
    assert digests_of_rank(with_some, 0, 4, 2, num_feature_layers=1)
    assert not digests_of_rank(with_some, 0, 5, 2, num_feature_layers=2)
    assert not digests_of_rank(with_some, 0, 3, 2, num_feature_layers=0)


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"of another connector",
        encode_digests([of_heads(0, 0, 1, A)]),
        encode_digests([of_heads(0, 0, 1, A), of_heads(1, 1, 1, B)]),
        encode_digests([of_heads(0, 1, 1, A)]),
        encode_digests([of_heads(0, 0, 2, A), of_heads(0, 1, 1, B)]),
        encode_digests([of_heads(0, 0, 1, A), of_heads(0, 0, 1, A)]),
        encode_digests([of_heads(0, 0, 3, A)]),
        encode_digests([of_heads(0, 0, 0, A), of_heads(0, 0, 2, A)]),
        encode_digests([of_heads(0, 0, 2, A)])[:-1],
        encode_digests([PartDigest(0, 0, 2, 0, 2, A)]),
        encode_digests([PartDigest(0, 0, 2, 0, 2, A), PartDigest(0, 2, 2, 0, 2, B)]),
        encode_digests([PartDigest(0, 0, 2, 0, 2, A), PartDigest(0, 2, 1, 0, 1, B)]),
        encode_digests([PartDigest(0, 0, 2, 0, 1, A), PartDigest(0, 0, 3, 1, 1, B), PartDigest(0, 2, 1, 0, 2, C)]),
        encode_digests([PartDigest(0, 0, 0, 0, 2, A), PartDigest(0, 0, 3, 0, 2, B)]),
    ],
)
def test_what_is_not_all_of_a_block_counts_for_nothing(encoded):
    assert digests_of_rank(encoded, 0, 3, 2) == []


def test_a_place_comes_before_its_digest():
    assert encode_place(3, Part(0, 3, 1, 2)) + A == encode_digests([of_heads(3, 1, 2, A)])


def test_addresses_of_ranks():
    joined = encode_address(b"first") + encode_address(b"") + encode_address(b"third")
    assert decode_addresses(joined) == [b"first", b"", b"third"]
    assert decode_addresses(b"") == []


@pytest.mark.parametrize("encoded", [b"\1", b"\4\0\0\0abc", encode_address(b"a") + b"\1\0\0\0", b"\xff" * 8])
def test_addresses_that_are_not_whole(encoded):
    assert decode_addresses(encoded) == []
