"""Prompts beside streams, prompts among themselves: who gets how much of a step, on a machine of known speed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.config import SchedulerConfig
from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_cache import KVGroups, create_kv_cache_manager
from common.engine.messages import AddRequest
from common.engine.scheduler.scheduler import Scheduler
from common.step_budget import auto_target_s, prefill_work
from common.step_times import PRIOR, Line
from tests.unit.common.engine.scheduler_factories import (
    VOCAB_SIZE,
    FakeEngine,
    create_request,
    create_scheduler,
    expected_output,
)

MACHINE = Line(base_s=0.005, token_s=0.0005, context_s=1e-7)  # its knee: 490 tokens
LONG = 2000


def create_engine(
    *, target_itl_ms: float | None = 50.0, is_trained: bool = True, machine: Line = MACHINE, **options: object
) -> FakeEngine:
    """An engine that has learned how fast its machine is."""
    engine = FakeEngine(
        create_scheduler(
            num_blocks=4000,
            max_model_len=4000,
            target_itl_ms=target_itl_ms,
            **{"max_num_batched_tokens": 2048, "max_num_seqs": 64} | options,
        )
    )
    engine.machine = machine
    if is_trained:
        for index, length in enumerate((10, 300, 700, 40, 500, 900, 100, 1200) * 4):
            engine.add(create_request(f"w{index}", length, max_tokens=6))
            engine.run()
            engine.scheduler.reset_prefix_cache()
        engine.finished.clear()
    return engine


def stream(engine: FakeEngine, request_id: str = "stream", **settings: object) -> AddRequest:
    """A request that decodes."""
    request = create_request(request_id, 8, **{"max_tokens": 500} | settings)
    engine.add(request)
    engine.step()
    return request


def steps_of(engine: FakeEngine, request_id: str) -> list[tuple[int, float]]:
    """Until the request's prompt is computed: its tokens in each step, and the seconds that the step took."""
    steps = []
    while not engine.outputs[request_id]:
        began = engine.now
        step = engine.step()
        steps.append((step.num_scheduled_tokens.get(request_id, 0), engine.now - began))
    return steps


def test_a_prompt_beside_a_stream_keeps_the_step_within_its_target() -> None:
    engine = create_engine()
    beside = stream(engine)
    long = create_request("long", LONG)
    engine.add(long)
    steps = steps_of(engine, "long")
    assert sum(tokens for tokens, _ in steps) == LONG
    assert max(seconds for _, seconds in steps) <= 0.050 * 1.05
    assert max(seconds for _, seconds in steps[:-1]) >= 0.050 * 0.9, "what the target leaves is used"
    engine.run()
    assert engine.outputs["long"] == expected_output(long, max_model_len=4000)[0]
    assert engine.outputs["stream"] == expected_output(beside, max_model_len=4000)[0]


def test_what_streams_read_leaves_less_for_prompts() -> None:
    engine = create_engine(machine=Line(base_s=0.005, token_s=0.0001, context_s=1e-6), min_prefill_tokens=8)
    streams = [f"stream{index}" for index in range(12)]
    prompt = create_request("stream", LONG).prompt_token_ids
    for request_id in streams:
        engine.add(create_request(request_id, prompt, max_tokens=500))
        engine.step()
    engine.add(create_request("long", LONG))
    assert 0.045 <= max(seconds for _, seconds in steps_of(engine, "long")) <= 0.055, "24 ms of it for what they read"
    engine.abort(*streams[1:])
    engine.add(create_request("next", LONG))
    assert 0.045 <= max(seconds for _, seconds in steps_of(engine, "next")) <= 0.055


def test_without_a_target_a_prompt_takes_the_whole_step() -> None:
    engine = create_engine(target_itl_ms=None)
    stream(engine)
    engine.add(create_request("long", LONG))
    assert [tokens for tokens, _ in steps_of(engine, "long")] == [LONG]


@pytest.mark.parametrize(("target_itl_ms", "least"), [(0.001, 64), (1.0, 32)])
def test_prompts_get_their_least_share_whatever_the_target(target_itl_ms: float, least: int) -> None:
    engine = create_engine(target_itl_ms=target_itl_ms, min_prefill_tokens=least)
    stream(engine)
    engine.add(create_request("a", 100), create_request("b", 100))
    first = engine.step()
    assert first.num_scheduled_tokens == {"stream": 1, "a": least}, "one after the other, the least in all"
    engine.run()
    assert len(engine.outputs["a"]) == len(engine.outputs["b"]) == 4


def test_before_anything_is_known_of_the_machine_prompts_beside_streams_are_careful() -> None:
    engine = create_engine(is_trained=False)
    stream(engine)
    engine.add(create_request("a", 1000))
    assert engine.step().num_scheduled_tokens == {"stream": 1, "a": 64}


def test_the_tightest_target_of_the_streams_counts() -> None:
    engine = create_engine(min_prefill_tokens=8)
    engine.add(msgspec.structs.replace(create_request("strict", 8, max_tokens=500), target_itl_s=0.020))
    engine.step()
    stream(engine, "other")
    engine.add(create_request("long", LONG))
    assert max(seconds for _, seconds in steps_of(engine, "long")) <= 0.020 * 1.05
    engine.abort("strict")
    engine.add(create_request("next", LONG))
    assert max(seconds for _, seconds in steps_of(engine, "next")) >= 0.050 * 0.9


def test_without_a_target_prompts_keep_nearly_their_rate_where_no_other_pod_computes_them() -> None:
    measured = [(tokens, 2 * MACHINE.at(tokens, 0)) for tokens in (1, 64, 128, 256, 512, 1024)]
    disaggregated = create_scheduler(target_itl_ms="auto", measured_steps=measured)
    colocated = Scheduler(
        SchedulerConfig(),
        create_kv_cache_manager(100, KVGroups(ONE_GROUP, 4), enable_prefix_caching=True),
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
        measured_steps=measured,
    )
    assert disaggregated.target_itl_s == 0.050
    assert colocated.target_itl_s == auto_target_s(measured) > 0.060


