from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import ConfigError
from kv_store.nixl.installed import check_installed
from kv_store.registry import CONNECTOR_NAMES, create_connector


@pytest.mark.parametrize("name", CONNECTOR_NAMES)
def test_every_name_makes_a_connector(name):
    create_connector(name, {}).close()


def test_texts_from_a_command_line_are_understood():
    create_connector("shared-storage", {"max_bytes": "4GiB", "timeout_s": "2.5", "threads": "3"}).close()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("pigeon", {}, "--connector: unknown connector 'pigeon'; known are memory, nixl, redis, shared-storage"),
        ("shared-storage", {"pth": "/x"}, "connector_options.pth: unknown setting; did you mean path?"),
        ("redis", {"path": "/x"}, "connector redis: connector_options.path: unknown setting; known: "),
        ("shared-storage", {"path": True}, "connector_options.path: expected text, got True"),
        ("shared-storage", {"max_bytes": 0}, "connector_options.max_bytes: must be >= 1, got 0"),
        ("shared-storage", {"max_bytes": "many"}, "connector_options.max_bytes: expected a size such as 512MiB"),
        ("memory", {"threads": 0}, "connector_options.threads: must be >= 1, got 0"),
        ("memory", {"timeout_s": -1.0}, "connector_options.timeout_s: must be > 0, got -1.0"),
        ("redis", {"host_bytes": "much"}, "connector redis: connector_options.host_bytes: expected a size such as"),
        ("redis", {"offload": "perhaps"}, "connector redis: connector_options.offload: expected"),
        ("redis", {"lookup_timeout_s": 0}, "connector redis: connector_options.lookup_timeout_s: must be > 0, got 0"),
        ("nixl", {"host_bytes": -1}, "connector nixl: connector_options.host_bytes: must be >= 0, got -1"),
        ("nixl", {"store": "shoebox"}, "connector nixl: connector_options.store: unknown store 'shoebox'; known are"),
        ("nixl", {"store.url": "redis://x"}, "connector nixl: connector_options.store.url: requires a store"),
        ("nixl", {"offload": True}, "connector nixl: connector_options.offload: requires host_bytes or store"),
        ("nixl", {"store": "redis", "store.pth": 1}, "connector redis: connector_options.store.pth: unknown setting"),
        ("nixl", {"store": "redis", "store.offload": 1}, "connector nixl: connector_options.store.offload: is offload"),
    ],
)
def test_mistakes_are_named(name, options, says):
    with pytest.raises(ConfigError) as caught:
        create_connector(name, options)
    assert says in caught.value.message


def test_nothing_is_imported_before_it_is_asked_for():
    late = {"torch", "xxhash", "redis", "nixl", "kv_store.shared_storage"}
    code = f"import sys, kv_store.registry; assert not {late} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_nixl_needs_is_named_without_loading_it(monkeypatch):
    check_installed()
    monkeypatch.setattr("importlib.util.find_spec", {"nixl": None}.__getitem__)
    with pytest.raises(ConfigError, match=r"pip install 'baton-llm\[nixl\]' \(it is not installed\)") as caught:
        check_installed()
    assert caught.value.param == "connector"
