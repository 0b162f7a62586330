import numpy as np
import pytest
import torch

from common.engine.config import EngineConfig, ModelConfig, ParallelConfig
from common.engine.devices.gpu.memory import CudaMemory
from common.engine.devices.host_memory import HostMemory
from common.engine.devices.registry import DEVICES
from common.engine.worker.worker import Worker
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("parallel", "rank", "chosen"),
    [
        (ParallelConfig(), 0, []),
        (ParallelConfig(tensor_parallel_size=2), 1, [1]),
        (ParallelConfig(tensor_parallel_size=2, rank_devices=[3, 0]), 0, [3]),
        (ParallelConfig(tensor_parallel_size=2, rank_devices=[3, 0]), 1, []),
    ],
)
def test_a_rank_has_its_device(monkeypatch, parallel, rank, chosen):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    DEVICES.find("auto")(ModelConfig(), parallel.device_of(rank))
    assert devices == chosen
    DEVICES.find("cpu")(ModelConfig(), parallel.device_of(rank))
    assert devices == chosen


def test_a_device_that_does_not_exist_is_a_setting_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--rank-devices: 1, but there are 1 GPUs"):
        Worker(EngineConfig(parallel=ParallelConfig(rank_devices=[1]))).load_model()


def test_what_is_uploaded_is_what_the_host_has(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which takes a GPU
    gpu, host = CudaMemory(torch.device("cpu")), HostMemory()
    arrays = [np.arange(6)[::2], np.arange(6).reshape(2, 3), np.arange(0), np.arange(6).reshape(3, 2).T]
    for found, expected in zip(gpu.upload(arrays), host.upload(arrays), strict=True):
        assert torch.equal(found, expected)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 4), dtype=np.int32)
    for num_bits in (128, 97, 1):
        assert torch.equal(gpu.unpack_bits(words, num_bits), host.unpack_bits(words, num_bits))
