"""Handoffs between engines of several ranks, each a process, while one of these fails.

Every cell is a connector, the degrees of both engines, and what goes wrong. An engine that loses a rank ends; the other
one goes on, as pods do: a consumer computes what it lacks, and another consumer goes on with the requests of one that
ended.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ParallelConfig, SchedulerConfig
from common.engine.executor.fake import expected_tokens
from common.engine.executor.multiproc.fake import create_fake_multiproc_executor
from common.engine.messages import TransferQuiesced, TransferUpdate
from common.errors import EngineDeadError
from common.types import RequestId, SamplingParams
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, EPOCH, Handoffs, check_integrity, generate
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.matrix

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [prompt_of(length, seed=length) for length in (CHUNK + 3, 3 * CHUNK, 5 * CHUNK + 5, 6 * CHUNK - 1)]
ROUNDS = 7  # of steps before the fault: some requests decode, others are being computed
STEP_TIMEOUT_S = 60.0  # no test is meant to wait for it
STOPPED_TIMEOUT_S = 4.0  # of the engine whose rank is stopped

CONNECTORS = ("shared-storage", "redis", "nixl")
DEGREES = ((1, 2), (2, 1), (2, 2), (4, 2))
_PIDFD_GETFD = 438  # the same on all architectures


def ranks_of(engine: InprocClient) -> list[psutil.Process]:
    """The processes of an engine's ranks; of one rank, of a MultiprocExecutor as well."""
    return [psutil.Process(rank.process.pid) for rank in engine._core._executor._ranks]


def kill(engine: InprocClient) -> None:
    ranks_of(engine)[-1].kill()


def stop(engine: InprocClient) -> None:
    ranks_of(engine)[-1].send_signal(signal.SIGSTOP)


def cut(engine: InprocClient) -> None:
    """Shuts down the sockets between the last rank and the others, as a network that fails does."""
    *others, last = ranks_of(engine)
    ports = {each.laddr.port for other in others for each in other.net_connections("tcp")}
    links = [each for each in last.net_connections("tcp") if each.raddr and each.raddr.port in ports]
    assert links
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(last.pid)
    for link in links:
        descriptor = libc.syscall(_PIDFD_GETFD, process, link.fd, 0)
        assert descriptor >= 0, os.strerror(ctypes.get_errno())
        libc.shutdown(descriptor, 2)
        os.close(descriptor)
    os.close(process)


class Fault(NamedTuple):
    """What goes wrong, and how the engine says so."""

    side: str
    strike: Callable[[InprocClient], None]
    said: str


_LOST = r"rank . of . has lost another: Connection closed by peer \[[0-9.]+\]:[0-9]+$"
FAULTS = {
    "a prefill rank is killed": Fault("producer", kill, "was ended by SIGKILL"),
    "a decode rank is killed": Fault("consumer", kill, "was ended by SIGKILL"),
    "a prefill rank is stopped": Fault("producer", stop, "is stopped"),
    "a decode rank is stopped": Fault("consumer", stop, "is stopped"),
    "the link between prefill ranks is cut": Fault("producer", cut, _LOST),
    "the link between decode ranks is cut": Fault("consumer", cut, _LOST),
}


def cells() -> Iterator[tuple[tuple[int, int], str]]:
    """Degrees and fault; one rank has no link to another."""
    for degrees, (name, fault) in itertools.product(DEGREES, FAULTS.items()):
        if fault.strike is not cut or degrees[fault.side == "consumer"] > 1:
            yield degrees, name


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVConnectorConfig]:
    with ExitStack() as stack:
        options: dict[str, str | int] = {}
        if request.param == "redis":
            options = {"url": stack.enter_context(running_redis()).url}
        elif request.param == "shared-storage":
            options = {"path": str(tmp_path), "max_bytes": 1 << 28}
        yield KVConnectorConfig(factory="kv_store.registry:create_connector", name=request.param, options=options)


def open_engine(connector: KVConnectorConfig, num_ranks: int, step_timeout_s: float = STEP_TIMEOUT_S) -> InprocClient:
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=128),
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, step_timeout_s=step_timeout_s),
        connector=connector,
    )
    return InprocClient(config, create_fake_multiproc_executor(config))


