"""A cluster for all clients, and the page that tells what they did."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from common.demo_model import demo_model_path
from tests.clients.environments import NotInstallableError, environment, version_of
from tests.clients.page import Page, Section, shell_lines, tidied
from tests.e2e.cluster import Cluster, running_cluster

RUN_DEADLINE_S = 600.0
_PROGRAMS = Path(__file__).with_name("programs")
_SHOWN_URL = "http://127.0.0.1:8000"  # on the page, for that of a run
_SHOWN_MODEL = "common/demo_model/weights"
_page = pytest.StashKey[Page]()


class Client:
    """A client in its environment."""

    def __init__(
        self, title: str, env_name: str, packages: Sequence[str], cluster: Cluster, directory: Path, page: Page
    ) -> None:
        self.url = cluster.url
        self.model = str(demo_model_path())
        self.directory = directory  # where it runs
        self._title = title
        self._page = page
        self._versions = tuple(f"{package} {version_of(env_name, package)}" for package in packages)
        try:
            self._programs = environment(env_name)
        except NotInstallableError as error:
            page.skip(title, str(error))
            pytest.skip(str(error))

    def run(self, *command: str, **env: str) -> str:
        """Runs a program of the environment, which must end with 0; returns what it printed."""
        with subprocess.Popen(
            [str(self._programs / command[0]), *command[1:]],
            cwd=self.directory,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", "PYTHONWARNINGS": "ignore", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=RUN_DEADLINE_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # processes of its own that it left behind, too
        assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}:\n{output[-20_000:]}"
        return output

    def run_and_tell(self, *command: str, excerpt: Callable[[str], str], env: dict[str, str] | None = None) -> None:
        """Runs it, and puts the command and an excerpt of the output on the page."""
        output = self.run(*command, **(env or {}))
        shown = shell_lines([*[f"{name}={value}" for name, value in (env or {}).items()], *command])
        self._tell("sh", self._tidied(shown), excerpt(output))

    def run_program(self, name: str) -> None:
        """Runs one of the programs here with the router's URL, and puts it on the page."""
        path = _PROGRAMS / name
        self._tell("python", path.read_text(), self.run("python", str(path), self.url))

    def _tell(self, language: str, source: str, output: str) -> None:
        self._page.add(self._title, Section(self._versions, language, source, self._tidied(output)))

    def _tidied(self, text: str) -> str:
        return tidied(text, {self.url: _SHOWN_URL, self.model: _SHOWN_MODEL, str(self.directory): "."})


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """In float32, so that what it computes can be compared with `transformers`."""
    with running_cluster("--dtype", "float32") as cluster:
        yield cluster


@pytest.fixture
def client(
    shared_cluster: Cluster, tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Callable[[str, str, Sequence[str]], Client]]:
    """Makes a Client of a title of the page, an environment, and the packages whose versions count. Every pod is found
    sound and idle after the test."""
    page = pytestconfig.stash[_page]
    yield lambda title, env_name, packages: Client(title, env_name, packages, shared_cluster, tmp_path, page)
    shared_cluster.check_integrity()


def pytest_configure(config: pytest.Config) -> None:
    """Begins the page."""
    config.stash[_page] = Page()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the page, unless a client failed."""
    if exitstatus == pytest.ExitCode.OK:
        session.config.stash[_page].write()
