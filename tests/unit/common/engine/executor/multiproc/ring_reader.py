"""A reader of a ring: echoes a digest of each message over its channel, after the pause that the message asks for."""

from __future__ import annotations

import hashlib
import socket
import sys
import time

from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.ring import RingDescriptors, RingReader


def main() -> None:
    channel = Channel(socket.socket(fileno=0))
    memory, filled, free = map(int, sys.argv[1:])
    ring = RingReader(RingDescriptors(memory, filled, free), channel)
    while (message := ring.read()) != b"end":
        if message.startswith(b"sleep"):
            time.sleep(float(message[5:]))
        channel.send(hashlib.sha256(message).digest())


if __name__ == "__main__":
    main()