def name_of(value: object) -> str:
    return f"{value[0]}-to-{value[1]}" if isinstance(value, tuple) else str(value)


@pytest.mark.cell(
    feature="handoff (fake)", connector="{connector}", degrees="{degrees[0]} to {degrees[1]}", fault="{fault}"
)
@pytest.mark.parametrize(("degrees", "fault"), list(cells()), ids=name_of)
def test_streams_are_complete_after(connector: KVConnectorConfig, degrees: tuple[int, int], fault: str) -> None:
    side, strike, said = FAULTS[fault]
    of_producer, of_consumer = degrees
    timeouts = {side: STOPPED_TIMEOUT_S} if strike is stop else {}
    with (
        open_engine(connector, of_producer, timeouts.get("producer", STEP_TIMEOUT_S)) as producer,
        open_engine(connector, of_consumer, timeouts.get("consumer", STEP_TIMEOUT_S)) as consumer,
    ):
        handoffs = Handoffs(producer, consumer)
        ids = begin(handoffs)
        for _ in range(ROUNDS):
            handoffs.step_producer()
            handoffs.step_consumer()
        strike(producer if side == "producer" else consumer)
        with pytest.raises(EngineDeadError, match=said):
            handoffs.run_to_the_end()
        if side == "producer":
            producer.close()
            lose_producer(handoffs, ids)
            tokens = [handoffs.decoded[each].token_ids for each in ids]
            check_integrity(consumer)
        else:
            consumer.close()
            producer.abort_requests(ids)
            while producer.has_unfinished:
                producer.step()
            check_integrity(producer)
            with open_engine(connector, of_consumer) as successor:
                tokens = [go_on(successor, handoffs, *each) for each in zip(ids, PROMPTS, strict=True)]
                check_integrity(successor)
    assert tokens == [expected_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.cell(feature="handoff (fake)", connector="{connector}", degrees="{degrees[0]} to {degrees[1]}")
@pytest.mark.parametrize("degrees", DEGREES, ids=name_of)
def test_streams_are_complete_undisturbed(connector: KVConnectorConfig, degrees: tuple[int, int]) -> None:
    of_producer, of_consumer = degrees
    with open_engine(connector, of_producer) as producer, open_engine(connector, of_consumer) as consumer:
        handoffs = Handoffs(producer, consumer)
        answers = handoffs.run(PROMPTS, GREEDY)
        handoffs.check_integrity()
    assert [answer.token_ids for answer in answers] == [expected_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert all(answer.received and not answer.received.recompute_reason for answer in answers)


def begin(handoffs: Handoffs) -> list[RequestId]:
    ids = [RequestId(f"r{index}") for index in range(len(PROMPTS))]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        handoffs.start_producer(request_id, prompt, GREEDY)
        handoffs.start_consumer(request_id)
    return ids


def lose_producer(handoffs: Handoffs, ids: Sequence[RequestId]) -> None:
    """Tells the consumer that the producer is gone, and writes no more; it goes on to the end."""
    consumer = handoffs.consumer
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        prefilled = handoffs.prefilled[request_id]
        if not prefilled.is_over(len(prompt)):
            consumer.quiesce_transfer(TransferQuiesced(request_id=request_id, epoch=EPOCH))
            consumer.update_transfer(
                TransferUpdate(
                    request_id=request_id,
                    epoch=EPOCH,
                    num_ready_tokens=prefilled.num_saved_tokens,
                    final=True,
                    failure="peer_lost",
                )
            )
    while consumer.has_unfinished:
        handoffs.step_consumer()


def go_on(successor: InprocClient, handoffs: Handoffs, request_id: RequestId, prompt: Sequence[int]) -> list[int]:
    """All tokens of a request that another consumer goes on with."""
    known = handoffs.decoded[request_id].token_ids
    if len(known) == NUM_TOKENS:
        return known
    rest = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - len(known), ignore_eos=True)
    return known + generate(successor, [[*prompt, *known]], rest)[0]
