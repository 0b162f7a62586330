"""Handoffs between real pods with a real model: how long they take, and how much of the transfer hides behind compute.

Two prefill pods and a decode pod, each with its engine process, joined by gRPC; the benchmark is their router. One
prefill pod computes any prompt in one chunk, so that all of its KV travels after the forward. The other computes the
longest prompt in `NUM_CHUNKS`, and its KV travels meanwhile:

    hidden = 1 - handoff latency with 8 chunks / handoff latency with one

That is a lower bound, since the pods' messages count as transfer. With 8 equal chunks the last cannot be hidden:
87.5 % is the most.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.harness.models import SHAPES, make_random_model
from benchmarks.harness.processes import Child
from benchmarks.kv.medium import Medium, open_medium
from benchmarks.kv.traced import EXECUTOR, TRACE_VARIABLE
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import DecodeStub, PrefillStub
from common.rpc.convert import sampling_to_pb
from common.types import SamplingParams

NUM_CHUNKS = 8
BLOCK_SIZE = 4
BLOCK_BYTES = 1 << 20  # of the model below
_ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PodHandoffs:
    """Handoffs of one prompt length between pods."""

    connector: str
    num_blocks: int
    num_chunks: int
    latencies: tuple[float, ...]  # seconds from the end of the last forward to the first forward of decode

    @property
    def p50_s(self) -> float:
        """Median."""
        return statistics.median(self.latencies)


def hidden_share(whole: PodHandoffs, chunked: PodHandoffs) -> float:
    """See the module."""
    return 1 - chunked.p50_s / whole.p50_s


def measure_pods(connector: str, num_blocks: Sequence[int], repeats: int, tmpfs: Path) -> list[PodHandoffs]:
    """Prompts of `num_blocks` in one chunk, and those of the most in `NUM_CHUNKS`; all in turn."""
    most = max(num_blocks)
    shapes = [(blocks, 1) for blocks in num_blocks] + [(most, NUM_CHUNKS)]
    latencies: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    with _cluster(connector, most, tmpfs) as cluster:
        for repeat in range(repeats + 1):
            for shape in shapes:
                latency = cluster.hand_over(*shape)
                if repeat:  # the first warms up
                    latencies[shape].append(latency)
    return [PodHandoffs(connector, *shape, tuple(taken)) for shape, taken in latencies.items()]


class _Pod:
    """A pod and the notes of its forwards."""

    def __init__(self, address: str, trace: Path) -> None:
        self.channel = grpc.insecure_channel(address)
        self.address = address
        self._trace = trace

    def forwards(self) -> list[tuple[float, float]]:
        """Begin and end of each forward since the last call."""
        lines = self._trace.read_text(encoding="ascii").splitlines()
        os.truncate(self._trace, 0)
        return [(float(begin), float(end)) for begin, _, end in (line.partition(" ") for line in lines)]


class _Cluster:
    """The router's part."""

    def __init__(self, prefills: dict[int, _Pod], decode: _Pod, medium: Medium) -> None:
        self._prefills = prefills  # by number of chunks
        self._decode = decode
        self._medium = medium
        self._serial = itertools.count(1)
        self._random = random.Random(0)
        self._commands: queue.SimpleQueue[pods_pb2.DecodeCommand | None] = queue.SimpleQueue()
        self._events = DecodeStub(decode.channel).Session(iter(self._commands.get, None))

    def hand_over(self, num_blocks: int, num_chunks: int) -> float:
        """Seconds from the end of prefill's last forward to decode's first."""
        prefill = self._prefills[num_chunks]
        request = self._request(num_blocks)
        remote = pods_pb2.RemotePrefill(transfer_id=request.request_id, epoch=1, prefill_address=prefill.address)
        submit = pods_pb2.Submit(request=request, remote_prefill=remote)
        self._commands.put(pods_pb2.DecodeCommand(submit=submit))
        PrefillStub(prefill.channel).Prefill(
            pods_pb2.PrefillRequest(request=request, transfer_id=request.request_id, epoch=1), timeout=_ANSWER_TIMEOUT_S
        )
        self._wait_finished(request)
        computed, decoded = prefill.forwards(), self._decode.forwards()
        if len(computed) != num_chunks or len(decoded) != 1:
            raise SystemExit(
                f"{len(computed)} forwards of prefill and {len(decoded)} of decode, not {num_chunks} and 1"
            )
        self._medium.clean()
        return decoded[0][0] - computed[-1][1]

    def close(self) -> None:
        """End the session."""
        self._commands.put(None)
        self._events.cancel()  # type: ignore[no-untyped-call]

    def _request(self, num_blocks: int) -> common_pb2.EngineRequest:
        prompt = [self._random.randrange(SHAPES["much KV"].vocab_size) for _ in range(num_blocks * BLOCK_SIZE)]
        sampling = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        return common_pb2.EngineRequest(
            request_id=f"handoff-{next(self._serial)}", prompt_token_ids=prompt, sampling=sampling
        )

    def _wait_finished(self, request: common_pb2.EngineRequest) -> None:
        for events in self._events:
            for delta in events.deltas:
                if delta.HasField("error"):
                    raise SystemExit(f"a handoff between pods failed: {delta.error.message}")
                if delta.HasField("report") and delta.report.num_external_tokens != len(request.prompt_token_ids):
                    raise SystemExit(f"not all of the prompt was handed over: {delta.report.recompute_reason}")
                if delta.finish_reason:
                    return
        raise SystemExit("the decode pod ended its session")


@contextmanager
def _cluster(connector: str, num_blocks: int, tmpfs: Path) -> Iterator[_Cluster]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=tmpfs)))
        medium = stack.enter_context(open_medium(connector, scratch))
        model = make_random_model(scratch, "much KV", max_tokens=(num_blocks + 2) * BLOCK_SIZE)
        settings = [f"--model={model}", f"--connector={medium.connector}", "--log-level=warning"]
        settings += [f"--num-blocks={2 * num_blocks + 8}", f"--block-size={BLOCK_SIZE}"]
        settings += [f"--connector-options={name}={value}" for name, value in medium.options.items()]
        prompt_tokens = num_blocks * BLOCK_SIZE
        pods = {}
        for name, budget in (("decode", 512), ("prefill-1", prompt_tokens), ("prefill-8", prompt_tokens // NUM_CHUNKS)):
            own = [*settings, f"--max-num-batched-tokens={budget}"]
            pods[name] = stack.enter_context(_pod(name.partition("-")[0], own, medium, scratch / f"{name}.trace"))
        cluster = _Cluster({1: pods["prefill-1"], NUM_CHUNKS: pods["prefill-8"]}, pods["decode"], medium)
        stack.callback(cluster.close)
        yield cluster


@contextmanager
def _pod(role: str, settings: Sequence[str], medium: Medium, trace: Path) -> Iterator[_Pod]:
    variables = {**medium.env, TRACE_VARIABLE: str(trace)}
    with Child("-m", "benchmarks.harness.pods", EXECUTOR, role, *settings, variables=variables) as child:
        pod = _Pod(child.read_ready()["address"], trace)
        with pod.channel:
            yield pod
