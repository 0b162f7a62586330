"""Ranks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ParallelConfig, SchedulerConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import BatchMasks, no_masks
from common.engine.contract.step import NewRequest, NoToken, SchedulerOutput
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.executor.multiproc.fake import create_fake_multiproc_executor
from common.engine.executor.multiproc.joined_facts import join_facts
from common.engine.executor.multiproc.rank import Rank
from common.engine.launch import EngineFailed
from common.engine.messages import AddRequest, KVSaved, KVTransferParams, RequestOutput, TransferUpdate
from common.errors import ConfigError, EngineDeadError, ModelLoadError
from common.types import Constraint, RequestId, SampledToken, SamplingParams, TransferId
from tests.unit.common.engine.executor.multiproc import rank_workers

DEADLINE_S = 60.0

R = RequestId("r")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
FAKE = "common.engine.executor.multiproc.fake:create_fake_rank"


def config_of(num_ranks: int = 2, step_timeout_s: float = DEADLINE_S, **changes: object) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, step_timeout_s=step_timeout_s)
    return EngineConfig(parallel=parallel, cache=CacheConfig(block_size=4), **changes)


def factory(name: str) -> str:
    return f"{rank_workers.MODULE}:{name}"


@contextlib.contextmanager
def started(config: EngineConfig | None = None, name: str = FAKE, num_blocks: int = 64) -> Iterator[MultiprocExecutor]:
    """As far as it takes steps."""
    executor = MultiprocExecutor(config or config_of(), name)
    try:
        executor.load_model()
        executor.initialize_kv_cache(num_blocks)
        executor.open_connector(lambda: None)
        assert len(executor.measure_steps()) > 1
        yield executor
    finally:
        executor.close()
        assert children() == []


def children() -> list[int]:
    """Processes of ranks that this one has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("multiproc" in word for word in child.cmdline()):
                found.append(child.pid)
    return found


def pid_of(executor: MultiprocExecutor, rank: int) -> int:
    return executor._ranks[rank].process.pid


def step(
    tokens: Sequence[int] = (), scheduled: int = 1, blocks: Sequence[int] = (), **kwargs: object
) -> SchedulerOutput:
    sampling = kwargs.pop("sampling", GREEDY)
    new = [NewRequest(R, list(tokens), len(tokens), sampling, [list(blocks)], 0)] if tokens else []
    return SchedulerOutput(new, {}, {R: scheduled}, scheduled, **kwargs)


def run(executor: MultiprocExecutor, step: SchedulerOutput) -> list[int]:
    outcome = executor.submit(step, no_masks).result().outcomes[R]
    assert isinstance(outcome, list)
    return [token.token_id for token in outcome]


def prompt_of(number: int) -> list[int]:
    return [(7 * number + index) % 500 for index in range(10 + 9 * number)]


def add(client: InprocClient, name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
    client.add_request(AddRequest(request_id=RequestId(name), prompt_token_ids=prompt, sampling=sampling))


def finish(client: InprocClient) -> dict[RequestId, list[int]]:
    tokens: dict[RequestId, list[int]] = {}
    while client.has_unfinished:
        for output in client.step().outputs:
            assert not output.error
            tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    return tokens


@pytest.mark.cell(feature="engine (fake)", degrees="{num_ranks}")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.matrix), 3])
def test_ranks_generate_the_expected_tokens(num_ranks: int) -> None:
    config = config_of(num_ranks, scheduler=SchedulerConfig(max_num_batched_tokens=16))
    prompts = {RequestId(str(number)): prompt_of(number) for number in range(6)}
    seeded = SamplingParams(seed=3, max_tokens=24)
    with InprocClient(config, create_fake_multiproc_executor(config)) as client:
        for name, prompt in prompts.items():
            add(client, name, prompt, seeded if name == "0" else GREEDY)
        tokens = finish(client)
        client.check_integrity()
    assert tokens == {
        name: expected_tokens(prompt, 24, sampling=seeded if name == "0" else GREEDY)
        for name, prompt in prompts.items()
    }
    assert children() == []


