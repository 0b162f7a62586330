"""What docs/architectures.md says of each architecture is so."""

from __future__ import annotations

import pytest

from tests.architectures.checks import check
from tests.architectures.models import MODEL_TYPES
from tests.architectures.page import PAGE, page, row_of

IN_EVERY_RUN = ("jetmoe", "lfm2")  # the others are for `make test-matrix`


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_EVERY_RUN else pytest.mark.matrix) for each in MODEL_TYPES]
)
def test_the_page_says_how_it_is_served(name: str) -> None:
    assert row_of(name, page({name: check(name)})) == row_of(name, PAGE.read_text())


def test_the_page_has_each_once() -> None:
    for name in MODEL_TYPES:
        row_of(name, PAGE.read_text())
    assert len(MODEL_TYPES) >= 45
