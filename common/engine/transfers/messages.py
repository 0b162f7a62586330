"""The messages between the step loop and the transfer thread. Commands of clients (TransferUpdate, TransferTarget,
TransferQuiesced, AbortRequests) are passed on as they are.

Blocks in a message are pinned. Those of a handoff are given back with Closed, others with the answer to their ticket.
"""

from __future__ import annotations

from typing import NamedTuple

from common.engine.contract.step import Fence
from common.engine.messages import AbortRequests, TransferQuiesced, TransferTarget, TransferUpdate
from common.engine.scheduler.kv_transfers import HandedOver
from common.types import BlockHash, RequestId


class Announce(NamedTuple):
    """A request with a handoff was added. Its id was never used before."""

    request_id: RequestId
    epoch: int
    is_producer: bool
    num_prompt_tokens: int


class Blocks(NamedTuple):
    """A run of blocks, [first, first + len(ids)) of their request in the order of BlockOrder."""

    first: int
    ids: tuple[int, ...]
    keys: tuple[BlockHash, ...]
    fence: Fence


class Receive(NamedTuple):
    """A consumer has reserved `blocks`, the prompt's but for those found in the prefix cache, and waits for KV."""

    request_id: RequestId
    blocks: Blocks


class Send(NamedTuple):
    """A producer has computed further blocks of its prompt. The last block of all may be partial."""

    request_id: RequestId
    blocks: Blocks


class LookUp(NamedTuple):
    """Which blocks of these does a tier keep? Answered by Moved."""

    ticket: int
    request_id: RequestId  # for logs
    keys: tuple[BlockHash, ...]


class Restore(NamedTuple):
    """Fill these blocks from a tier. Answered by Moved."""

    ticket: int
    request_id: RequestId  # for logs
    blocks: Blocks


class Offload(NamedTuple):
    """Save these full blocks, of several requests, to a tier. Answered by Moved."""

    ticket: int
    blocks: Blocks


class Withdraw(NamedTuple):
    """The answer to a ticket is no longer needed: cancel its job."""

    ticket: int


class End(NamedTuple):
    """The request has ended. `is_aborted`: blocks that are not saved need not be."""

    request_id: RequestId
    is_aborted: bool


Message = (
    Announce
    | Receive
    | Send
    | Restore
    | LookUp
    | Offload
    | Withdraw
    | End
    | TransferUpdate
    | TransferTarget
    | TransferQuiesced
    | AbortRequests
)


class Moved(NamedTuple):
    """A lookup, a restore or an offload has ended."""

    ticket: int
    num_blocks: int  # leading blocks found, valid or saved
    found: tuple[bool, ...] = ()  # of a lookup: each of the blocks


class Closed(NamedTuple):
    """No job of this producer or consumer is left, and no transport touches its blocks."""

    request_id: RequestId


TransferEvent = Moved | HandedOver | Closed
