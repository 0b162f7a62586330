"""A NIXL agent with one registered region. It raises TransferError instead of NIXL's exceptions.

Uses NIXL's bindings rather than its `nixl_agent` class, which fixes the progress thread's delay to zero. With that
delay the idle thread takes a third of a core; with a longer one it sleeps until there is network traffic, and is no
slower.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, StoreError
from kv_store.nixl.address import Region
from kv_store.nixl.heads import Cut
from kv_store.nixl.installed import not_usable

logger = logging.getLogger(__name__)

BlockList = NewType("BlockList", int)  # NIXL's handle of a prepared descriptor list, see prepare_blocks
Handle = NewType("Handle", int)  # NIXL's handle of a transfer

_BACKEND = "UCX"
_PROGRESS_DELAY_US = 100_000
_OPENING = threading.Lock()  # NIXL loads plugins and UCX sets up transports for the whole process meanwhile


def load_nixl() -> Any:
    """Returns NIXL's bindings. Raises ConfigError if they are not installed or cannot be loaded."""
    raise_exceptions = logging.raiseExceptions  # which nixl turns off for the whole process
    try:
        import nixl._bindings as bindings
    except (ImportError, OSError) as error:
        raise not_usable(f"it cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")  # would print to stdout
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return bindings


class Agent:
    """One agent. After construction only one thread may use it at a time."""

    def __init__(self, bindings: Any, region: Region) -> None:
        """Raises ConfigError if the backend cannot be opened or the memory not registered."""
        self._nixl = bindings
        self._errors: tuple[type[Exception], ...] = tuple(
            kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self._memories = {"DRAM": bindings.DRAM_SEG, "VRAM": bindings.VRAM_SEG}
        self.name = uuid.uuid4().hex
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        try:
            with _OPENING:
                self._agent = bindings.nixlAgent(self.name, config)
                self._agent.createBackend(_BACKEND, {})
            descriptor = (region.base, region.num_blocks * region.block_bytes, region.device_id, "")
            self._registered = bindings.nixlRegDList(self._memories[region.memory], [descriptor])
            self._agent.registerMem(self._registered)
            self.metadata: bytes = self._agent.getLocalMD()
        except self._errors as error:
            raise ConfigError(
                f"connector nixl cannot open its {_BACKEND} backend for {region.memory} ({error})", param="connector"
            ) from error

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Registers another agent. Raises StoreError."""
        with self._mapped("meet"):
            found = self._agent.loadRemoteMD(metadata)
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            self.remove_peer(found)
            raise StoreError(f"nixl: the peer is agent {found}, not {name}", param="address")

    def remove_peer(self, name: str) -> None:
        """Disconnects from a peer to which no transfer is in flight."""
        with suppress(*self._errors):  # NIXL has dropped the peer already
            self._agent.invalidateRemoteMD(name)

    def prepare_blocks(self, region: Region, cut: Cut, peer: str | None = None) -> BlockList:
        """Prepares all blocks of this agent's region or of a peer's, one descriptor for each run of the cut.
        Raises StoreError, also if the peer has not registered them."""
        base, num_runs = region.base + cut.first_byte, region.num_blocks * cut.runs_per_block
        strided = np.array([[base, cut.run_bytes, region.device_id, cut.stride_bytes, num_runs]], dtype=np.uint64)
        with self._mapped("prepare"):
            owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
            return BlockList(self._agent.prepXferDlist(owner, self._memories[region.memory], strided))

    def release_blocks(self, blocks: BlockList) -> None:
        """Releases a prepared list."""
        with suppress(*self._errors):
            self._agent.releasedDlistH(blocks)

    def write(
        self, own: BlockList, own_ids: Sequence[int], source: Cut, to: BlockList, to_ids: Sequence[int], target: Cut
    ) -> Handle:
        """Starts to write a part of blocks, from lists prepared with these cuts; runs of adjacent ones become one
        descriptor. Raises StoreError, after which nothing is in flight."""
        with self._mapped("prepare"):
            handle = Handle(
                self._agent.makeXferReq(
                    self._nixl.NIXL_WRITE,
                    own,
                    _descriptors(own_ids, source),
                    to,
                    _descriptors(to_ids, target),
                )
            )
        try:
            with self._mapped("post"):
                self._check(self._agent.postXferReq(handle))
        except StoreError:
            self.release(handle)
            raise
        return handle

    def is_done(self, handle: Handle) -> bool:
        """True once the peer's memory holds all of it; False while it is in flight. Raises StoreError if it failed."""
        with self._mapped("write"):
            return self._check(self._agent.getXferStatus(handle))

    def release(self, handle: Handle) -> None:
        """Releases a transfer that has ended."""
        with suppress(*self._errors):
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Disconnects from all peers. Afterwards NIXL neither reads nor writes this process's memory."""
        with suppress(*self._errors):
            self._agent.deregisterMem(self._registered)
        del self._agent  # the only reference: the agent's sockets are closed when this returns

    def _check(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise StoreError(f"nixl: {status}")

    @contextmanager
    def _mapped(self, step: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreError(f"nixl could not {step}: {error}") from error


def _descriptors(block_ids: Sequence[int], cut: Cut) -> npt.NDArray[np.int32]:
    """The indices of a part's descriptors in a BlockList."""
    runs: npt.NDArray[np.int32] = np.arange(cut.first_run, cut.first_run + cut.num_runs, dtype=np.int32)
    firsts = np.array(block_ids, dtype=np.int32) * cut.runs_per_block
    descriptors: npt.NDArray[np.int32] = np.add.outer(firsts, runs)
    return descriptors.reshape(-1)
