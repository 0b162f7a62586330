"""`baton doctor` on machines of which something is broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from cli.main import main
from deploy import doctor_checks
from deploy.doctor import Check, DoctorConfig, Finding, Status, as_json, describe, examine
from deploy.ports import pick_ports
from tests.redis_server import RedisServer

PLAN = DoctorConfig(timeout_s=30)


def broken(_: DoctorConfig) -> Finding:
    raise OSError("no such device")


def test_a_check_that_raises_is_reported_and_fails_only_where_it_is_needed() -> None:
    checks = [
        Check("needed", broken),
        Check("other", broken, lambda _: False),
        Check("sound", lambda _: Finding("ok", "fine")),
    ]
    report = examine(PLAN, checks)
    assert [(name, finding.status) for name, finding in report.findings.items()] == [
        ("needed", "failed"),
        ("other", "warning"),
        ("sound", "ok"),
    ]
    assert report.findings["needed"].detail == "cannot be checked: OSError: no such device"
    assert report.has_failed
    assert not examine(PLAN, checks[1:]).has_failed


def test_a_check_that_hangs_is_given_up_and_holds_up_no_other() -> None:
    over = threading.Event()

    def hang(_: DoctorConfig) -> Finding:
        over.wait(60)
        return Finding("ok", "late")

    report = examine(
        DoctorConfig(timeout_s=1.0), [Check("hung", hang), Check("sound", lambda _: Finding("ok", "fine"))]
    )
    over.set()
    assert report.findings["hung"] == Finding("failed", "not finished within 1 s")
    assert report.findings["sound"].status == "ok"


def test_the_report_says_what_to_fix_to_people_and_programs() -> None:
    report = examine(PLAN, [Check("disk", lambda _: Finding("failed", "full\nfor days", "empty it"))])
    assert describe(report) == (
        "failed   disk  full\n               for days\n               -> empty it\n\nTo be fixed: disk."
    )
    document = json.loads(as_json(report))
    assert document["ok"] is False
    assert document["checks"] == [{"name": "disk", "status": "failed", "detail": "full\nfor days", "fix": "empty it"}]


def test_this_machine_is_fit_for_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    port, grpc_port = pick_ports("127.0.0.1", 2)
    code = main(["doctor", "--json", "--port", str(port), "--grpc-port", str(grpc_port)])
    findings = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert list(findings) == [check.name for check in doctor_checks.CHECKS]
    assert code == 0, [each for each in findings.values() if each["status"] == "failed"]
    assert findings["torch"]["detail"].startswith("torch ")
    assert "UCX moves blocks over" in findings["nixl"]["detail"]


def test_a_port_in_use_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = doctor_checks.check_ports(DoctorConfig(port=port, grpc_port=0))
    assert finding.status == "failed"
    assert str(port) in finding.detail
    assert finding.fix == "end what uses them, or choose others with --port"


def test_a_router_needs_no_engine_and_a_pod_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _packages_without(monkeypatch, "torch", "transformers").status == "ok"
    finding = _packages_without(monkeypatch, "uvicorn")
    assert (finding.status, finding.detail.splitlines()[0]) == ("ok", "for pods")
    neither = _packages_without(monkeypatch, "torch", "uvicorn")
    assert neither.status == "failed"
    assert "torch>=" in neither.detail
    assert neither.fix == "pip install 'baton-llm[engine,router]'"


def test_a_package_that_is_too_old_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.100.0" if name == "grpcio" else installed(name))
    finding = doctor_checks.check_packages(PLAN)
    assert finding.status == "ok"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.69.2" if name == "grpcio" else installed(name))
    finding = doctor_checks.check_packages(PLAN)
    assert (finding.status, "grpcio>=1.70" in finding.detail) == ("failed", True)


def _packages_without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> Finding:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        return doctor_checks.check_packages(PLAN)


@pytest.mark.parametrize(
    ("driver", "cuda", "device", "status", "says"),
    [
        (False, "", "auto", "ok", "no GPU: pods run on the CPU"),
        (False, "13.0", "cuda", "failed", "no GPU that torch can use"),
        (True, "", "auto", "warning", "NVIDIA driver 580.65.06, but torch sees no GPU"),
        (True, "", "cpu", "ok", "no GPU: pods run on the CPU"),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, driver: bool, cuda: str, device: str, status: Status, says: str) -> None:
    answer = {"version": "2.13", "cpu_kernels": "AVX2", "num_threads": 2, "cuda": cuda, "devices": [], "problem": ""}
    monkeypatch.setattr(doctor_checks, "_probe", lambda *_: doctor_checks.Probed(answer, ""))
    monkeypatch.setattr(doctor_checks, "_nvidia_driver", lambda: "580.65.06" if driver else "")
    finding = doctor_checks.check_torch(DoctorConfig(device=device))  # type: ignore[arg-type]
    assert finding.status == status
    assert says in finding.detail


@pytest.mark.parametrize(("compiler", "status"), [("gcc", "ok"), ("", "warning")])
def test_a_gpu_without_a_c_compiler(monkeypatch: pytest.MonkeyPatch, compiler: str, status: Status) -> None:
    device = {"name": "H100", "memory_bytes": 2**36, "capability": "9.0"}
    answer = {"version": "2.13", "cpu_kernels": "AVX2", "num_threads": 2, "cuda": "13", "devices": [device]}
    monkeypatch.setattr(doctor_checks, "_probe", lambda *_: doctor_checks.Probed(answer, ""))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: None)
    finding = doctor_checks.check_torch(DoctorConfig())
    assert finding.status == status
    assert ("no C compiler" in finding.detail) == (status == "warning")


def test_a_library_that_kills_the_process_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'driver: bad magic\\n')\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = examine(PLAN, [Check("torch", doctor_checks.check_torch)])
    assert report.findings["torch"].status == "failed"
    assert "driver: bad magic (exit code -6)" in report.findings["torch"].detail


def test_shared_memory_too_small_or_not_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = DoctorConfig(connector_path=str(tmp_path / "missing"))
    assert doctor_checks.check_shared_memory(plan).status == "failed"
    monkeypatch.setattr(doctor_checks, "MIN_SHARED_MEMORY", 1 << 60)
    finding = doctor_checks.check_shared_memory(DoctorConfig(connector_path=str(tmp_path)))
    assert (finding.status, "--shm-size" in finding.fix) == ("warning", True)


def test_few_open_files_and_a_missing_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = doctor_checks.check_files(PLAN)
    assert (finding.status, finding.fix) == ("failed", "ulimit -n 4096, for many clients")
    monkeypatch.setattr(doctor_checks.tempfile, "tempdir", str(tmp_path / "missing"))
    assert doctor_checks.check_temporary_files(PLAN).status == "failed"


def test_a_clock_before_the_installation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    finding = doctor_checks.check_clock(PLAN)
    assert (finding.status, finding.fix) == ("failed", "set the clock: certificates are checked against it")


def test_redis_without_a_bound_warns_and_an_absent_one_fails_without_its_password() -> None:
    server = RedisServer({})
    server.start()
    try:
        finding = doctor_checks.check_redis(DoctorConfig(redis_url=server.url))
    finally:
        server.kill()
    assert (finding.status, "set maxmemory" in finding.fix) == ("warning", True)
    gone = doctor_checks.check_redis(DoctorConfig(redis_url=f"redis://:geheim@{server.address}/0"))
    assert gone.status == "failed"
    assert "geheim" not in gone.detail


def test_more_threads_than_cores_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(1 + (os.cpu_count() or 1)))
    assert doctor_checks.check_cpu(PLAN).status == "warning"
