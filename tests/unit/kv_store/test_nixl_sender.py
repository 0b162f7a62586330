from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from common.engine.contract.layout import Part
from common.engine.contract.parts import decode_addresses
from common.errors import StoreError
from kv_store.nixl.address import NixlAddress, Region, decode_address
from kv_store.nixl.agent import Agent, BlockList, load_nixl
from kv_store.nixl.heads import Cut, SlabShape
from kv_store.nixl.sender import NixlTransfer, Sender
from kv_store.staging import layout_of
from tests.contract.connector_rig import DEADLINE_S, create_kv_cache
from tests.contract.direct_rig import DirectRig, nixl_rig

SLAB = SlabShape.of(layout_of(create_kv_cache(1)))
WHOLE = SLAB.cut(Part(0, SLAB.num_layers, 0, 2), in_one_run=True)


@pytest.fixture
def peers() -> Iterator[list[DirectRig]]:
    rigs = [nixl_rig(create_kv_cache(seed=seed)) for seed in (1, 2, 3)]
    yield rigs
    for rig in rigs:
        rig.close()


@pytest.fixture
def prepared(monkeypatch) -> list[str | None]:
    """Whose blocks were prepared; None is the sender itself."""
    calls: list[str | None] = []
    prepare = Agent.prepare_blocks

    def count(agent: Agent, region: Region, cut: Cut, peer: str | None = None) -> BlockList:
        calls.append(peer)
        return prepare(agent, region, cut, peer)

    monkeypatch.setattr(Agent, "prepare_blocks", count)
    return calls


@contextlib.contextmanager
def sender(kv_cache: torch.Tensor, max_peers: int = 256) -> Iterator[Sender]:
    block_bytes = kv_cache[0].numel() * kv_cache.itemsize
    region = Region(
        memory="DRAM", device_id=0, base=kv_cache.data_ptr(), num_blocks=len(kv_cache), block_bytes=block_bytes
    )
    made = Sender(load_nixl(), region, max_peers)
    try:
        yield made
    finally:
        made.abandon()


def finish(made: Sender, transfer: NixlTransfer) -> None:
    """Ask until it is done."""
    give_up = time.monotonic() + DEADLINE_S
    while not made.is_done(transfer):
        assert time.monotonic() < give_up, "the write does not end"


def address_of(rig: DirectRig) -> NixlAddress:
    (address,) = decode_addresses(rig.address)
    return decode_address(address)


def test_block_lists_are_prepared_once(peers, prepared):
    one, other, _ = map(address_of, peers)
    with sender(create_kv_cache()) as made:
        for address in (one, other, one, other, one):
            finish(made, made.post(address, WHOLE, [1, 2], WHOLE, [3, 4]))
    assert prepared == [None, one.agent_name, other.agent_name]


def test_the_least_recently_used_peer_goes_first(peers, prepared):
    one, other, third = map(address_of, peers)
    with sender(create_kv_cache(), max_peers=2) as made:
        for address in (one, other, one, third, one, other):
            finish(made, made.post(address, WHOLE, [1], WHOLE, [3]))
    names = [address.agent_name for address in (one, other, third, other)]
    assert prepared == [None, *names]


def test_a_peer_that_is_written_to_is_kept(peers, prepared):
    one, other, _ = map(address_of, peers)
    kv_cache = create_kv_cache()
    with sender(kv_cache, max_peers=1) as made:
        first = made.post(one, WHOLE, [1], WHOLE, [3])
        finish(made, made.post(other, WHOLE, [1], WHOLE, [3]))
        finish(made, first)
    assert peers[0].bits([3]) == peers[1].bits([3]) == [kv_cache[1].numpy().tobytes()]


def test_after_abandon_peers_are_met_anew(peers, prepared):
    one = address_of(peers[0])
    with sender(create_kv_cache()) as made:
        finish(made, made.post(one, WHOLE, [1], WHOLE, [3]))
        made.abandon()
        made.abandon()
        finish(made, made.post(one, WHOLE, [1], WHOLE, [3]))
    assert prepared == [None, one.agent_name] * 2


def test_a_peer_that_broke_is_met_anew_when_nothing_is_under_way_to_it(peers, prepared, monkeypatch):
    def fail(*_: object) -> None:
        raise StoreError("nixl: no")

    removed: list[str] = []
    remove = Agent.remove_peer
    monkeypatch.setattr(Agent, "remove_peer", lambda agent, name: (removed.append(name), remove(agent, name)))
    one = address_of(peers[0])
    with sender(create_kv_cache()) as made:
        first = made.post(one, WHOLE, [1], WHOLE, [3])
        with monkeypatch.context() as patched:
            patched.setattr(Agent, "write", fail)
            with pytest.raises(StoreError, match="no"):
                made.post(one, WHOLE, [1], WHOLE, [4])
        with pytest.raises(StoreError, match="is broken"):
            made.post(one, WHOLE, [1], WHOLE, [4])
        assert removed == []
        finish(made, first)
        assert removed == [one.agent_name]
        finish(made, made.post(one, WHOLE, [1], WHOLE, [4]))
    assert prepared == [None, one.agent_name, one.agent_name]


def test_a_peer_that_is_gone_is_forgotten(peers, prepared):
    gone = nixl_rig()
    address = address_of(gone)
    with sender(create_kv_cache()) as made:
        finish(made, made.post(address, WHOLE, [1], WHOLE, [3]))
        gone.close()
        with contextlib.suppress(StoreError):
            while True:  # UCX may take a write before it notices
                finish(made, made.post(address, WHOLE, [1], WHOLE, [3]))
        with pytest.raises(StoreError, match="nixl"):
            finish(made, made.post(address, WHOLE, [1], WHOLE, [3]))
        finish(made, made.post(address_of(peers[0]), WHOLE, [1], WHOLE, [3]))
