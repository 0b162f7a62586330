"""Messages to all ranks of one machine: a ring of slots in shared memory, with one writer and several readers.

1. The writer waits until every reader has returned the next slot, fills it, and counts up what each reader has to read.
2. A reader waits for that, copies the message out, and returns the slot.

Both counts are eventfds, a pair for each reader: whoever waits sleeps. A message larger than a slot goes over the
readers' channels; a slot without a message stands for it, which keeps the order.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections.abc import Sequence
from typing import NamedTuple

from common.engine.executor.multiproc.channel import Channel

NUM_SLOTS = 8
SLOT_BYTES = 2**16  # of a message and its length; a step of 64 decodes takes some 5 KB

_LENGTH = struct.Struct("=I")
_ELSEWHERE = 0  # length that stands for a message that comes over the channel


class RingDescriptors(NamedTuple):
    """The descriptors that a reader inherits."""

    memory: int
    filled: int  # slots that it has to read
    free: int  # slots that it has returned


class RingWriter:
    """The writer's end. Used by one thread at a time."""

    def __init__(self, channels: Sequence[Channel], timeout_s: float, elsewhere: Sequence[Channel] = ()) -> None:
        """`channels`: those to the readers. `timeout_s`: most seconds to wait for a reader. `elsewhere`: channels to
        readers on other machines, who read each message there."""
        self._channels = channels
        self._elsewhere = elsewhere
        self._timeout_s = timeout_s
        self._next = 0
        memory = self._memory = os.memfd_create("baton-ranks")
        os.ftruncate(memory, NUM_SLOTS * SLOT_BYTES)
        self._slots = mmap.mmap(memory, NUM_SLOTS * SLOT_BYTES)
        semaphore = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        self._descriptors = [
            RingDescriptors(memory, os.eventfd(0, semaphore), os.eventfd(NUM_SLOTS, semaphore | os.EFD_NONBLOCK))
            for _ in channels
        ]

    def descriptors(self, reader: int) -> RingDescriptors:
        """Returns the descriptors that the process of this reader inherits."""
        return self._descriptors[reader]

    def write(self, message: bytes) -> None:
        """Sends a message to all readers. Raises TimeoutError if one does not return a slot in time, OSError if one's
        channel is closed."""
        for descriptors in self._descriptors:
            self._take_slot(descriptors.free)
        for channel in self._elsewhere:
            channel.send(message)
        fits = len(message) <= SLOT_BYTES - _LENGTH.size
        start = self._next * SLOT_BYTES
        _LENGTH.pack_into(self._slots, start, len(message) if fits else _ELSEWHERE)
        if fits:
            first = start + _LENGTH.size
            self._slots[first : first + len(message)] = message
        self._next = (self._next + 1) % NUM_SLOTS
        for descriptors in self._descriptors:
            os.eventfd_write(descriptors.filled, 1)
        if not fits:
            for channel in self._channels:
                channel.send(message)

    def close(self) -> None:
        """Releases the memory. Idempotent. Readers do not notice."""
        if self._slots.closed:
            return
        self._slots.close()
        os.close(self._memory)
        for descriptors in self._descriptors:
            os.close(descriptors.filled)
            os.close(descriptors.free)
        self._descriptors = []

    def _take_slot(self, free: int) -> None:
        while True:
            try:
                os.eventfd_read(free)
                return
            except BlockingIOError:
                poll = select.poll()
                poll.register(free, select.POLLIN)
                if not poll.poll(1000 * self._timeout_s):
                    raise TimeoutError from None


class RingReader:
    """A reader's end, in another process. Used by one thread."""

    def __init__(self, descriptors: RingDescriptors, channel: Channel) -> None:
        self._slots = mmap.mmap(descriptors.memory, NUM_SLOTS * SLOT_BYTES, prot=mmap.PROT_READ)
        self._filled = descriptors.filled
        self._free = descriptors.free
        self._channel = channel
        self._next = 0

    def read(self) -> bytes | bytearray:
        """Waits for a message. Raises EOFError if the writer ends in the middle of one."""
        os.eventfd_read(self._filled)
        start = self._next * SLOT_BYTES
        (length,) = _LENGTH.unpack_from(self._slots, start)
        first = start + _LENGTH.size
        message = self._slots[first : first + length]
        self._next = (self._next + 1) % NUM_SLOTS
        os.eventfd_write(self._free, 1)
        return self._channel.receive() if length == _ELSEWHERE else message
