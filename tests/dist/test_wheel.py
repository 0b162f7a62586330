"""The wheel that `make dist` has built, in empty environments: what each extra installs works, and what it lacks is
named."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "baton", "cli", "common", "decode_service", "deploy", "kv_store", "loadgen", "planning", "prefill_service", "router",
}  # fmt: skip
OFFLINE = "from baton import LLM\nwith LLM() as llm: print(llm.generate(['The capital of France is'])[0].text)"


def the_only(pattern: str) -> Path:
    """The file in dist/ that `make dist` has written."""
    (path,) = (ROOT / "dist").glob(pattern)
    return path


def install(directory: Path, extras: str) -> Path:
    """An environment with the wheel and its extras; returns where its commands are."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    wheel = f"{the_only('*.whl')}[{extras}]" if extras else the_only("*.whl")
    pip = [directory / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True)
    return directory / "bin"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Outside the checkout, whose packages must not be found."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_it_holds_the_packages_and_the_demo_model_and_nothing_else() -> None:
    with zipfile.ZipFile(the_only("*.whl")) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert any(name.startswith("common/demo_model/weights/") for name in names)
    assert not [name for name in names if name.endswith((".pyc", ".proto"))]


def test_a_wheel_can_be_built_from_the_sdist() -> None:
    with tarfile.open(the_only("*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "common/demo_model/weights/config.json"} <= names


def test_the_bill_of_materials_has_every_package_in_the_tested_version() -> None:
    bill = json.loads(the_only("*.cdx.json").read_text())
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    components = {item["name"].lower().replace("_", "-"): item for item in bill["components"]}
    assert {"grpcio", "fastapi", "torch", "transformers", "nixl"} <= components.keys()
    assert "pytest" not in components
    for name, item in components.items():
        if name != "baton-llm":
            assert item["version"].partition("+")[0] == pins[name].partition("+")[0], name


@pytest.mark.parametrize("extras", ["", "top", "router", "engine", "router,redis,certs"])
def test_each_extra_by_itself(tmp_path: Path, extras: str) -> None:
    commands = install(tmp_path / "env", extras)
    version = run(commands / "baton", "--version", cwd=tmp_path)
    assert re.fullmatch(r"baton \d+\.\d+\.\d+\n", version.stdout), version
    role = "router" if "router" in extras else "decode"
    served = run(commands / "baton", "serve", role, "--help", cwd=tmp_path)
    if extras in ("", "top"):
        assert served.returncode == 2
        assert "baton-llm[" in served.stderr
        assert run(commands / "baton", "complete", "Hi", "--url", "http://127.0.0.1:9", cwd=tmp_path).returncode == 3
        top = run(commands / "baton", "top", "--url", "http://127.0.0.1:9", cwd=tmp_path)
        assert (top.returncode, "baton-llm[top]" in top.stderr) == ((3, False) if extras else (2, True)), top.stderr
    else:
        assert served.returncode == 0, served.stderr
    if extras == "engine":
        assert "Paris" in run(commands / "python", "-c", OFFLINE, cwd=tmp_path).stdout


def test_all_of_it_serves_the_demo_model(tmp_path: Path) -> None:
    commands = install(tmp_path / "env", "all")
    command = [commands / "baton", "up", "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as up:
        try:
            url = router_of(up)
            body = {"model": "baton-demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            assert "Paris" in answer["choices"][0]["text"]
        finally:
            up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0


def router_of(up: subprocess.Popen[str]) -> str:
    """Its URL, once all are ready."""
    assert up.stdout is not None
    lines = []
    for line in up.stdout:  # which ends with the process, if it fails
        lines.append(line)
        if line.startswith("Stop with"):
            break
    (url,) = set(re.findall(r"router\s+(http://\S+)", "".join(lines)))
    return url
