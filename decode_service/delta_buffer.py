"""Deltas that a session has not sent yet. A slow router gets fewer, bigger messages: deltas of one request merge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from common.pb import pods_pb2


class DeltaBuffer:
    """Filled synchronously in each step, emptied by one writer. Holds at most one delta per key."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._pending: dict[Hashable, pods_pb2.TokenDelta] = {}
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False

    def put(self, key: Hashable, delta: pods_pb2.TokenDelta) -> None:
        """Appends `delta` to the pending delta of `key`."""
        pending = self._pending.get(key)
        if pending is None:
            self._pending[key] = delta
        else:
            _merge(pending, delta)
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Returns once fewer than `max_keys` deltas are pending. Callers that add keys at the peer's
        request wait here."""
        while len(self._pending) >= self._max_keys:
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """Lets `write_to` return once everything is written."""
        self._closed = True
        self._changed.set()

    async def write_to(self, write: Callable[[pods_pb2.DecodeEvents], Awaitable[None]]) -> None:
        """Writes pending deltas as they come, until closed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._pending:
                pending, self._pending = self._pending, {}
                self._taken.set()
                await write(pods_pb2.DecodeEvents(deltas=pending.values()))
            if self._closed and not self._pending:
                return


def _merge(pending: pods_pb2.TokenDelta, delta: pods_pb2.TokenDelta) -> None:
    if not pending.token_ids:
        pending.start_index = delta.start_index
    if not pending.prompt_logprobs:
        pending.prompt_start = delta.prompt_start
    pending.prompt_logprobs.extend(delta.prompt_logprobs)
    pending.token_ids.extend(delta.token_ids)
    pending.logprobs.extend(delta.logprobs)
    pending.num_verified_drafts += delta.num_verified_drafts
    pending.num_accepted_drafts += delta.num_accepted_drafts
    pending.finish_reason = pending.finish_reason or delta.finish_reason
    if delta.HasField("error"):
        pending.error.CopyFrom(delta.error)
    if delta.HasField("report"):
        pending.report.CopyFrom(delta.report)
