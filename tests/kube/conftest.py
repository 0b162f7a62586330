"""Podman with the images for all tests; the log of the run goes to benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.conftest import cache
from tests.compose.engine import Engine, UnavailableError
from tests.compose.images import make_base, make_images, make_stand_ins
from tests.compose.record import Record
from tests.kube.podman import podman


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """What the run found, written at its end if nothing has failed."""
    found = Record("Chart", "Written by `make test-kube`: what the chart renders, by `podman kube play`.")
    yield found
    if request.session.testsfailed == 0:
        found.write()


@pytest.fixture(scope="session")
def engine(record: Record) -> Engine:
    """Podman with all images."""
    try:
        found = podman(cache())
    except UnavailableError as reason:
        pytest.skip(str(reason))
    record.program(found.client("version", "--format", "Podman {{.Client.Version}}").strip())
    with record.timed("base image"):
        make_base(found)
    with record.timed("images of others"):
        make_stand_ins(found, ["redis"])
    with record.timed("our images"):
        make_images(found)
    return found
