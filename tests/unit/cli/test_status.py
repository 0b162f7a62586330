"""`baton status`."""

from __future__ import annotations

import os

import pytest

from cli.main import main
from deploy.cluster_state import ClusterState, PodState, claim, start_time_of


@pytest.mark.parametrize("models", [["qwen", "llama"], ["", ""]])
def test_processes_are_shown_with_their_models_if_there_are_several(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = claim("default")
    pods = [PodState(f"decode-{number}", "decode", "127.0.0.1:1", model=model) for number, model in enumerate(models)]
    pods.append(PodState("router", "router", "http://127.0.0.1:2"))
    names = ", ".join(filter(None, models)) or "demo"
    state = ClusterState("default", os.getpid(), start_time_of(os.getpid()), model=names, pods=pods)
    claimed.save(state)
    try:
        assert main(["status"]) == 1  # not all are ready
    finally:
        os.close(claimed.lock)
    title, header, *rows = capsys.readouterr().out.splitlines()
    if all(models):
        assert title.endswith(", models qwen, llama")
        assert header.split()[-1] == "MODEL"
        assert [row.split()[-1] for row in rows] == ["qwen", "llama", "0"]
    else:
        assert title.endswith(", model demo")
        assert "MODEL" not in header