def test_ranks_tell_where_the_time_of_steps_went() -> None:
    config = config_of()
    with InprocClient(config, MultiprocExecutor(config, factory("create_late"))) as client:
        add(client, R, prompt_of(1), SamplingParams(temperature=0.0, max_tokens=2))
        finish(client)
        client.check_integrity()  # what ranks told before has come by then
        first, late = client.stats().ranks
    assert (first.rank, late.rank) == (0, 1)
    assert first.device == late.device == "cpu"
    assert first.pid != late.pid
    assert min(first.resident_bytes, late.resident_bytes) > 1 << 20
    assert min(first.num_steps, late.num_steps) >= 1
    assert late.computing_s + late.delayed_s > 0.1  # it computes while the other one waits
    assert first.waiting_s > 0.1


def test_a_step_larger_than_a_slot() -> None:
    prompt = [number % 500 for number in range(50_000)]
    with started(num_blocks=12_600) as executor:
        assert run(executor, step(prompt, 50_000, range(1, 12_502))) == expected_tokens(prompt, 1)
        assert len(run(executor, step())) == 1


def test_steps_in_flight_are_answered_in_order() -> None:
    with started() as executor:
        running = [executor.submit(step([1, 2, 3], 3, [1, 2]), no_masks)]
        running += [executor.submit(step(), no_masks) for _ in range(4)]
        outcomes = [each.result().outcomes[R] for each in running]
    tokens = [token.token_id for outcome in outcomes if isinstance(outcome, list) for token in outcome]
    assert tokens == expected_tokens([1, 2, 3], 5)


# -- ranks that end ---------------------------------------------------------------------------------------------------


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="rank {rank} is killed between steps")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_is_killed_is_seen_between_steps(rank: int) -> None:
    failures: list[Exception] = []
    failed = threading.Event()

    def note(error: Exception) -> None:
        failures.append(error)
        failed.set()

    with started() as executor:
        executor.watch(note)
        os.kill(pid_of(executor, rank), signal.SIGKILL)
        assert failed.wait(DEADLINE_S)
        with pytest.raises(EngineDeadError, match=f"rank {rank} of 2 was ended by SIGKILL"):
            run(executor, step([1, 2], 2, [1]))
    assert [str(each) for each in failures] == [f"rank {rank} of 2 was ended by SIGKILL"]


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="a rank is killed in a step")
def test_a_rank_that_is_killed_ends_the_step_that_runs() -> None:
    with started() as executor:
        os.kill(pid_of(executor, 1), signal.SIGSTOP)  # the other one waits for it
        running = executor.submit(step([1, 2], 2, [1]), no_masks)
        os.kill(pid_of(executor, 1), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was ended by SIGKILL"):  # not that a step takes long
            running.result()


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="rank {rank} is stopped")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_rank_that_is_stopped_ends_the_engine_in_time(rank: int) -> None:
    with started(config_of(step_timeout_s=0.5)) as executor:
        os.kill(pid_of(executor, rank), signal.SIGSTOP)
        with pytest.raises(
            EngineDeadError, match=rf"have not .* for 0.5 s \(step_timeout_s\); rank {rank} of 2 is stopped"
        ):
            run(executor, step([1, 2], 2, [1]))


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="a rank is stopped in the start")
def test_a_rank_that_is_stopped_ends_the_start() -> None:
    executor = MultiprocExecutor(config_of(step_timeout_s=0.5), factory("create_stopping"))
    try:
        with pytest.raises(EngineDeadError, match="rank 1 of 2 is stopped"):
            executor.load_model()
    finally:
        executor.close()


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="a rank fails")
def test_a_rank_that_fails_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the other one, which has lost it, is heard first."""
    describe, other_is_heard = Rank._describe, threading.Event()

    def describe_in_turn(rank: Rank, failed: EngineFailed) -> Exception:
        if rank.name == "rank 1 of 2":
            assert other_is_heard.wait(DEADLINE_S)
        else:
            other_is_heard.set()
        return describe(rank, failed)

    monkeypatch.setattr(Rank, "_describe", describe_in_turn)
    with started(name=factory("create_failing")) as executor:
        assert run(executor, step([1, 2], 2, [1])) == expected_tokens([1, 2], 1)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 failed: MemoryError: out of device memory"):
            run(executor, step())
    assert any(
        record.name.endswith("worker_process") and "rank 1 of 2: " in record.message and "Traceback" in record.message
        for record in caplog.records
    )


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has reaped it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="the driver is killed")
def test_ranks_end_with_the_driver_also_one_that_is_stopped(tmp_path: Path) -> None:
    script = f"""
