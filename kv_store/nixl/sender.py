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

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Most peers that stay connected; the least recently used are disconnected first. A restarted peer is a new one."""


class _Peer:
    def __init__(self, name: str, blocks: BlockList) -> None:
        self.name = name
        self.blocks = blocks
        self.num_under_way = 0
        self.is_broken = False


@dataclass(frozen=True, slots=True, eq=False)
class NixlTransfer:
    """A transfer of blocks to a peer."""

    handle: Handle
    peer: _Peer


class Sender:
    """Writes blocks of `region` into peers' blocks. For one thread."""

    def __init__(self, bindings: Any, region: Region, max_peers: int = MAX_PEERS) -> None:
        self._bindings = bindings
        self._region = region
        self._max_peers = max_peers
        self._agent: Agent | None = None
        self._own_blocks: BlockList | None = None
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # least recently used first

    def post(self, address: NixlAddress, block_ids: Sequence[int], to_ids: Sequence[int]) -> NixlTransfer:
        """Starts to write. Raises StoreError, after which nothing is in flight."""
        agent, own_blocks = self._opened()
        peer = self._peer(agent, address)
        try:
            handle = agent.write(own_blocks, block_ids, peer.blocks, to_ids)
        except StoreError:
            self._break(agent, peer)
            raise
        peer.num_under_way += 1
        return NixlTransfer(handle, peer)

    def is_done(self, transfer: NixlTransfer) -> bool:
        """True once all is written; False while it is in flight. Raises StoreError if it failed. Must not be called
        again after True or an error."""
        agent, _ = self._opened()
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
        self._own_blocks = None
        self._peers.clear()
        if agent is not None:
            agent.close()

    def _opened(self) -> tuple[Agent, BlockList]:
        if self._agent is None:
            self._agent = Agent(self._bindings, self._region)
        if self._own_blocks is None:
            self._own_blocks = self._agent.prepare_blocks(self._region)
        return self._agent, self._own_blocks

    def _peer(self, agent: Agent, address: NixlAddress) -> _Peer:
        peer = self._peers.get(address.agent_name)
        if peer is None:
            peer = self._meet(agent, address)
        if peer.is_broken:
            raise StoreError(f"nixl: the connection to agent {peer.name} is broken")
        self._peers.move_to_end(peer.name)
        return peer

    def _meet(self, agent: Agent, address: NixlAddress) -> _Peer:
        agent.add_peer(address.agent_name, address.metadata)
        try:
            blocks = agent.prepare_blocks(address.region, address.agent_name)
        except StoreError:
            agent.remove_peer(address.agent_name)
            raise
        peer = self._peers[address.agent_name] = _Peer(address.agent_name, blocks)
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
            agent.release_blocks(peer.blocks)
            agent.remove_peer(peer.name)
