"""A router with API keys over fake pods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from router.security.config import SecurityConfig
from router.security.keys import digest_of

ALICE = "alice-secret-key-0123456789"
BOB = "bob-secret-key-0123456789"
OPERATOR = "operator-secret-key-0123456789"
KEYS = {"alice": ALICE, "bob": BOB, "operator": OPERATOR}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class KeyFile:
    path: Path

    def write(self, **settings: dict[str, object]) -> None:
        """Entries of the named tenants."""
        entries = [
            {"name": name, "hash": f"sha256:{digest_of(KEYS[name]).hex()}", **more} for name, more in settings.items()
        ]
        self.path.write_text(yaml.safe_dump(entries))

    @property
    def security(self) -> SecurityConfig:
        return SecurityConfig(api_keys_file=str(self.path))


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.yaml")
    file.write(alice={}, bob={}, operator={"operator": True})
    return file