import time
from {__name__} import *
with started() as executor:
    print(*children(), flush=True)
    time.sleep(60)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as driver:
        assert driver.stdout is not None
        ranks = [psutil.Process(int(each)) for each in driver.stdout.readline().split()]
        assert len(list(tmp_path.iterdir())) == 1
        ranks[1].suspend()
        driver.kill()
    assert len(ranks) == 2
    deadline = time.monotonic() + DEADLINE_S
    while not all(map(has_ended, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cell(feature="engine (fake)", degrees="2", fault="ranks part ways")
def test_ranks_that_part_ways_are_an_error_without_another_step() -> None:
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    with started(name=factory("create_unseeded")) as executor:
        executor.watch(failures.put)
        with contextlib.suppress(EngineDeadError):  # if the first rank is the last to end the step
            run(executor, step([1, 2], 2, [1], sampling=SamplingParams(seed=5)))
        failure = failures.get(timeout=DEADLINE_S)
    assert isinstance(failure, EngineDeadError)
    assert re.match(r"the ranks have parted ways: after step \d+, rank \d has", str(failure))


# -- integrity --------------------------------------------------------------------------------------------------------


def test_what_a_rank_alone_has_lost_is_found() -> None:
    config = config_of()
    with InprocClient(config, MultiprocExecutor(config, factory("create_forgetful"))) as client:
        add(client, R, prompt_of(1))
        client.step()
        assert client.check_integrity().violations == [
            "rank 1 of 2: request kept is kept after its end",
            "rank 1 of 2: request r has 4 blocks in group 0, not 5",
        ]


def test_ranks_have_what_the_scheduler_has_at_each_step(tmp_path: Path) -> None:
    # So few blocks that requests are preempted, and come back from the tier.
    config = msgspec.structs.replace(storing(tmp_path, is_tier=True), cache=CacheConfig(block_size=4, num_blocks=24))
    with InprocClient(config, MultiprocExecutor(config, factory("create_lagging"))) as client:
        for number in range(4):
            add(client, str(number), prompt_of(number))
        while client.has_unfinished:
            client.step()
            assert client.check_integrity().violations == []
        assert client.stats().num_preemptions


@pytest.mark.parametrize(
    ("has_requests", "problem"),
    [
        (True, r"have not been checked for 0.5 s \(step_timeout_s\); rank 1 of 2 is stopped"),
        (False, "rank 1 of 2 was ended by SIGKILL"),
    ],
)
def test_a_rank_that_does_not_answer_ends_the_engine(has_requests: bool, problem: str) -> None:
    known = KnownRequests({R: [[1]]} if has_requests else {}, [])
    timeout_s = 0.5 if has_requests else DEADLINE_S
    config = config_of(step_timeout_s=timeout_s)
    with started(config, factory("create_unchecked")) as executor, pytest.raises(EngineDeadError, match=problem):
        executor.check(known)


# -- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "problem", "param"),
    [
        ("create_unfit", ConfigError, "dtype: int3", "dtype"),
        ("create_other_models", ModelLoadError, "fingerprint is 0000.* on rank 0, 0101.* on rank 1", "model"),
    ],
)
def test_what_a_rank_refuses(name: str, kind: type[ConfigError], problem: str, param: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised, started(name=factory(name)):
        pass
    assert type(raised.value) is kind
    assert raised.value.param == param
    assert children() == []


def test_what_holds_on_all_ranks() -> None:
    facts = FakeExecutor().load_model()
    other = replace(facts, available_kv_bytes=100, kernels_failed=True, num_threads=7)
    assert join_facts([facts, other]) == replace(facts, available_kv_bytes=100, kernels_failed=True)
    with pytest.raises(ModelLoadError, match="vocab_size is 512 on rank 0, 511 on rank 2"):
        join_facts([facts, other, replace(facts, vocab_size=511)])


# -- masks ------------------------------------------------------------------------------------------------------------


def test_all_ranks_get_the_masks_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[list[RequestId], list[int]]] = []
    answers = [
        BatchMasks([0], np.array([[9, -1]], dtype=np.int32), {}),
        BatchMasks([], np.empty((0, 2), dtype=np.int32), {0: NoToken.NOT_YET}),
        None,
    ]

    def source(request_ids: Sequence[RequestId], lengths: npt.NDArray[np.int64]) -> BatchMasks | None:
        asked.append((list(request_ids), lengths.tolist()))
        return answers[len(asked) - 1]

    constrained = SamplingParams(structured_outputs=Constraint.json_object())
    with started(name=factory("create_masked")) as executor:
        first = executor.submit(step([1, 2], 2, [1], sampling=constrained), source).result()
        assert first.outcomes == {R: [SampledToken(9)]}
        assert executor.submit(step(), source).result().outcomes == {R: NoToken.NOT_YET}
        assert executor.submit(step(), source).result().outcomes == {}
        assert asked == [([R], [5])] * 3
        other = step([1, 2], 2, [1], dropped_request_ids=[R])
        assert executor.submit(other, source).result().outcomes == {}
        assert len(asked) == 3
    lines = [record.message.partition(": ") for record in caplog.records if record.name == "tests.masked"]
    by_rank = [[text for who, _, text in lines if who == f"rank {rank} of 2"] for rank in range(2)]
    assert len(by_rank[0]) == 4
    assert by_rank[0] == by_rank[1]


def test_a_step_gets_its_masks_with_others_in_flight() -> None:
    def source(request_ids: Sequence[RequestId], lengths: npt.NDArray[np.int64]) -> BatchMasks:
        numbers.append(len(numbers))
        return BatchMasks([0], np.array([numbers[-1:]], dtype=np.int32), {})

    numbers: list[int] = []
    constrained = SamplingParams(structured_outputs=Constraint.json_object())
    with started(name=factory("create_masked")) as executor:
        running = [executor.submit(step([1, 2], 2, [1], sampling=constrained), source)]
        running += [executor.submit(step(), source) for _ in range(3)]
        for number, each in enumerate(running):
            assert each.result().outcomes == {R: [SampledToken(number)]}


# -- transfers --------------------------------------------------------------------------------------------------------


def storing(directory: Path, **changes: object) -> EngineConfig:
    options = {"path": str(directory), **changes}
    return config_of(connector=KVConnectorConfig(factory=factory("create_files"), name="files", options=options))


def test_blocks_come_back_from_a_tier(tmp_path: Path) -> None:
    config = storing(tmp_path, is_tier=True)
    prompts = {RequestId(str(number)): prompt_of(number) for number in range(4)}
    with InprocClient(config, MultiprocExecutor(config, factory("create_lagging"))) as client:
        for _ in range(2):
            for name, prompt in prompts.items():
                add(client, name, prompt)
            assert finish(client) == {name: expected_tokens(prompt, 24) for name, prompt in prompts.items()}
            client.reset_prefix_cache()
        assert client.stats().tier_hits > 40


@pytest.mark.parametrize("of_consumer", [pytest.param(2, marks=pytest.mark.matrix), 1])
def test_a_handoff_between_engines_of_ranks(tmp_path: Path, of_consumer: int) -> None:
    config = msgspec.structs.replace(storing(tmp_path), scheduler=SchedulerConfig(max_num_batched_tokens=16))
    prompt = prompt_of(5)

    def transfer(role: str) -> KVTransferParams:
        return KVTransferParams(transfer_id=TransferId("t"), epoch=1, role=role)

    def started_client(num_ranks: int = 2) -> InprocClient:
        parallel = msgspec.structs.replace(config.parallel, tensor_parallel_size=num_ranks)
        of_ranks = msgspec.structs.replace(config, parallel=parallel)
        return InprocClient(of_ranks, MultiprocExecutor(of_ranks, factory("create_lagging")))

    with started_client() as producer:
        request = AddRequest(request_id=R, prompt_token_ids=prompt, sampling=GREEDY, transfer=transfer("producer"))
        producer.add_request(request)
        outputs = all_outputs(producer)
    saved = [event.num_tokens for each in outputs for event in each.events if isinstance(event, KVSaved)]
    assert saved[-1] == len(prompt)
    [first] = [token for each in outputs for token in each.tokens]
    with started_client(of_consumer) as consumer:
        request = AddRequest(request_id=R, prompt_token_ids=prompt, sampling=GREEDY, transfer=transfer("consumer"))
        consumer.add_request(request)
        update = TransferUpdate(request_id=R, epoch=1, num_ready_tokens=len(prompt), final=True, first_token=first)
        consumer.update_transfer(update)
        tokens = [token.token_id for each in all_outputs(consumer) for token in each.tokens]
        assert consumer.stats().num_prompt_tokens == 0
        consumer.check_integrity()
    assert tokens == expected_tokens(prompt, 24)


def all_outputs(client: InprocClient) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while client.has_unfinished:
        outputs += client.step().outputs
    return outputs
