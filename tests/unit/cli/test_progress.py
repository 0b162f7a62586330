"""The progress bar says how much is done, and when the rest will be."""

from __future__ import annotations

from cli.progress import ProgressBar


def test_the_rest_is_estimated_from_this_run_alone() -> None:
    bar = ProgressBar(100, done=50, title="run 1")
    assert bar.line(0) == f"run 1 [{'#' * 15}{'-' * 15}] 50/100, 0 s"
    for number in range(10):
        bar.advance(has_failed=number == 0)
    assert bar.line(20) == f"run 1 [{'#' * 18}{'-' * 12}] 60/100, 20 s, 80 s left, 1 failed"
