"""Layers by their windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import KVSpec
from common.engine.kv_cache import KVGroups, create_kv_cache_manager
from common.engine.model.kv_groups import by_window, default_block_size, share_blocks, with_states
from tests.unit.common.engine.kv_cache.test_kv_cache_manager import make_request

SPEC = KVSpec(1, 2, 16, 16, torch.float32)
FULL, WINDOW, CHUNKED = None, Window(1024), Window(8192, is_chunked=True)


def every(number: int, num_layers: int, window: Window = WINDOW) -> list[Window | None]:
    """Each so-manieth layer has no window, as in Gemma 3 with 6."""
    return [FULL if layer % number == number - 1 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "sizes"),  # of groups without a window, and with one
    [
        ([FULL] * 4, ([4], [])),
        ([WINDOW] * 4, ([4], [])),  # nothing falls out of a single group
        (every(2, 26), ([13], [13])),  # Gemma 2 2B, gpt-oss
        (every(6, 26), ([4], [4, 4, 4, 4, 3, 3])),  # Gemma 3 1B
        (every(6, 34), ([5], [5, 5, 5, 5, 5, 4])),  # 4B
        (every(6, 48), ([8], [8] * 5)),  # 12B
        (every(6, 62), ([10], [9] * 4 + [8] * 2)),  # 27B
        (every(4, 32), ([8], [8] * 3)),  # Cohere2 7B
        ([FULL] * 12 + [WINDOW] * 5, ([4, 4, 4], [5])),
        ([FULL] * 6 + [WINDOW] * 5, ([6], [5])),  # nearly as many
        (every(40, 40), ([1], [5] * 7 + [4])),  # not forty
        (every(4, 48, CHUNKED), ([12], [12] * 3)),  # Llama 4
    ],
)
def test_groups_have_as_many_layers_as_there_are_of_the_rarer_kind(
    windows: list[Window | None], sizes: tuple[list[int], list[int]]
) -> None:
    groups = by_window(SPEC, windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all({windows[layer] for layer in group.layers} == {group.sees} for group in groups) or len(groups) == 1
    found = [[len(group.layers) for group in groups if (group.kind == "full") == is_full] for is_full in (True, False)]
    assert found == list(sizes)
    assert [group.kind == "full" for group in groups] == [True] * len(sizes[0]) + [False] * len(sizes[1])
    assert share_blocks(groups, [range(len(windows))]) == (max(map(len, (group.layers for group in groups))),)


def test_a_state_takes_as_many_blocks_as_its_largest_layer() -> None:
    layer_bytes = SPEC.bytes_per_block(16)
    groups = by_window(SPEC, [FULL] * 3)
    sizes = (layer_bytes, 2 * layer_bytes + 1, 2 * layer_bytes)
    found, _ = with_states(groups, SPEC, sizes, 16)
    assert [(group.kind, group.layers) for group in found[1:]] == [("state", (0, 1, 2))] * 3
    assert [group.state_bytes for group in found[1:]] == [3 * layer_bytes, 2 * layer_bytes, 1]


@pytest.mark.parametrize(
    ("blocks_of_16", "block_size"), [(1, 16), (16, 16), (17, 32), (33, 64), (1024, 1024), (2000, 1024)]
)
def test_the_default_block_size_leaves_a_state_few_blocks(blocks_of_16: int, block_size: int) -> None:
    groups, state_bytes = by_window(SPEC, [FULL] * 2), [1, blocks_of_16 * SPEC.bytes_per_block(16)]
    assert default_block_size(groups, SPEC, state_bytes) == block_size
    assert default_block_size(groups, replace(SPEC, num_kv_heads=1), state_bytes) == block_size, "on each of two ranks"


@pytest.mark.parametrize(("groups", "state_bytes"), [((), [10**9]), (by_window(SPEC, [FULL] * 2), [])])
def test_the_default_block_size_of_models_without_states_or_attention(groups, state_bytes) -> None:
    assert default_block_size(groups, SPEC, state_bytes) == 16


def test_a_rank_has_as_many_groups_of_states_as_all_have() -> None:
    whole = replace(SPEC, num_layers=3)
    groups, sizes = by_window(whole, [FULL] * 3), (5000, 7000, 9000)
    alone, _ = with_states(groups, whole, sizes, 16)
    for own in (replace(whole, num_kv_heads=1), replace(whole, num_layers=2)):
        assert with_states(groups, own, sizes, 16) == (alone, own)


def num_sequences(num_tokens: int, windows: list[Window | None], num_layers_of_pool: int, *, by_group: bool) -> int:
    """How many sequences are held once they are computed, in a pool of so many blocks of one layer."""
    groups = by_window(SPEC, windows if by_group else [FULL] * len(windows))
    num_blocks = num_layers_of_pool // share_blocks(groups, [range(len(windows))])[0] + 1  # and the null block
    kv = create_kv_cache_manager(num_blocks, KVGroups(groups, 16), enable_prefix_caching=False)
    for number in range(1000):
        request = make_request(str(number), range(num_tokens))
        if not kv.can_allocate(request, [], 0):
            return number
        kv.allocate(request, [])
        request.num_computed_tokens = num_tokens
        kv.cache_computed(request)
    raise AssertionError("too many")


@pytest.mark.parametrize("num_layers", [34, 48])
def test_gemma_3_holds_three_times_as_many_sequences_of_8k_tokens(num_layers: int) -> None:
    windows, pool = every(6, num_layers), num_layers * 512 * 20  # of twenty sequences
    plain = num_sequences(8192, windows, pool, by_group=False)
    assert plain == 20
    assert num_sequences(8192, windows, pool, by_group=True) >= 3 * plain
