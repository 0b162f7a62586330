from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import ConfigError
from kv_store.registry import CONNECTOR_NAMES, create_connector


@pytest.mark.parametrize("name", CONNECTOR_NAMES)
def test_every_name_makes_a_connector(name):
    create_connector(name, {}).close()


def test_texts_from_a_command_line_are_understood():
    create_connector("shared-storage", {"max_bytes": "1000000", "timeout_s": "2.5", "threads": "3"}).close()


@pytest.mark.parametrize(
    ("name", "options", "param", "says"),
    [
        ("carrier-pigeon", {}, "connector", "memory, nixl, redis, shared-storage"),
        ("shared-storage", {"pth": "/x"}, "pth", "threads, timeout_s, staging_bytes, path, max_bytes"),
        ("shared-storage", {"path": 3}, "path", "path"),
        ("shared-storage", {"max_bytes": 0}, "max_bytes", ">= 1"),
        ("shared-storage", {"max_bytes": "many"}, "max_bytes", "max_bytes"),
        ("memory", {"threads": 0}, "threads", ">= 1"),
        ("memory", {"timeout_s": -1.0}, "timeout_s", "> 0"),
    ],
)
def test_mistakes_are_named(name, options, param, says):
    with pytest.raises(ConfigError) as caught:
        create_connector(name, options)
    assert caught.value.param == param
    assert param in caught.value.message
    assert says in caught.value.message


def test_nothing_is_imported_before_it_is_asked_for():
    late = {"torch", "xxhash", "redis", "nixl", "kv_store.shared_storage"}
    code = f"import sys, kv_store.registry; assert not {late} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
