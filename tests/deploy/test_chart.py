"""What the chart renders is what Kubernetes and Baton take."""

from __future__ import annotations

import pytest

from tests.deploy.chart import render
from tests.deploy.kubernetes_schemas import VERSIONS, validate, violations


@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_are_valid(version: str) -> None:
    manifests = render().manifests
    assert len(manifests) > 5
    for manifest in manifests:
        validate(manifest, version)


def test_the_defaults_are_restricted() -> None:
    assert list(violations(render())) == []
