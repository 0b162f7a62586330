"""A connector comes from outside the package, in one short file, to pods and to every command."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cli.main import main
from common.demo_model import DEMO_MODEL_NAME
from common.errors import ConfigError
from deploy.doctor import DoctorConfig
from deploy.doctor_checks import check_shared_memory
from kv_store.registry import create_connector
from tests.e2e.cluster import running_cluster
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import PROMPTS, greedy_completion
from tests.extensions import connector

MAX_LINES = 90
PLACE = "tests.extensions.connector:KIND"


def test_a_cluster_hands_over_with_it_and_its_store_is_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"model": DEMO_MODEL_NAME, "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
    own = ["--connector", PLACE, "--connector-path", str(tmp_path)]
    with running_cluster("--remote-prefill", "prefer", *own) as cluster:
        response = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=60)
        assert response.json()["choices"][0]["text"] == greedy_completion(PROMPTS[0], 16)
        assert pod_metrics(cluster, "decode-0")["prompt_tokens"] == 0  # none computed
        assert main(["kv", "verify", *own]) == 0
        assert "corrupt: 0" in capsys.readouterr().out
        cluster.check_integrity()


def test_the_doctor_looks_at_what_it_needs(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert check_shared_memory(DoctorConfig(connector=PLACE, connector_path=missing)).status == "failed"
    assert check_shared_memory(DoctorConfig(connector="nixl", connector_path=missing)).status == "note"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("tests.extensions.connector:Nothing", "connector: cannot import 'tests.extensions.connector:Nothing'"),
        ("tests.extensions.connector:create", "tests.extensions.connector:create is no ConnectorKind"),
    ],
)
def test_what_is_none_is_named(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_connector(place, {})


def test_it_is_short() -> None:
    assert len(Path(connector.__file__).read_text().splitlines()) < MAX_LINES
