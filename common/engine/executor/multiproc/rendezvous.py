"""Ranks find each other: by a file, if they are on one machine, else by a store that the first rank hosts."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

GRACE_S = 5.0  # the driver's time for a step is over before that of a collective: it knows which rank is stopped
_SCHEME = "tcp://"
_TIMEOUT = timedelta(seconds=60)
_hosted: list[Store] = []  # ends with the process


class Rendezvous(NamedTuple):
    """One rank's view."""

    store: Store
    address: str  # of this machine, on the network on which the others are


def host_store(host: str, num_ranks: int) -> str:
    """Hosts a store at this address. Returns its rendezvous."""
    store = TCPStore(host, 0, num_ranks, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    _hosted.append(store)
    return f"{_SCHEME}{host}:{store.port}"


def open_rendezvous(rendezvous: str, num_ranks: int) -> Rendezvous:
    """The store at this rendezvous, see LoadModel."""
    if not rendezvous.startswith(_SCHEME):
        return Rendezvous(FileStore(rendezvous, num_ranks), "127.0.0.1")  # nothing of theirs is seen on the network
    host, _, port = rendezvous.removeprefix(_SCHEME).rpartition(":")
    store = TCPStore(host, int(port), num_ranks, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    return Rendezvous(store, _address_towards(host, int(port)))


def _address_towards(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as own:
        own.connect((host, port))  # sends nothing
        return str(own.getsockname()[0])
