"""A decode pod as a process: settings that cannot work."""

from __future__ import annotations

import pytest

from common.config import CONFIG_ERROR_EXIT_CODE
from decode_service.__main__ import main


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster-key", "x"], "--cluster-ca: required with --cluster-key"),
        (["--cluster-ca", "a", "--cluster-cert", "/no", "--cluster-key", "/no"], "--cluster-key: cannot read /no"),
    ],
)
def test_a_pod_that_cannot_prove_who_it_is_does_not_start(options, said, capsys):
    assert main(options) == CONFIG_ERROR_EXIT_CODE
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"baton: error: {said}")
