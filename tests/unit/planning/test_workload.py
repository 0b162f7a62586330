"""Workloads: the same for the same seed, and as the file has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.types import HASH_BYTES
from planning.workload import read_trace, synthetic

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 4000, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 9], "more": True},
    {"timestamp": 2000, "input_length": 40, "output_length": 5},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_seed_makes_the_same_requests_and_the_rate_only_moves_them() -> None:
    workload = synthetic(10.0, 100, 20, 400, spread=0.5, seed=3)
    assert workload == synthetic(10.0, 100, 20, 400, spread=0.5, seed=3)
    assert workload != synthetic(10.0, 100, 20, 400, spread=0.5, seed=4)
    assert workload.requests[-1].arrival_s == pytest.approx(40, rel=0.2)
    assert workload.mean_prompt_tokens == pytest.approx(100, rel=0.1)
    twice = workload.trace(2.0, 16)
    assert [2 * session.start_s for session in twice.sessions] == [each.arrival_s for each in workload.requests]


def test_a_trace_keeps_its_lengths_order_and_shared_beginnings(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path / "t.jsonl", *LINES, ""), None, 10)
    assert [each.arrival_s for each in workload.requests] == [0, 2, 4]
    assert workload.rate == pytest.approx(0.5)
    first, short, last = (session.turns[0] for session in workload.trace(1.0, 64).sessions)
    assert (first.num_prompt_tokens, first.num_output_tokens, short.num_output_tokens) == (1100, 20, 5)
    assert len(first.prompt) == 1100 // 64 * HASH_BYTES
    shared = 1024 // 64 * HASH_BYTES
    assert first.prompt[:shared] == last.prompt[:shared]
    assert first.prompt[shared:] != last.prompt[shared:]
    assert first.whole.startswith(first.prompt)


def test_a_rate_stretches_a_trace(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path / "t.jsonl", *LINES), 5.0, 10)
    assert [each.arrival_s for each in workload.requests] == pytest.approx([0, 0.2, 0.4])
    assert workload.rate == 5.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LINES[0], "{"], "line 2: Input data was truncated"),
        (
            [LINES[0], {"timestamp": 1, "input_length": 0, "output_length": 1}],
            "line 2: Expected int >= 1: input_length",
        ),
        ([LINES[0], {"timestamp": 1, "output_length": 1}], "line 2: Object missing required field input_length"),
        ([LINES[0]], "fewer than two requests"),
        ([LINES[0], LINES[0]], "all requests have the same timestamp"),
    ],
)
def test_a_bad_line_is_named(lines: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path / "t.jsonl", *lines), None, 10)
    assert message in caught.value.message
