import asyncio
import os
import signal
import urllib.request
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import parse
from common.engine.client.threaded import AsyncInprocClient
from common.engine.messages import RankFigures
from common.errors import ConfigError, ModelLoadError
from common.pb import common_pb2
from common.pod.runtime import PodRuntime
from decode_service.__main__ import main as decode_main
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from prefill_service.__main__ import main as prefill_main
from prefill_service.config import PrefillConfig
from tests.pods import DEADLINE_S, FakeRouter, RunningPod, decode_pod, engine_request, prompt_of, wait_for

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(pod: RunningPod, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(pod.channel).Check(request, timeout=DEADLINE_S)).status


async def test_serves_until_told_to_stop_and_finishes_what_runs() -> None:
    async with decode_pod({}) as pod, FakeRouter(pod) as router:
        assert await health_of(pod, "") == await health_of(pod, "baton.v1.Decode") == SERVING
        assert pod.runtime.ready_line == (
            f"ready role=decode address={pod.address} pod_id={pod.context.pod_id} device=cpu kernels=torch"
        )
        pod.gate.shut()
        answer = await router.submit(engine_request("a", prompt_of(5)))
        await wait_for(lambda: len(pod.context.requests) == 1)
        stop = asyncio.Event()
        serving = asyncio.create_task(pod.runtime.serve(stop))
        stop.set()
        await wait_for(lambda: pod.context.admission.draining)
        await wait_for(lambda: _is(health_of(pod, "baton.v1.Decode"), NOT_SERVING))
        assert not serving.done()
        pod.gate.open()
        assert await serving == 0
        assert (await answer.wait_finished()).finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_drain_ends_after_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async with decode_pod({}, drain_timeout_s=0.05) as pod, FakeRouter(pod) as router:
        pod.gate.shut()
        await router.submit(engine_request("a", prompt_of(5)))
        await wait_for(lambda: len(pod.context.requests) == 1)
        stop = asyncio.Event()
        stop.set()
        assert await pod.runtime.serve(stop) == 0
        assert "1 requests and transfers did not finish within" in caplog.text


async def test_death_of_the_engine_ends_the_pod_with_code_1() -> None:
    async with decode_pod({}) as pod, FakeRouter(pod) as router:
        serving = asyncio.create_task(pod.runtime.serve(asyncio.Event()))
        pod.executor.failure = RuntimeError("the device is gone")
        await router.submit(engine_request("a", prompt_of(5)))
        assert await serving == 1
        assert await health_of(pod, "") == NOT_SERVING


async def test_engine_that_hangs_is_given_up_and_its_requests_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async with decode_pod({}, runtime={"engine_timeout_s": 0.2}) as pod, FakeRouter(pod) as router:
        pod.gate.shut()
        answer = await router.submit(engine_request("a", prompt_of(5)))
        assert await pod.runtime.serve(asyncio.Event()) == 1
        assert await health_of(pod, "") == NOT_SERVING
        assert "the engine hangs" in caplog.text
        pod.gate.open()
        await answer.wait_finished()


async def test_metrics_are_served_over_http() -> None:
    async with decode_pod({}, metrics_port=0) as pod, FakeRouter(pod) as router:
        pod.executor.num_failed_recordings = 1
        pod.executor.rank_figures = (RankFigures(1, 7, "cpu", 4096, 10, 6.0, 3.0, 1.0),)
        await (await router.submit(engine_request("a", prompt_of(20), max_tokens=3))).wait_finished()
        assert f"metrics_port={pod.runtime.metrics_port}" in pod.runtime.ready_line
        url = f"http://127.0.0.1:{pod.runtime.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=DEADLINE_S).read().decode())
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    figures = dict(lines)
    assert len(figures) == len(lines), "a metric is exported twice"
    assert float(figures['baton_pod_tier_queries_total{model_name="baton-demo"}']) == 0
    assert float(figures['baton_pod_prompt_tokens_total{model_name="baton-demo"}']) == 20
    assert float(figures['baton_pod_generation_tokens_total{model_name="baton-demo"}']) == 3
    assert float(figures['baton_pod_num_requests_running{model_name="baton-demo"}']) == 0
    assert float(figures["baton_pod_num_asyncio_tasks"]) > 0
    seconds = 'baton_pod_rank_step_seconds_total{{model_name="baton-demo",rank="1",state="{}"}}'
    assert [float(figures[seconds.format(state)]) for state in ("computing", "delayed", "waiting")] == [3, 1, 2]
    assert float(figures['baton_pod_rank_resident_bytes{model_name="baton-demo",rank="1"}']) == 4096
    assert float(figures['baton_pod_kernel_fallbacks_total{check="kernel",model_name="baton-demo"}']) == 0
    assert float(figures['baton_pod_kernel_fallbacks_total{check="recorded_step",model_name="baton-demo"}']) == 1
    assert float(figures['baton_pod_request_success_total{finished_reason="length",model_name="baton-demo"}']) == 1
    assert float(figures['baton_pod_request_decode_time_seconds_count{model_name="baton-demo"}']) == 1
    assert float(figures['baton_pod_step_tokens_sum{kind="prefill",model_name="baton-demo"}']) == 20
    assert float(figures['baton_pod_step_tokens_count{kind="decode",model_name="baton-demo"}']) == 2


async def test_taken_port_leaves_nothing_running() -> None:
    async with decode_pod({}) as first:
        with pytest.raises(ConfigError, match="--port"):
            async with decode_pod({}, port=first.runtime.server.port):
                pass


async def test_unusable_model_leaves_nothing_running() -> None:
    def fail(_: object) -> Any:
        raise ModelLoadError("there are no weights")

    config = DecodeConfig()
    engine = AsyncInprocClient(config.engine_config(), fail)
    runtime = PodRuntime("decode", config, engine, lambda pod: DecodeFront(pod, config))
    with pytest.raises(ModelLoadError):
        await runtime.start()
    await runtime.stop()


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (decode_main, ["--block-size", "0"], "--block-size"),
        (decode_main, ["--no-such-option"], "--no-such-option"),
        (prefill_main, ["--connector", "nonsense"], "--connector"),
    ],
)
def test_wrong_setting_is_one_line_and_code_2(
    main: Any, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: error: ")
    assert message in line


def test_settings_reach_the_engine() -> None:
    argv = [
        "--connector-path",
        "/tmp/x",
        "--connector-options",
        "max_bytes=5",
        "--max-num-seqs",
        "3",
        "--model",
        "/m/abc",
    ]
    config = parse(PrefillConfig, argv, prog="p", section="prefill")
    engine = config.engine_config()
    assert engine.connector is not None
    assert (engine.connector.name, engine.connector.options) == ("shared-storage", {"max_bytes": 5, "path": "/tmp/x"})
    assert engine.scheduler.max_num_seqs == 3
    assert config.model_name == "abc"
    assert DecodeConfig(connector=None).engine_config().connector is None
    assert DecodeConfig().engine_config().model.model.endswith("weights")


async def _is(status: Any, expected: int) -> bool:
    try:
        return bool(await status == expected)
    except grpc.aio.AioRpcError:
        return False


def test_a_signal_while_the_process_ends_by_itself_says_nothing(monkeypatch, capfd):
    """As `baton up` sends one to the pods beside one that did not start."""
    close = asyncio.BaseEventLoop.close

    def close_and_stop(loop):  # what signals are written to is closed, their handlers are still there
        close(loop)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(asyncio.BaseEventLoop, "close", close_and_stop)
    assert prefill_main(["--model", "no/such/directory"]) == 2
    assert "signal" not in capfd.readouterr().err
