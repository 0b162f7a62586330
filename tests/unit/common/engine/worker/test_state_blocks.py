"""States in the blocks of ranks: the same bytes, however a model is cut."""

import pytest
import torch

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.devices.ranks import OneRank
from common.engine.worker.state_blocks import StateBlocks

NUM_LAYERS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCKS_PER_STATE = 3, 2, 4, 3, 2
IDS = torch.tensor([5, 2])


class GatheringRanks(OneRank):
    """A rank, with what all of them are known to say."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.said = []

    def all_gather_last(self, tensor):
        return torch.cat([each.view(tensor.dtype).view(1, -1) for each in self.said], dim=-1)


def blocks_of(rank, size, kv_cache):
    return StateBlocks(kv_cache, GatheringRanks(rank, size), num_kv_heads=NUM_HEADS, blocks_per_state=BLOCKS_PER_STATE)


@pytest.mark.parametrize(("degree", "layers_by_stage"), [(1, ()), (2, ()), (4, ()), (1, (1, 2)), (2, (2, 1))])
def test_a_rank_has_the_part_of_its_layers_and_heads(degree, layers_by_stage):
    shape = (8, NUM_LAYERS, 2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM)
    whole = torch.zeros(shape)
    uncut = blocks_of(0, 1, whole)
    state = torch.randint(256, uncut.shape, dtype=torch.uint8)
    uncut.save(state, IDS)
    assert torch.equal(uncut.load(IDS), state)
    group = KVGroupSpec(tuple(range(NUM_LAYERS)), NUM_HEADS, HEAD_DIM, HEAD_DIM, "float32")
    shards = KVLayout(BLOCK_SIZE, (group,), degree, layers_by_stage).shards
    expected = [
        whole[:, shard.layers.start : shard.layers.stop, :, shard.heads.start : shard.heads.stop] for shard in shards
    ]
    caches = [torch.zeros(each.shape) for each in expected]
    ranks = [blocks_of(number % degree, degree, cache) for number, cache in enumerate(caches)]
    for rank, shard, cache, wanted in zip(ranks, shards, caches, expected, strict=True):
        rank.save(state[shard.layers.start : shard.layers.stop], IDS)
        assert torch.equal(cache.view(torch.uint8), wanted.contiguous().view(torch.uint8))
    for number, (rank, shard) in enumerate(zip(ranks, shards, strict=True)):
        stage = number // degree * degree
        rank._ranks.said = [cache[IDS].flatten() for cache in caches[stage : stage + degree]]
        assert torch.equal(rank.load(IDS), state[shard.layers.start : shard.layers.stop])
