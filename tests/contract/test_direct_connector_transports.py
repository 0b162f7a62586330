"""What goes through a direct connector arrives bit for bit in another process, whichever transport carries it."""

from __future__ import annotations

import pytest
import torch

from common.types import hash_prompt, root_hash
from tests.contract.connector_rig import BLOCK_SIZE
from tests.contract.direct_peer import direct_peer, sha256_of
from tests.contract.direct_rig import nixl_rig

NUM_BLOCKS = 65
BLOCKS = list(range(1, NUM_BLOCKS))
HASHES = hash_prompt(list(range(len(BLOCKS) * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
TRANSPORTS = {  # UCX_TLS, and what UCX says it writes with; shared memory needs TCP beside it, to notice a peer's death
    "tcp": ("tcp", "tcp/"),
    "shared memory": ("tcp,shm", "cma/memory"),
    "what UCX takes by itself": ("all", ""),
}
HEAD_DIMS = {"blocks of 24 KiB": 128, "blocks of 384 KiB": 2048}


@pytest.fixture(
    params=[
        pytest.param("tcp", marks=pytest.mark.matrix),
        pytest.param("shared memory", marks=pytest.mark.matrix),
        "what UCX takes by itself",
    ]
)
def carrier(request, monkeypatch):
    """What UCX is to say that it writes with."""
    allowed, carrier = TRANSPORTS[request.param]
    monkeypatch.setenv("UCX_TLS", allowed)
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    return carrier


@pytest.mark.parametrize("blocks", HEAD_DIMS)
def test_bit_for_bit(carrier, blocks, capfd):
    rig = nixl_rig(random_kv_cache(HEAD_DIMS[blocks]))
    target = [*range(40, 0, -1), *range(41, NUM_BLOCKS)]  # one by one, and a run
    with direct_peer(NUM_BLOCKS, HEAD_DIMS[blocks]) as peer:
        saved = rig.save(BLOCKS, HASHES, peer.address, target)
        assert (saved.num_blocks_ok, saved.error) == (len(BLOCKS), "")
        loaded = peer.load(target, HASHES, saved.digests)
        assert (loaded.num_blocks_ok, loaded.error) == (len(BLOCKS), "")
        assert loaded.sha256 == sha256_of(rig.kv_cache[BLOCKS])
        assert peer.load([0], HASHES[:1], [bytes(16)]).values == [0]
    rig.close()
    assert carrier in capfd.readouterr().out


def test_a_killed_peer_fails_its_transfers_and_the_next_one_is_served(carrier):
    rig = nixl_rig(random_kv_cache(head_dim=128))
    with direct_peer(NUM_BLOCKS, head_dim=128) as peer:
        assert rig.save(BLOCKS, HASHES, peer.address, BLOCKS).error == ""
        peer.kill()
        assert rig.save(BLOCKS, HASHES, peer.address, BLOCKS).error == "store_failed"
    with direct_peer(NUM_BLOCKS, head_dim=128) as successor:
        saved = rig.save(BLOCKS, HASHES, successor.address, BLOCKS)
        assert successor.load(BLOCKS, HASHES, saved.digests).sha256 == sha256_of(rig.kv_cache[BLOCKS])
    rig.close()


def random_kv_cache(head_dim: int) -> torch.Tensor:
    shape = (NUM_BLOCKS, 3, 2, 2, BLOCK_SIZE, head_dim)
    num_bytes = torch.Size(shape).numel() * 4
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(torch.float32).view(shape)
