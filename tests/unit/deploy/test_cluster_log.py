"""The log of a cluster in the background."""

from __future__ import annotations

import stat
from pathlib import Path

from deploy.cluster_log import ClusterLog, previous, read_log


def test_the_last_lines_of_all_or_of_one_pod(tmp_path: Path) -> None:
    log = ClusterLog(tmp_path / "log")
    for index in range(3):
        log.write(f"[prefill-0] {index}")
        log.write(f"[prefill-01] {index}")
    log.write_own("\nReady.\n\n  now")
    lines = list(read_log(tmp_path / "log", 3))
    assert lines[0] == "[prefill-01] 2"
    assert [line[:10] + line[-6:] for line in lines[1:]] == ["[launcher]Ready.", "[launcher]   now"]
    assert list(read_log(tmp_path / "log", 2, "prefill-0")) == ["[prefill-0] 1", "[prefill-0] 2"]
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_its_size_is_bounded_and_a_reader_follows_across_the_cut(tmp_path: Path) -> None:
    log = ClusterLog(tmp_path / "log", max_bytes=100)
    log.write("[a] before")
    reader = read_log(tmp_path / "log", 10, is_over=lambda: len(said) == 31)
    said = [next(reader)]
    for index in range(30):
        log.write(f"[a] {index}")
        said.append(next(reader))
    assert said == ["[a] before", *(f"[a] {index}" for index in range(30))]
    assert list(reader) == []
    assert (tmp_path / "log").stat().st_size <= 100
    assert previous(tmp_path / "log").stat().st_size <= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_what_is_written_before_the_end_is_read(tmp_path: Path) -> None:
    log = ClusterLog(tmp_path / "log")

    def end() -> bool:
        log.write("[a] last")
        return True

    assert list(read_log(tmp_path / "log", 0, is_over=end)) == ["[a] last"]


def test_a_log_that_cannot_be_cut_goes_on(tmp_path: Path) -> None:
    log = ClusterLog(tmp_path / "log", max_bytes=10)
    (tmp_path / "log.1" / "in-the-way").mkdir(parents=True)
    for index in range(3):
        log.write(f"[a] line {index}")
    assert list(read_log(tmp_path / "log", 9)) == ["[a] line 0", "[a] line 1", "[a] line 2"]
