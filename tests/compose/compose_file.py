"""deploy/compose/compose.yaml as data: variables filled in, one profile picked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from tests.compose.images import ROOT

DIRECTORY = ROOT / "deploy/compose"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class Service(NamedTuple):
    """A service of the file."""

    name: str
    image: str
    target: str  # of the Dockerfile; empty: an image of others
    profiles: list[str]
    command: list[str]
    environment: dict[str, str]
    ports: list[str]
    volumes: dict[str, str]  # source by target
    aliases: list[str]
    after: list[str]  # services that must be healthy first
    health: list[str]


def variables() -> dict[str, str]:
    """Those of .env."""
    lines = (DIRECTORY / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def used_variables() -> dict[str, bool]:
    """Variables that the file names, and whether each has a default there."""
    return {match[1]: match[2] is not None for match in _VARIABLE.finditer(_text())}


def document(name: str = "compose.yaml") -> dict[str, Any]:
    """The file with the variables of .env."""
    loaded = yaml.safe_load(_filled(_text(name), variables()))
    assert isinstance(loaded, dict)
    return loaded


def services(profile: str | None = None) -> dict[str, Service]:
    """All services, or those that run under a profile."""
    found = {name: _service(name, entry) for name, entry in document()["services"].items()}
    if profile is None:
        return found
    return {name: each for name, each in found.items() if not each.profiles or profile in each.profiles}


def _text(name: str = "compose.yaml") -> str:
    return (DIRECTORY / name).read_text(encoding="utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1]) or match[2] or "", text)


def _service(name: str, entry: Mapping[str, Any]) -> Service:
    volumes = [volume.split(":") for volume in entry.get("volumes", ())]
    networks = entry.get("networks", {})
    return Service(
        name=name,
        image=entry["image"],
        target=entry.get("build", {}).get("target", ""),
        profiles=entry.get("profiles", []),
        command=[str(word) for word in entry.get("command", ())],
        environment={key: str(value) for key, value in entry.get("environment", {}).items()},
        ports=entry.get("ports", []),
        volumes={parts[1]: parts[0] for parts in volumes},
        aliases=[name, *networks.get("default", {}).get("aliases", ())],
        after=list(entry.get("depends_on", ())),
        health=entry["healthcheck"]["test"],
    )
