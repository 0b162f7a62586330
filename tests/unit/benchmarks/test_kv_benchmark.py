"""The benchmark of the KV plane runs, and its figures say what they claim. No test looks at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.report import Verdict
from benchmarks.kv.__main__ import main
from benchmarks.kv.measure import MIB, Cell, Results, Staging, Way
from benchmarks.kv.pods import PodHandoffs
from benchmarks.kv.report import make_page, verdicts

WAY = Way(seconds=0.01, bytes_per_s=2e9, cpu_s_per_gib=0.5)
CELL = Cell(
    connector="nixl",
    block_bytes=MIB,
    num_blocks=16,
    num_handoffs=1,
    num_samples=100,
    p50_s=0.01,
    p99_s=0.02,
    ways={"ours": WAY, "bare": WAY, "memcpy": WAY},
    share_of_bare=0.9,
    own_s=0.0005,
    digest_share=0.05,
)


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
def test_quick_run_writes_its_tables(connector, tmp_path):
    """Each process checks that the bytes that arrive are those that left, so this is also a test of the bare media."""
    page = tmp_path / "kv.md"
    assert main(["--quick", "--connectors", connector, "--markdown", str(page)]) == 0
    single, several = page.read_text().partition(f"## {connector}")[2].split("handoffs at once")
    rows = [[cell.strip() for cell in line.split("|")] for line in single.splitlines() if line.startswith("| 64 KiB ")]
    assert [(row[2], row[13] != "") for row in rows] == [("1", True), ("16", True)], "digests are taken where it looks"
    assert all(float(row[6]) > 0 for row in rows)
    assert "| 2 | 16 x 64 KiB | " in several
    assert [f"| {connector} | {shape} | " in several for shape in ("1 | 1", "16 | 1", "16 | 8")] == [True] * 3


def test_unknown_connector_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--connectors", "tape"])
    assert "tape is none of" in capsys.readouterr().err


def verdict_of(cell: Cell, words: str) -> Verdict:
    (verdict,) = (v for v in verdicts(Results([cell], [], [])) if words in v.target)
    return verdict


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ("bandwidth", {"share_of_bare": 0.85}, {"share_of_bare": 0.84}),
        ("our own code", {"own_s": 0.001}, {"own_s": 0.0011}),
        ("digest", {"digest_share": 0.10}, {"digest_share": 0.11}),
    ],
)
def test_targets(words, good, bad):
    assert verdict_of(replace(CELL, **good), words).is_met
    assert not verdict_of(replace(CELL, **bad), words).is_met


def test_bandwidth_is_also_that_of_several_threads():
    slow = replace(WAY, bytes_per_s=1e9)
    verdict = verdict_of(replace(CELL, ways={**CELL.ways, "threaded": slow}, share_of_bare=0.5), "bandwidth")
    assert not verdict.is_met
    assert "as many threads as ours 200%" in verdict.measured


def test_small_handoffs_have_no_target_of_bandwidth():
    small = replace(CELL, num_blocks=15, share_of_bare=0.1)
    assert not [v for v in verdicts(Results([small], [], [])) if "bandwidth" in v.target]


@pytest.mark.parametrize(("chunked_ms", "is_met"), [(20, True), (21, False)])
def test_hidden_is_what_chunks_save(chunked_ms, is_met):
    shapes = ((1, 1, 10), (16, 1, 100), (16, 8, chunked_ms))
    pods = [PodHandoffs("nixl", blocks, chunks, (ms / 1e3,)) for blocks, chunks, ms in shapes]
    (verdict,) = (v for v in verdicts(Results([CELL], [], pods)) if "hidden" in v.target)
    assert verdict.is_met == is_met


def test_memory_may_not_grow_with_the_prompt():
    few = Staging("redis", MIB, 16, 3 * MIB, 3 * MIB)
    bounded, growing = replace(few, num_blocks=1024, producer_bytes=11 * MIB), replace(few, consumer_bytes=12 * MIB)
    (good,) = verdicts(
        Results([replace(CELL, connector="redis", share_of_bare=1, digest_share=None)], [few, bounded], [])
    )[1:]
    (bad,) = verdicts(
        Results([replace(CELL, connector="redis", share_of_bare=1, digest_share=None)], [few, growing], [])
    )[1:]
    assert (good.is_met, bad.is_met) == (True, False)


def test_page_marks_what_fails():
    results = Results([replace(CELL, share_of_bare=0.5)], [], [])
    page = str(make_page({"cores": "2"}, results))
    assert "| 50% at worst (16 x 1024 KiB) | **FAIL** |" in page