def test_a_request_cannot_loosen_the_target_of_the_pod() -> None:
    engine = create_engine()
    engine.add(msgspec.structs.replace(create_request("lax", 8, max_tokens=500), target_itl_s=5.0))
    engine.step()
    engine.add(create_request("long", LONG))
    assert max(seconds for _, seconds in steps_of(engine, "long")) <= 0.050 * 1.05


def test_steps_that_were_measured_at_the_start_are_known_at_once() -> None:
    measured = [(tokens, max(0.020, MACHINE.at(tokens, 0))) for tokens in (1, 64, 128, 256)]
    engine = create_engine(is_trained=False, measured_steps=measured, min_prefill_tokens=8)
    engine.add(create_request("a", 500, role="producer"), create_request("b", 500, role="producer"))
    assert engine.step().num_scheduled_tokens == {"a": 500}, "a step of 512 tokens is as good as any"
    engine.run()
    stream(engine)
    engine.add(create_request("long", LONG))
    assert max(seconds for _, seconds in steps_of(engine, "long")) <= 0.050 * 1.05


def test_producers_are_no_streams() -> None:
    """On a prefill pod nobody waits for the next token."""
    engine = create_engine()
    engine.add(create_request("a", 700, role="producer"), create_request("b", 700, role="producer"))
    assert engine.step().num_scheduled_tokens == {"a": 700}
    assert engine.step().num_scheduled_tokens == {"b": 700}


def test_prompts_alone_come_one_after_the_other() -> None:
    """The throughput is the same; all first tokens but the last come earlier."""
    engine = create_engine(max_num_batched_tokens=4000)
    engine.add(*(create_request(f"r{index}", 900, max_tokens=1) for index in range(4)))
    firsts = {}
    while len(firsts) < 4:
        engine.step()
        firsts = dict.fromkeys(engine.finished, engine.now) | firsts
    times = [firsts[f"r{index}"] for index in range(4)]
    began = times[0] - (times[1] - times[0])
    assert [round((at - began) / (times[-1] - began), 2) for at in times] == [0.25, 0.5, 0.75, 1.0]


def test_a_short_prompt_passes_a_longer_one_that_came_within_its_time() -> None:
    engine = create_engine(max_num_seqs=1)
    engine.add(create_request("first", 1500, max_tokens=1))
    engine.begin_step()
    engine.add(create_request("long", LONG, max_tokens=1), create_request("short", 20, max_tokens=1))
    engine.end_step()
    engine.run()
    assert list(engine.finished)[-3:] == ["first", "short", "long"]


def test_what_is_cached_of_a_prompt_costs_it_no_place() -> None:
    engine = create_engine(max_num_seqs=1)
    cached = create_request("cached", LONG, max_tokens=1)
    engine.add(create_request("before", cached.prompt_token_ids, max_tokens=1))
    engine.run()
    engine.add(create_request("running", 8))
    engine.begin_step()
    engine.add(create_request("short", 300, max_tokens=1), cached)
    engine.end_step()
    engine.run()
    assert list(engine.finished) == ["before", "running", "cached", "short"]


def test_a_long_prompt_gets_on_however_many_short_ones_come() -> None:
    """More work arrives than the machine can do. The long prompt is passed only by what came within its own time."""
    engine = create_engine(max_num_seqs=4)
    engine.add(create_request("long", LONG, max_tokens=1))
    arrived, prompt_s = engine.now, MACHINE.token_s * LONG * 1.1  # attention included
    passed = 0
    while "long" not in engine.finished:
        for _ in range(8):
            engine.add(create_request(f"s{passed}", 60, max_tokens=2))
            passed += 1
        engine.step()
        assert engine.now < arrived + 3 * prompt_s + 1, "it starves"


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([5, 30, 100, 200, 1000]), st.integers(1, 20)),
        min_size=2,
        max_size=24,
    ),
    slots=st.integers(1, 3),
    has_target=st.booleans(),
)
def test_who_may_pass_whom(arrivals: list[tuple[int, int, int]], slots: int, has_target: bool) -> None:
    """A request gets a slot before all that came later than its own arrival plus its prompt's time."""
    engine = create_engine(target_itl_ms=20.0 if has_target else None, max_num_seqs=slots, is_trained=False)
    engine.machine = PRIOR
    came: dict[str, tuple[float, float]] = {}  # arrival, latest arrival that may pass
    started: dict[str, int] = {}
    requests, number = [], 0

    def step() -> None:
        nonlocal number
        number += 1
        for new in engine.step().new_requests:
            started.setdefault(new.request_id, number)

    for index, (pause, length, max_tokens) in enumerate(arrivals):
        for _ in range(pause):
            if engine.scheduler.has_work:
                step()
        prompt = [3 + (index + offset * 7) % 29 for offset in range(length)]
        request = create_request(f"r{index}", prompt, max_tokens=max_tokens)
        token_s = engine.scheduler._step_times.line.token_s
        engine.add(request)
        requests.append(request)
        came[request.request_id] = engine.now, engine.now + token_s * prefill_work(length, 0)
    while engine.scheduler.has_work:
        step()
    for request in requests:
        assert engine.outputs[request.request_id] == expected_output(request, max_model_len=4000)[0]
    for one, (_, may_pass_until) in came.items():
        passers = [other for other, (at, _) in came.items() if at > may_pass_until and started[other] < started[one]]
        assert passers == [], f"{one} was passed by those that came after {may_pass_until}"
