"""Kernels may be held to the instructions of an older processor."""

import pytest

from common.engine.devices.cpu.kernels import processor
from common.errors import ConfigError


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    found = {"avx2": True, "avx512f": True, "avx512vnni": True, "avx512bf16": True, "amx-bf16": True}
    monkeypatch.setattr(processor.binding, "get_host_cpu_features", lambda: dict(found))
    processor.features.cache_clear()
    yield
    processor.features.cache_clear()


@pytest.mark.parametrize(("level", "count"), [("avx2", 1), ("avx512_vnni", 3), ("avx512_bf16", 4), ("amx", 5), ("", 5)])
def test_each_level_has_what_was_there_before_it(level, count, monkeypatch):
    monkeypatch.setenv(processor.VARIABLE, level)
    assert sum(processor.features().values()) == count


def test_an_unknown_level_is_named(monkeypatch):
    monkeypatch.setenv(processor.VARIABLE, "sse")
    with pytest.raises(ConfigError, match="BATON_MAX_CPU_ISA: sse is unknown; known: avx2, avx512_vnni"):
        processor.features()
