"""An environment for each client: they pin versions of the same packages that do not go together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.cluster import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements")  # all that is installed, with versions; a file per environment
ENVIRONMENTS = ROOT / ".venv-clients"
_INSTALL_DEADLINE_S = 1800.0
_AS_IT_STANDS = "# Installed as it stands"  # first line of a file whose packages disagree about versions


class NotInstallableError(Exception):
    """The package index does not have what a client needs, for this Python on this platform."""


def environment(name: str) -> Path:
    """The directory of the programs of an environment, which is built unless it has what its file requires."""
    directory = ENVIRONMENTS / name
    required = (REQUIREMENTS / f"{name}.txt").read_text()
    stamp = directory / ".installed"
    if not stamp.exists() or stamp.read_text() != required:
        _install(name, directory, required)
        stamp.write_text(required)
    return directory / "bin"


def version_of(name: str, package: str) -> str:
    """The version of a package that an environment has."""
    required = (REQUIREMENTS / f"{name}.txt").read_text()
    spelled = "[-_.]".join(re.split("[-_.]", package))
    match = re.search(rf"^{spelled}==(\S+)$", required, re.MULTILINE)
    assert match is not None, f"{package} is not in requirements/{name}.txt"
    return match[1]


def _install(name: str, directory: Path, required: str) -> None:
    (directory / ".installed").unlink(missing_ok=True)
    _run(name, sys.executable, "-m", "venv", "--clear", str(directory))
    pip = (str(directory / "bin" / "pip"), "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    alone = ("--no-deps",) if required.startswith(_AS_IT_STANDS) else ()
    _run(name, *pip, *alone, "--requirement", str(REQUIREMENTS / f"{name}.txt"))


def _run(name: str, *command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=_INSTALL_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or [error.stderr[-500:]]
        raise NotInstallableError(f"the environment {name} cannot be built: {lines[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstallableError(f"the environment {name} was not built within {error.timeout:.0f} s") from error
