"""The bounds on kernel caches are in the environment before a model is loaded."""

from __future__ import annotations

import os

import pytest

from common.demo_model import demo_model_path
from common.engine.config import EngineConfig, ModelConfig
from common.engine.devices.cpu.kernel_cache import KERNEL_CACHE_VARIABLES
from common.engine.worker.worker import Worker


def test_a_worker_bounds_them_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_CACHE_VARIABLES:
        monkeypatch.setenv(name, "0")  # restored afterwards
        monkeypatch.delenv(name)
    seen: dict[str, str | None] = {}

    def load(*_: object) -> None:
        seen.update({name: os.environ.get(name) for name in KERNEL_CACHE_VARIABLES})
        raise InterruptedError

    monkeypatch.setattr("common.engine.model.loader.prepare_model", load)
    with pytest.raises(InterruptedError):
        Worker(EngineConfig(model=ModelConfig(model=str(demo_model_path())))).load_model()
    assert all(0 < int(value or 0) < 1024 for value in seen.values()), seen


def test_what_the_operator_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_CACHE_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr("common.engine.model.loader.prepare_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Worker(EngineConfig(model=ModelConfig(model=str(demo_model_path())))).load_model()
    assert [os.environ[name] for name in KERNEL_CACHE_VARIABLES] == ["7", "7"]
