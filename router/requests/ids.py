"""Request ids that clients choose, or that are made for them."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import InvalidRequestError
from router.fairness.tenant import Tenant

REQUEST_ID_HEADER = "x-request-id"

_MAX_CHARS = 128
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{_MAX_CHARS}}}")
_NUM_SUFFIX_BYTES = 4


def check_request_id(request_id: str, param: str) -> None:
    """Raises InvalidRequestError, which names the field or header `param`."""
    if not _REQUEST_ID.fullmatch(request_id):
        problem = f"{param} must be 1 to {_MAX_CHARS} letters, digits, dots, dashes, colons or underscores"
        raise InvalidRequestError(problem, param=param)


def new_request_id(prefix: str = "") -> str:
    """A random one."""
    return f"{prefix}{uuid.uuid4().hex}"


class RunningIds:
    """Keeps the ids distinct that running requests have from their headers. Services pass a header on with each request
    that they make, so several requests may name the same id at once."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()  # (tenant's name, request id)

    @contextmanager
    def distinct(self, tenant: Tenant, named: str) -> Iterator[str]:
        """Yields the id `named`, with a random suffix if another request has it, and holds it within the context."""
        request_id = named
        while (tenant.name, request_id) in self._running:
            suffix = f"-{secrets.token_hex(_NUM_SUFFIX_BYTES)}"
            request_id = named[: _MAX_CHARS - len(suffix)] + suffix
        self._running.add((tenant.name, request_id))
        try:
            yield request_id
        finally:
            self._running.remove((tenant.name, request_id))
