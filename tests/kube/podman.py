"""Podman with images, containers and networks of the tests' own, from Debian's packages."""

from __future__ import annotations

from pathlib import Path

from tests.compose.engine import Engine, install

PACKAGES = ("podman", "catatonit", "netavark", "aardvark-dns", "debootstrap")
PROGRAMS = ("podman", "debootstrap")
# Limits that root may set without raising its own, no systemd, no configuration of networks in /etc, and shared memory
# of the size that the chart gives pods.
_CONTAINERS_CONF = """\
[containers]
shm_size = "1g"
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
[network]
network_backend = "netavark"
network_config_dir = "{state}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{state}/root"
runroot = "{state}/run"
"""


def podman(directory: Path) -> Engine:
    """Podman, with its state below `directory`. Raises UnavailableError if it cannot be installed."""
    install(PROGRAMS, PACKAGES)
    state = directory / "podman"
    state.mkdir(exist_ok=True)
    env = {}
    for variable, text in (("CONTAINERS_CONF", _CONTAINERS_CONF), ("CONTAINERS_STORAGE_CONF", _STORAGE_CONF)):
        file = state / f"{variable.lower()}.toml"
        file.write_text(text.format(state=state), encoding="utf-8")
        env[variable] = str(file)
    return Engine("podman", directory, env)
