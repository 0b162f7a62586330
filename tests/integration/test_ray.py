"""Ranks that Ray places. Needs the extra `ray`; see docs/parallel.md."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from common.engine.executor.registry import EXECUTORS
from common.engine.messages import AddRequest
from common.errors import EngineDeadError
from common.types import RequestId, SamplingParams
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir
from tests.unit.common.engine.executor.multiproc.nodes_rig import tls_of

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'baton-llm[ray]'")
pytestmark = pytest.mark.ray

MAX_TOKENS = 12
DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


def config_of(directory: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir("llama")), device="cpu"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(executor="ray", tensor_parallel_size=2, join_timeout_s=DEADLINE_S),
        tls=msgspec.structs.replace(tls_of(directory), server_name="localhost"),  # the address is any of this machine
    )


def generate(client: InprocClient) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    client.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=prompt_of(9), sampling=params))
    tokens: list[int] = []
    while client.has_unfinished:
        tokens += [token.token_id for output in client.step().outputs for token in output.tokens]
    return tokens


def test_ranks_that_ray_places(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    expected = reference_generate(tiny_model_dir("llama"), prompt_of(9), MAX_TOKENS)
    failed = threading.Event()
    executor = EXECUTORS.find("ray")(config)
    with InprocClient(config, executor) as client:
        assert ray.available_resources().get("CPU", 0) == 0
        assert generate(client) == expected
        executor.watch(lambda _: failed.set())
        [first, _] = [each for each in psutil.process_iter(["cmdline"]) if _is_rank(each)]
        first.send_signal(signal.SIGKILL)
        assert failed.wait(DEADLINE_S)
        with pytest.raises(EngineDeadError, match=r"rank \d of 2 was ended by SIGKILL"):
            generate(client)


def _is_rank(process: psutil.Process) -> bool:
    """One that this test has made Ray start."""
    words = process.info["cmdline"] or []
    is_rank = any("multiproc.worker_process" in word for word in words)
    return is_rank and psutil.Process() in process.parents()
