"""Decides whose request it is, and whether it may come in."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.errors import PermissionDeniedError, UnauthenticatedError
from router.fairness.tenant import Tenant
from router.metrics import SecurityMetrics
from router.security.keys import KeyTable, Quota
from router.security.quotas import Account
from router.security.usage import LocalUsage, Usage

KEY_HEADER = "x-api-key"
_BEARER = "bearer"


class AccessControl:
    """Without keys it is open: everybody is the nameless tenant, who has no limits."""

    def __init__(
        self,
        keys: KeyTable | None,
        metrics: SecurityMetrics,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`usage`: where quotas are counted; None: in this process."""
        self._metrics = metrics
        self._usage = usage or LocalUsage()
        self._clock = clock
        self._keys = keys
        self._accounts: dict[str, Account] = {}  # by tenant name
        self._operators: frozenset[str] = frozenset()  # names of operators' tenants
        self._open_account = Account("", Quota(), metrics, LocalUsage(), clock)
        if keys is not None:
            self.set_keys(keys)

    @property
    def is_open(self) -> bool:
        """No key is needed."""
        return self._keys is None

    def set_keys(self, keys: KeyTable) -> None:
        """Only these are valid from now on. What runs goes on; a tenant whose quota is the same keeps its account.
        Raises ConfigError if there is no place to count their use."""
        accounts = {}
        for key in keys:
            name = key.tenant.name
            account = self._accounts.get(name) or Account(name, key.quota, self._metrics, self._usage, self._clock)
            if account.quota != key.quota:
                account.set_quota(key.quota)
            accounts[name] = account
        self._keys, self._accounts = keys, accounts
        self._operators = frozenset(key.tenant.name for key in keys if key.is_operator)

    def authenticate(self, header: Callable[[str], str]) -> Tenant:
        """`header` gives the value of a header by its lower-case name, or "". Raises UnauthenticatedError."""
        if self._keys is None:
            return Tenant()
        presented = _presented(header)
        if not presented:
            self._metrics.unauthenticated.labels("missing").inc()
            raise UnauthenticatedError(f"an API key is required: Authorization: Bearer KEY, or {KEY_HEADER}: KEY")
        key = self._keys.find(presented)
        if key is None:
            self._metrics.unauthenticated.labels("unknown").inc()
            raise UnauthenticatedError("the API key is not valid")
        return key.tenant

    def check_no_page(self, origin: str | None) -> None:
        """Raises PermissionDeniedError for an administrator's request of a web page (`origin`: its header) if there are
        no keys: a browser lets any page send such a request."""
        if self.is_open and origin is not None:
            raise PermissionDeniedError("administration by web pages needs API keys")

    def check_operator(self, tenant: Tenant) -> None:
        """Raises PermissionDeniedError unless this tenant may see what concerns all tenants."""
        if not self.is_operator(tenant):
            raise PermissionDeniedError(
                "this is for operators: the API key needs `operator: true` where it is configured"
            )

    def is_operator(self, tenant: Tenant) -> bool:
        """Whether this tenant may see what concerns all tenants; true where there are no keys."""
        return self._keys is None or tenant.name in self._operators

    def is_operators(self, header: Callable[[str], str]) -> bool:
        """Whether a request that needs no key has an operator's; true where there are no keys."""
        if self._keys is None:
            return True
        key = self._keys.find(_presented(header))
        return key is not None and key.is_operator

    def account(self, tenant: Tenant) -> Account:
        """Returns the account of a tenant that was authenticated; the key may have been taken away since then."""
        return self._accounts.get(tenant.name) or self._open_account


def _presented(header: Callable[[str], str]) -> str:
    return _bearer(header("authorization")) or header(KEY_HEADER).strip()


def _bearer(value: str) -> str:
    scheme, _, credentials = value.strip().partition(" ")
    return credentials.strip() if scheme.lower() == _BEARER else ""
