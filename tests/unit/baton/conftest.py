"""Fixtures of routers over fake pods."""

from tests.unit.router.conftest import says, start_cluster, tokenizer  # noqa: F401
