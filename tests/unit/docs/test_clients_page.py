"""docs/clients.md is of the clients, and of the versions, that `make clients` installs."""

from __future__ import annotations

import re

from tests.clients.environments import REQUIREMENTS
from tests.clients.page import PAGE, TITLES


def test_the_page_is_of_these_clients() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(TITLES)
    pins = "\n".join(path.read_text() for path in REQUIREMENTS.glob("*.txt")).lower().replace("_", "-").splitlines()
    for line in re.findall(r"^Versions: (.*)$", text, re.MULTILINE):
        for package in line.split(", "):
            assert package.replace(" ", "==") in pins
