"""`baton doctor`: checks what this machine has of what Baton needs.

1. All checks start at once, each on a thread of its own. What may hang or crash a process, such as loading torch on a
   machine with a broken driver, a child process does (`deploy.doctor_probes`).
2. A check that raises or misses the deadline is itself a finding, so that a broken machine is reported and not a
   traceback.
3. Findings come in the order of the checks. What is needed and broken makes the exit code 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from common import __version__

Status = Literal["ok", "note", "warning", "failed"]
Port = Annotated[int, Meta(ge=0, le=65535)]


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan: what this machine is to run. What the plan names is needed; without it the defaults of `baton up` are."""

    connector: Annotated[str, Meta(min_length=1, description="How KV blocks are to travel between pods.")] = (
        "shared-storage"
    )
    connector_path: Annotated[
        str, Meta(description="Directory of the shared-storage connector; empty: one in shared memory.")
    ] = ""
    redis_url: Annotated[
        str, Meta(description="Redis server that must answer, redis://[user:password@]host[:port][/db].")
    ] = ""
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Device of the pods.")] = "auto"
    host: Annotated[str, Meta(min_length=1, description="Address on which the router is to listen.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port of the router.")] = 8000
    grpc_port: Annotated[Port, Meta(description="gRPC port of the router.")] = 9000
    timeout_s: Annotated[float, Meta(gt=0, le=600, description="Seconds that each check may take.")] = 60.0


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. note: a choice that is not there; warning: works, but badly; failed: needed and broken."""

    status: Status
    detail: str
    fix: str = ""


class Check(NamedTuple):
    """One check."""

    name: str
    run: Callable[[DoctorConfig], Finding]
    is_needed: Callable[[DoctorConfig], bool] = lambda _: True  # if it can neither succeed nor fail


class Report(msgspec.Struct, frozen=True):
    """All findings by the name of their check, in the order of the checks."""

    findings: dict[str, Finding]
    version: str = __version__

    @property
    def has_failed(self) -> bool:
        """Whether anything that is needed is broken."""
        return any(finding.status == "failed" for finding in self.findings.values())


def examine(config: DoctorConfig, checks: Sequence[Check]) -> Report:
    """Runs `checks` side by side. Raises nothing, whatever they do."""
    findings: dict[str, Finding] = {}
    threads = [
        threading.Thread(target=_run, args=(check, config, findings), name=f"check-{check.name}", daemon=True)
        for check in checks
    ]
    deadline = time.monotonic() + config.timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = dict(findings)  # a late check changes nothing any more
    return Report({check.name: found.get(check.name) or _late(check, config) for check in checks})


def _run(check: Check, config: DoctorConfig, findings: dict[str, Finding]) -> None:
    try:
        findings[check.name] = check.run(config)
    except Exception as error:  # noqa: BLE001  whatever is broken on this machine is what the report is for
        reason = " ".join(str(error).split()) or "no message"
        findings[check.name] = _unknown(check, config, f"cannot be checked: {type(error).__name__}: {reason}")


def _late(check: Check, config: DoctorConfig) -> Finding:
    return _unknown(check, config, f"not finished within {config.timeout_s:g} s")


def _unknown(check: Check, config: DoctorConfig, detail: str) -> Finding:
    return Finding("failed" if check.is_needed(config) else "warning", detail)


def describe(report: Report) -> str:
    """The report for people."""
    width = max(map(len, report.findings))
    lines: list[str] = []
    for name, finding in report.findings.items():
        first, *rest = finding.detail.splitlines()
        margin = " " * (width + 11)
        lines.append(f"{finding.status:<8} {name:<{width}}  {first}")
        lines += [f"{margin}{line}" for line in rest]
        if finding.fix:
            lines.append(f"{margin}-> {finding.fix}")
    failed = [name for name, finding in report.findings.items() if finding.status == "failed"]
    lines.append(f"\nTo be fixed: {', '.join(failed)}." if failed else "\nNothing that is needed is broken.")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """The report for programs."""
    checks = [{"name": name, **msgspec.to_builtins(finding)} for name, finding in report.findings.items()]
    document = {"version": report.version, "ok": not report.has_failed, "checks": checks}
    return msgspec.json.format(msgspec.json.encode(document)).decode()
