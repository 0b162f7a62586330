"""Engines that step together, since each has some of the experts that all need.

1. An engine whose step has tokens says so to all others: it joins the next common step, with so many.
2. The others hear of it on a thread, also while they are idle, and join, with their own tokens or none.
3. When all have joined, each runs the step, which carries the tokens of every engine: nothing else decides what ranks
   exchange. When no engine has tokens, none joins, and all sleep.

Each is on a socket to every other one. That an engine is gone ends the sockets to it, and with them the others.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from common.errors import EngineDeadError

_JOIN = struct.Struct("!QI")  # number of the step, tokens
_LEAVE = b"leave"


class Lockstep:
    """One engine's end. `join` is called by its step loop."""

    def __init__(
        self,
        data_parallel_rank: int,
        sockets: Mapping[int, socket.socket],
        timeout_s: float,
        on_awaited: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Takes ownership of `sockets`, one to each other engine, which keep messages apart. The callbacks are called
        on a thread: `on_awaited` when others want to step, `on_failure` when they cannot any more."""
        self._rank = data_parallel_rank
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._on_awaited = on_awaited
        self._on_failure = on_failure
        self._step = 0  # the last one
        self._joined: dict[int, deque[int]] = {rank: deque() for rank in sockets}  # tokens, of steps after that
        self._changed = threading.Condition()
        self._heard = dict.fromkeys(sockets, 0)  # the last step that each of them has joined
        self._left: set[int] = set()
        self._failure: Exception | None = None
        self._is_closed = False
        for each in sockets.values():
            each.set_inheritable(False)
            each.settimeout(timeout_s)
        self._thread = threading.Thread(target=self._listen, name="engine-lockstep", daemon=True)
        self._thread.start()

    @property
    def is_awaited(self) -> bool:
        """Whether another engine has joined the next step."""
        return any(self._joined.values())

    def join(self, num_tokens: int) -> list[int]:
        """Joins the next step, and returns the tokens of each engine once all have. Raises EngineDeadError if one is
        gone, or does not join in time."""
        self._step += 1
        message = _JOIN.pack(self._step, num_tokens)
        for rank, each in self._sockets.items():
            try:
                each.send(message)
            except OSError as error:
                raise self._failure or EngineDeadError(f"engine {rank} is gone") from error
        with self._changed:
            self._changed.wait_for(self._can_go_on, self._timeout_s)
            if self._failure is not None:
                raise self._failure
            missing = [rank for rank, tokens in self._joined.items() if not tokens]
            if missing:
                raise EngineDeadError(self._describe(missing))
            counts = {rank: tokens.popleft() for rank, tokens in self._joined.items()}
        counts[self._rank] = num_tokens
        return [counts[rank] for rank in sorted(counts)]

    def fail(self, error: Exception) -> None:
        """Ends waits: this engine, or another, has failed. May be called from any thread."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def close(self) -> None:
        """Leaves the others, who need not fail because of that. Idempotent."""
        self._is_closed = True
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                each.send(_LEAVE)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for each in self._sockets.values():
            each.close()

    def _can_go_on(self) -> bool:
        return self._failure is not None or all(tokens or rank in self._left for rank, tokens in self._joined.items())

    def _describe(self, missing: Sequence[int]) -> str:
        engines = " and ".join(f"engine {rank}" for rank in missing)
        if self._left.issuperset(missing):
            return f"{engines} has ended"
        return f"{engines} did not join step {self._step} within {self._timeout_s:g} s (step_timeout_s)"

    def _listen(self) -> None:
        rank_of = {each.fileno(): rank for rank, each in self._sockets.items()}
        poll = select.poll()
        for descriptor in rank_of:
            poll.register(descriptor, select.POLLIN)
        while rank_of:
            for descriptor, _ in poll.poll():
                if not self._take(rank_of[descriptor]):
                    poll.unregister(descriptor)
                    del rank_of[descriptor]

    def _take(self, rank: int) -> bool:
        """Takes a message. False: it was the last."""
        try:
            message = self._sockets[rank].recv(_JOIN.size)
        except OSError:
            message = b""
        if len(message) == _JOIN.size:
            step, num_tokens = _JOIN.unpack(message)
            self._heard[rank] += 1
            if step != self._heard[rank]:
                self._lose(
                    f"the engines have parted ways: engine {rank} joins step {step} after {self._heard[rank] - 1}"
                )
                return False
            with self._changed:
                self._joined[rank].append(num_tokens)
                self._changed.notify()
            self._on_awaited()
            return True
        if message == _LEAVE:
            with self._changed:
                self._left.add(rank)
                self._changed.notify()
        elif not self._is_closed:
            self._lose(f"engine {rank} is gone")
        return False

    def _lose(self, reason: str) -> None:
        error = EngineDeadError(reason)
        self.fail(error)
        self._on_failure(error)
