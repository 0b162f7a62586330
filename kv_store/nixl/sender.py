"""Transfers to peers, through an agent that can be replaced.

NIXL cannot stop a transfer in flight: releasing its handle and disconnecting from its peer both succeed, yet the
transport goes on reading the source blocks and writing the target's as soon as the peer accepts data again. Only the
end of the agent stops it. So the sender has an agent of its own, apart from the one whose address the peers know, and
`abandon` replaces it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import StoreError
from kv_store.nixl.address import NixlAddress, Region
from kv_store.nixl.agent import Agent, BlockList, Handle
from kv_store.nixl.heads import Cut

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Most peers that stay connected; the least recently used are disconnected first. A restarted peer is a new one."""


class _Peer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[Cut, BlockList] = {}
        self.num_under_way = 0
        self.is_broken = False


@dataclass(frozen=True, slots=True, eq=False)
class NixlTransfer:
    """A transfer of a part of blocks to a peer."""

    handle: Handle
    peer: _Peer


class Sender:
    """Writes blocks of `region` into peers' blocks. For one thread."""

    def __init__(self, bindings: Any, region: Region, max_peers: int = MAX_PEERS) -> None:
        self._bindings = bindings
        self._region = region
        self._max_peers = max_peers
        self._agent: Agent | None = None
        self._own_blocks: dict[Cut, BlockList] = {}
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # least recently used first

    def post(
        self, address: NixlAddress, source: Cut, block_ids: Sequence[int], target: Cut, to_ids: Sequence[int]
    ) -> NixlTransfer:
        """Starts to write a part of these blocks. Raises StoreError, after which nothing is in flight."""
        agent = self._opened()
        if source not in self._own_blocks:
            self._own_blocks[source] = agent.prepare_blocks(self._region, source)
        peer = self._peer(agent, address, target)
        try:
            own_blocks, blocks = self._own_blocks[source], peer.blocks[target]
            handle = agent.write(own_blocks, block_ids, source, blocks, to_ids, target)
        except StoreError:
            self._break(agent, peer)
            raise
        peer.num_under_way += 1
        return NixlTransfer(handle, peer)

    def is_done(self, transfer: NixlTransfer) -> bool:
        """True once all is written; False while it is in flight. Raises StoreError if it failed. Must not be called
        again after True or an error."""
        agent = self._opened()
        try:
            if not agent.is_done(transfer.handle):
                return False
        except StoreError:
            self._end(agent, transfer)
            self._break(agent, transfer.peer)
            raise
        self._end(agent, transfer)
        return True

    def abandon(self) -> None:
        """Stops all transfers, whose handles are invalid afterwards. Peers are reconnected at the next write.
        Idempotent."""
        agent, self._agent = self._agent, None
        self._own_blocks.clear()
        self._peers.clear()
        if agent is not None:
            agent.close()

    def _opened(self) -> Agent:
        if self._agent is None:
            self._agent = Agent(self._bindings, self._region)
        return self._agent

    def _peer(self, agent: Agent, address: NixlAddress, target: Cut) -> _Peer:
        peer = self._peers.get(address.agent_name)
        if peer is None:
            peer = self._meet(agent, address)
        if peer.is_broken:
            raise StoreError(f"nixl: the connection to agent {peer.name} is broken")
        if target not in peer.blocks:
            try:
                peer.blocks[target] = agent.prepare_blocks(address.region, target, peer.name)
            except StoreError:
                self._break(agent, peer)
                raise
        self._peers.move_to_end(peer.name)
        return peer

    def _meet(self, agent: Agent, address: NixlAddress) -> _Peer:
        agent.add_peer(address.agent_name, address.metadata)
        peer = self._peers[address.agent_name] = _Peer(address.agent_name)
        self._drop_idle_peers(agent, keep=peer)
        return peer

    def _drop_idle_peers(self, agent: Agent, keep: _Peer) -> None:
        idle = [peer for peer in self._peers.values() if not peer.num_under_way and peer is not keep]
        for peer in idle[: max(0, len(self._peers) - self._max_peers)]:
            self._drop(agent, peer)

    def _break(self, agent: Agent, peer: _Peer) -> None:
        """Drops the connection; the next write reconnects to the peer. Transfers in flight to it fail."""
        peer.is_broken = True
        if not peer.num_under_way:
            self._drop(agent, peer)

    def _end(self, agent: Agent, transfer: NixlTransfer) -> None:
        agent.release(transfer.handle)
        peer = transfer.peer
        peer.num_under_way -= 1
        if peer.is_broken and not peer.num_under_way:
            self._drop(agent, peer)

    def _drop(self, agent: Agent, peer: _Peer) -> None:
        if self._peers.pop(peer.name, None) is not None:
            for blocks in peer.blocks.values():
                agent.release_blocks(blocks)
            agent.remove_peer(peer.name)
