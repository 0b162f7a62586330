"""Ranks on several machines, which are processes of this one."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from common import __version__
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ParallelConfig
from common.engine.executor.fake import expected_tokens
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.executor.multiproc.fake import create_fake_multiproc_executor
from common.engine.executor.multiproc.joined_facts import check_models
from common.engine.executor.multiproc.node import connect
from common.engine.executor.multiproc.nodes import Nodes
from common.engine.executor.multiproc.protocol import Decoder, JoinNode, JoinRank, ToNode, encode
from common.engine.launch import EngineFailed
from common.engine.messages import AddRequest
from common.errors import EngineDeadError, ModelLoadError
from common.types import RequestId, SamplingParams
from tests.unit.common.engine.executor.multiproc import rank_workers
from tests.unit.common.engine.executor.multiproc.nodes_rig import NodeProcess, node, on_nodes, tls_of

DEADLINE_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = list(range(30))


def config_of(num_ranks: int = 2) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, step_timeout_s=DEADLINE_S)
    return EngineConfig(parallel=parallel, cache=CacheConfig(block_size=4))


def generate(client: InprocClient) -> list[int]:
    client.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=GREEDY))
    tokens: list[int] = []
    while client.has_unfinished:
        for output in client.step().outputs:
            assert not output.error
            tokens += [token.token_id for token in output.tokens]
    return tokens


@pytest.mark.matrix
def test_two_machines_say_what_one_says(tmp_path: Path) -> None:
    config = on_nodes(config_of(4), tmp_path)
    with node(config) as other:
        for _ in range(2):  # it joins the next engine as well
            with InprocClient(config, create_fake_multiproc_executor(config)) as client:
                assert len(other.ranks()) == 2
                assert generate(client) == expected_tokens(PROMPT, 24)
                client.check_integrity()


def test_blocks_of_ranks_on_two_machines_are_those_of_one_in_a_store(tmp_path: Path) -> None:
    stores, tokens = [tmp_path / "one", tmp_path / "two"], expected_tokens(PROMPT, 24)
    for path in stores:
        path.mkdir()
    connectors = [
        KVConnectorConfig(
            factory=f"{rank_workers.MODULE}:create_files", name="files", options={"path": str(path), "is_tier": True}
        )
        for path in stores
    ]
    config = msgspec.structs.replace(config_of(), connector=connectors[0])
    create = f"{rank_workers.MODULE}:create_lagging"
    with InprocClient(config, MultiprocExecutor(config, create)) as client:
        assert generate(client) == tokens
    config = on_nodes(msgspec.structs.replace(config, connector=connectors[1]), tmp_path)
    with node(config), InprocClient(config, MultiprocExecutor(config, create)) as client:
        assert generate(client) == tokens
        client.reset_prefix_cache()
        assert generate(client) == tokens
        assert client.stats().tier_hits > 0
        client.check_integrity()
    saved = [{path.name: path.read_bytes() for path in each.iterdir()} for each in stores]
    assert saved[0].keys() <= saved[1].keys()
    assert all(saved[1][name] == content for name, content in saved[0].items())


def test_ranks_on_two_machines_that_part_ways_are_an_error(tmp_path: Path) -> None:
    config = on_nodes(config_of(), tmp_path)
    executor = MultiprocExecutor(config, f"{rank_workers.MODULE}:create_unseeded")
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    with node(config), InprocClient(config, executor) as client:
        executor.watch(failures.put)
        seeded = SamplingParams(seed=5, max_tokens=24)
        client.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=seeded))
        with contextlib.suppress(EngineDeadError):  # it may come after the last step
            while client.has_unfinished:
                client.step()
        assert re.match(
            r"the ranks have parted ways: after step \d+, rank \d has", str(failures.get(timeout=DEADLINE_S))
        )


def kill(machine: NodeProcess) -> None:
    machine.signal_all(signal.SIGKILL)


def kill_rank(machine: NodeProcess) -> None:
    machine.ranks()[0].kill()


def stop(machine: NodeProcess) -> None:
    machine.signal_all(signal.SIGSTOP)


@pytest.mark.cell(feature="engine on two machines (fake)", degrees="2")
@pytest.mark.parametrize(
    ("fault", "node_timeout_s", "reason"),
    [
        pytest.param(
            kill,
            DEADLINE_S,
            r"node 1 \(127.0.0.1\) is gone: it has closed its connection",
            marks=[pytest.mark.cell(fault="a machine is killed"), pytest.mark.slow],  # as in tests/e2e
        ),
        pytest.param(
            kill_rank,
            DEADLINE_S,
            "rank 1 of 2 was ended by SIGKILL",
            marks=pytest.mark.cell(fault="a rank on another machine is killed"),
        ),
        pytest.param(
            stop,
            3.0,
            r"node 1 \(127.0.0.1\) is gone: it has been silent for 3 s \(node_timeout_s\)",
            marks=pytest.mark.cell(fault="a machine is stopped"),
        ),
    ],
)
def test_a_machine_that_goes_away_ends_the_engine(
    tmp_path: Path, fault: Callable[[NodeProcess], None], node_timeout_s: float, reason: str
) -> None:
    config = on_nodes(config_of(), tmp_path, node_timeout_s=node_timeout_s)
    failed = threading.Event()
    with node(config) as other:
        executor = create_fake_multiproc_executor(config)
        with InprocClient(config, executor) as client:
            assert generate(client) == expected_tokens(PROMPT, 24)
            executor.watch(lambda _: failed.set())
            fault(other)
            assert failed.wait(DEADLINE_S)  # also between steps
            with pytest.raises(EngineDeadError, match=reason):
                generate(client)


def test_a_machine_that_never_joins_is_named(tmp_path: Path) -> None:
    config = on_nodes(config_of(3), tmp_path, nnodes=3, join_timeout_s=0.3)
    with pytest.raises(EngineDeadError, match=r"node 1 and node 2 of 3 did not join within 0.3 s \(join_timeout_s\)"):
        InprocClient(config, create_fake_multiproc_executor(config))


def test_a_machine_waits_for_the_pod_for_a_bounded_time(tmp_path: Path) -> None:
    config = on_nodes(config_of(), tmp_path, join_timeout_s=0.3)
    with node(config) as other:
        assert other.process.wait(DEADLINE_S) == 1
        assert "did not answer within 0.3 s (join_timeout_s)" in other.end()


def test_a_machine_with_other_settings_is_refused(tmp_path: Path) -> None:
    config = on_nodes(config_of(6), tmp_path, nnodes=2, join_timeout_s=DEADLINE_S)
    nodes = Nodes(config, [1], lambda error: None)
    try:
        parallel = msgspec.structs.replace(config.parallel, nnodes=3)
        with node(msgspec.structs.replace(config, parallel=parallel)) as other:
            assert other.process.wait(DEADLINE_S) == 2
            assert "node 1 (127.0.0.1) has nnodes 3, node 0 has 2" in other.end()
    finally:
        nodes.close()


def test_the_end_of_the_wait_says_who_was_refused_unless_a_corrected_machine_came(tmp_path: Path) -> None:
    config = on_nodes(config_of(6), tmp_path, nnodes=3, join_timeout_s=0.01, node_timeout_s=DEADLINE_S)
    nodes = Nodes(config, [1, 2], lambda error: None)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(nodes.close)
        for number, version in ((1, "0.0.1"), (2, "0.0.1"), (2, __version__)):
            channel = connect(config)
            cleanup.callback(channel.close)
            channel.send(encode(JoinNode(number, 3, 6, version)))
            if version != __version__:
                assert isinstance(Decoder[ToNode](ToNode)(channel.receive()), EngineFailed)
        with nodes._changed:
            assert nodes._changed.wait_for(lambda: 2 in nodes._links, DEADLINE_S)
        with pytest.raises(EngineDeadError) as raised:
            nodes.wait()
    assert raised.value.message == (
        "node 1 of 3 did not join within 0.01 s (join_timeout_s); refused: node 1 (127.0.0.1) has version 0.0.1, "
        f"node 0 has {__version__}"
    )


def assert_refused(config: EngineConfig, greeting: bytes) -> None:
    channel = connect(config)  # whose certificate the other end has yet to look at
    try:
        with contextlib.suppress(OSError):
            channel.send(greeting)
        with pytest.raises(EOFError):
            channel.receive()
    finally:
        channel.close()


@pytest.mark.parametrize("known", ["nothing", "another authority"])
def test_who_has_no_certificate_of_the_cluster_is_not_heard(tmp_path: Path, known: str) -> None:
    config = on_nodes(config_of(), tmp_path / "own", join_timeout_s=0.5)
    nodes = Nodes(config, [1], lambda error: None)
    try:
        if known == "nothing":
            with socket.create_connection(nodes.address, DEADLINE_S) as stranger:
                stranger.sendall(encode(JoinNode(1, 2, 2, __version__)))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1024):  # an alert
                    pass
        else:
            foreign = msgspec.structs.replace(config, tls=tls_of(tmp_path / "foreign"))
            with pytest.raises(ssl.SSLCertVerificationError):
                connect(foreign)
            tls = msgspec.structs.replace(foreign.tls, authority=config.tls.authority)
            assert_refused(msgspec.structs.replace(config, tls=tls), encode(JoinNode(1, 2, 2, __version__)))
        with pytest.raises(EngineDeadError, match="node 1 of 2 did not join"):
            nodes.wait()
    finally:
        nodes.close()


def test_what_a_stranger_sends_is_bounded(tmp_path: Path) -> None:
    config = on_nodes(config_of(), tmp_path)
    nodes = Nodes(config, [1], lambda error: None)
    try:
        assert_refused(config, bytes(2000))
    finally:
        nodes.close()


def test_a_rank_of_another_start_is_not_heard(tmp_path: Path) -> None:
    config = on_nodes(config_of(), tmp_path)
    nodes = Nodes(config, [1], lambda error: None)
    try:
        assert_refused(config, encode(JoinRank(bytes(16), 1, is_events=False)))
    finally:
        nodes.close()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param("create_unloadable", "/nowhere has no weights", marks=pytest.mark.matrix),
        ("create_other_models", "fingerprint is 0000.* on rank 0, 0101"),
    ],
)
def test_what_a_rank_on_another_machine_refuses_ends_the_start(tmp_path: Path, name: str, problem: str) -> None:
    config = on_nodes(config_of(), tmp_path)
    with node(config) as other:
        with pytest.raises(ModelLoadError, match=problem):  # the first rank would wait for it
            InprocClient(config, MultiprocExecutor(config, f"{rank_workers.MODULE}:{name}"))
        psutil.wait_procs(other.ranks(), DEADLINE_S)
        assert other.process.poll() is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"nnodes": 2}, "--nnodes: 3 ranks cannot be shared evenly by 2 nodes"),
        ({"nnodes": 3, "node_rank": 3}, "--node-rank: 3, but --nnodes is 3, counted from 0"),
        ({"nnodes": 3}, "--master-addr: required with --nnodes"),
    ],
)
def test_wrong_settings(settings: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        ParallelConfig(tensor_parallel_size=3, **settings)


def test_models_that_differ_are_refused() -> None:
    check_models([b"one"] * 4, 2)
    with pytest.raises(ModelLoadError, match="model: rank 2, on node 1, has other model files than rank 0"):
        check_models([b"one", b"one", b"two", b"two"], 2)
