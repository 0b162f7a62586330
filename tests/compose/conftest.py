"""One Docker Engine and one build of the images for all tests; the log of the run goes to benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine import Engine, UnavailableError, compose_v2, install, running_engine
from tests.compose.images import make_base, make_images, make_stand_ins
from tests.compose.record import Record


def cache() -> Path:
    """Where images are kept between runs; made if it is missing."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(home) / "baton-containers"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """What the run found, written at its end if nothing has failed."""
    found = Record("Compose", "Written by `make test-compose`: deploy/compose with each profile, by Docker.")
    yield found
    if request.session.testsfailed == 0:
        found.write()


@pytest.fixture(scope="session")
def engine(record: Record) -> Iterator[Engine]:
    """A running Docker Engine with all images."""
    try:
        install()
        with running_engine(cache()) as running:
            record.program(running.client("version", "--format", "Docker Engine {{.Server.Version}}").strip())
            for name, make in (
                ("base image", make_base),
                ("images of others", make_stand_ins),
                ("our images", make_images),
            ):
                with record.timed(name):
                    make(running)
            yield running
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def docker_config(engine: Engine) -> Path:
    """A configuration of the client with Compose v2 as its plug-in, so that `docker compose` works."""
    directory = engine.directory / "config"
    plugins = directory / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    link = plugins / "docker-compose"
    try:
        program = compose_v2(engine.directory)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    link.unlink(missing_ok=True)
    link.symlink_to(program)
    return directory
