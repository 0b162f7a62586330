"""A consumer in a process of its own, to be stopped and killed: `python -m tests.contract.direct_peer BLOCKS HEAD_DIM`.

It prints its address, then for each line of blocks to be verified one with the result and what these blocks hold. At
the end of its input it closes.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from common.types import BlockHash
from tests.contract.connector_rig import BLOCK_SIZE


class Load(msgspec.Struct):
    """What the consumer is asked to verify."""

    block_ids: list[int]
    block_hashes: list[bytes]
    digests: list[bytes]


class Loaded(msgspec.Struct):
    """What it found."""

    num_blocks_ok: int
    error: str
    values: list[int]  # bytes that occur in these blocks
    sha256: str  # of these blocks


class DirectPeer:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = bytes.fromhex(self._line())

    def load(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], digests: Sequence[bytes]) -> Loaded:
        load = Load(list(block_ids), list(hashes), list(digests))
        self._process.stdin.write(msgspec.json.encode(load).decode() + "\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=Loaded)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        while line := self._process.stdout.readline():
            if line.startswith("> "):  # UCX writes its warnings to stdout
                return line[2:].strip()
        raise AssertionError(f"the peer ended with {self._process.wait()}")


@contextmanager
def direct_peer(num_blocks: int, head_dim: int) -> Iterator[DirectPeer]:
    """A consumer whose cache is all zeros. A block has 48 * BLOCK_SIZE * head_dim bytes."""
    command = [sys.executable, "-m", "tests.contract.direct_peer", str(num_blocks), str(head_dim)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield DirectPeer(process)
        finally:
            process.kill()


def uniform_kv_cache(num_blocks: int, head_dim: int, value: int) -> torch.Tensor:
    """A cache of which each byte is `value`."""
    shape = (num_blocks, 3, 2, 2, BLOCK_SIZE, head_dim)
    return torch.full((torch.Size(shape).numel() * 4,), value, dtype=torch.uint8).view(torch.float32).view(shape)


def sha256_of(blocks: torch.Tensor) -> str:
    """Of their bytes, one after the other."""
    return hashlib.sha256(blocks.contiguous().view(torch.uint8).numpy()).hexdigest()


def _main() -> None:
    from tests.contract.direct_rig import nixl_rig

    rig = nixl_rig(uniform_kv_cache(int(sys.argv[1]), int(sys.argv[2]), 0))
    _say(rig.address.hex())
    for line in sys.stdin:
        load = msgspec.json.decode(line, type=Load)
        result = rig.load(load.block_ids, load.block_hashes, load.digests)
        held = rig.kv_cache[load.block_ids].view(torch.uint8)
        loaded = Loaded(result.num_blocks_ok, result.error, torch.unique(held).tolist(), sha256_of(held))
        _say(msgspec.json.encode(loaded).decode())
    rig.close()


def _say(line: str) -> None:
    sys.stdout.write(f"> {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
