"""Where the servers of a fleet run, and how a test reaches them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from deploy.cluster_config import LOOPBACK

_HUB = "hub"  # the namespace of routers and stores; pods have one each
_SUBNET = "10.77.0"
_NOWHERE = "02:00:00:00:00:00"  # an Ethernet address that nobody has: what is sent to it is lost in silence
_COMMAND_DEADLINE_S = 10.0


class Network(Protocol):
    """Gives each server a place."""

    def host(self, name: str) -> str:
        """Address on which the server listens."""

    def within(self, name: str) -> tuple[str, ...]:
        """The command that runs another one where the server runs."""

    def expose(self, addresses: Sequence[str]) -> None:
        """Makes these host:port reachable for the test; once, before `reach`."""

    def reach(self, address: str) -> str:
        """What a gRPC client in the test connects to instead of host:port."""


class Loopback:
    """All on one address of this machine."""

    def host(self, name: str) -> str:
        """See Network."""
        return LOOPBACK

    def within(self, name: str) -> tuple[str, ...]:
        """See Network."""
        return ()

    def expose(self, addresses: Sequence[str]) -> None:
        """See Network."""

    def reach(self, address: str) -> str:
        """See Network."""
        return address


class Namespaces:
    """Each pod in a network namespace of its own, joined to the hub by a bridge; no privileges are needed.

    A test stays outside, where there is no way in: a process in the hub passes Unix sockets on.
    """

    def __init__(self, pods: Sequence[str], directory: Path) -> None:
        """Raises CalledProcessError or OSError where namespaces cannot be made. `close` in any case."""
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._hosts = {pod: f"{_SUBNET}.{number}" for number, pod in enumerate(pods, 2)}
        self._exposing: subprocess.Popen[str] | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        self._open(_HUB, ("unshare", "--user", "--map-root-user", "--net"))
        self._ip(_HUB, "link set dev lo up")
        self._ip(_HUB, "link add name bridge0 type bridge")
        self._ip(_HUB, f"addr add {self.host(_HUB)}/24 dev bridge0")
        self._ip(_HUB, "link set dev bridge0 up")
        for pod, host in self._hosts.items():
            self._open(pod, (*self.within(_HUB), "unshare", "--net"))
            port = f"port{host.rpartition('.')[2]}"
            self._ip(_HUB, f"link add name {port} type veth peer name eth0 netns {self._processes[pod].pid}")
            self._ip(_HUB, f"link set dev {port} master bridge0 up")
            self._ip(pod, "link set dev lo up")
            self._ip(pod, f"addr add {host}/24 dev eth0")
            self._ip(pod, "link set dev eth0 up")

    def host(self, name: str) -> str:
        """See Network."""
        return self._hosts.get(name, f"{_SUBNET}.1")

    def within(self, name: str) -> tuple[str, ...]:
        """See Network."""
        process = self._processes.get(name, self._processes[_HUB])
        return ("nsenter", f"--target={process.pid}", "--user", "--net", "--preserve-credentials")

    def expose(self, addresses: Sequence[str]) -> None:
        """See Network."""
        command = [*self.within(_HUB), sys.executable, "-m", "tests.e2e.faults.socket_forwarder"]
        pairs = [f"{self._socket(address)}={address}" for address in addresses]
        self._exposing = subprocess.Popen([*command, *pairs], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._exposing.stdout is not None
        assert self._exposing.stdout.readline() == "ready\n"

    def reach(self, address: str) -> str:
        """See Network."""
        return f"unix:{self._socket(address)}"

    def cut(self, one: str, other: str) -> None:
        """From now on nothing that one of the two pods sends arrives at the other; both still reach all others."""
        for pod, peer in ((one, other), (other, one)):
            self._ip(pod, f"neigh replace {self.host(peer)} lladdr {_NOWHERE} dev eth0 nud permanent")

    def mend(self, one: str, other: str) -> None:
        """Undoes `cut`."""
        for pod, peer in ((one, other), (other, one)):
            self._ip(pod, f"neigh del {self.host(peer)} dev eth0")

    def close(self) -> None:
        """Ends what keeps the namespaces open. Idempotent."""
        for process in [self._exposing, *self._processes.values()]:
            if process is not None and process.poll() is None:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.close()  # it ends when nobody is there to say more
                process.wait(_COMMAND_DEADLINE_S)
                process.stdout.close()

    def _socket(self, address: str) -> Path:
        return self._directory / f"{address.rpartition(':')[2]}.socket"

    def _open(self, name: str, command: Sequence[str]) -> None:
        """A process that does nothing in a new namespace, until our end of its input is closed."""
        waiting = ["sh", "-c", "echo ready; read _; exit 0"]
        process = subprocess.Popen(
            [*command, *waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._processes[name] = process
        assert process.stdout is not None
        if (said := process.stdout.readline()) != "ready\n":
            raise OSError(said.strip() or "no network namespace")

    def _ip(self, name: str, arguments: str) -> None:
        command = [*self.within(name), "ip", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_DEADLINE_S)


@contextlib.contextmanager
def namespaces(pods: Sequence[str], directory: Path) -> Iterator[Namespaces]:
    """A network for these pods; gone afterwards. `directory` takes its sockets."""
    network = Namespaces(pods, directory)
    try:
        yield network
    finally:
        network.close()


def obstacle(directory: Path) -> str:
    """Why namespaces cannot be made here; empty: they can."""
    try:
        with namespaces(["probe"], directory):
            return ""
    except subprocess.CalledProcessError as error:
        return str(error.stderr.decode(errors="replace").strip())
    except OSError as error:
        return str(error)
