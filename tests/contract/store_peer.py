"""An engine in a process of its own, to be killed: `python -m tests.contract.store_peer CONNECTOR PLACE KIND STOP_AT`.

It saves or loads HASHES, one block at a time. When it comes to the store operation STOP_AT for the second time, it says
so and waits to be killed; with STOP_AT "end" when the transfer has settled.
"""

from __future__ import annotations

import subprocess
import sys

from common.types import hash_prompt, root_hash
from kv_store.base import BlockStore
from kv_store.redis_store import RedisOptions, RedisStore
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore
from tests.contract.connector_rig import BLOCK_SIZE, EngineRig, create_kv_cache, gated_connector

HASHES = hash_prompt(list(range(4 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
BLOCKS = [1, 2, 3, 4]
STOPPED = b"stopped\n"


def store_at(connector: str, place: str) -> BlockStore:
    """`place` is what the connector needs to find its medium."""
    if connector == "redis":
        return RedisStore(RedisOptions(url=place))
    return SharedStorageStore(SharedStorageOptions(path=place, max_bytes=1 << 20))


def run_and_kill(connector: str, place: str, kind: str, stop_at: str) -> None:
    """Start such a process and kill it once it has come to `stop_at`."""
    command = [sys.executable, "-m", "tests.contract.store_peer", connector, place, kind, stop_at]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        said = peer.stdout.readline()
        peer.kill()
    assert said == STOPPED


class _Place:
    """See Place."""

    def __init__(self, connector: str, place: str) -> None:
        self._where = (connector, place)

    def store(self) -> BlockStore:
        return store_at(*self._where)


def main() -> None:
    """Run until killed."""
    connector_name, place, kind, stop_at = sys.argv[1:]
    connector, store = gated_connector(_Place(connector_name, place), frames=1)
    rig = EngineRig(connector, create_kv_cache(seed=1))
    start = rig.start_save if kind == "save" else rig.start_load
    if stop_at == "end":
        assert rig.wait(start(BLOCKS, HASHES)).error == ""
        _say_and_wait()
    with store.gate(stop_at) as gate:
        start(BLOCKS, HASHES)
        gate.wait_for_arrival()
        gate.let_one_through()
        gate.wait_for_arrival()
        _say_and_wait()


def _say_and_wait() -> None:
    sys.stdout.buffer.write(STOPPED)
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
