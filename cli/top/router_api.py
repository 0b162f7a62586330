"""The endpoints of a router that `baton top` reads, and what it says when they fail."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import msgspec

from cli.environment import KEY_VARIABLE
from cli.top.answers import ClusterView, Request, RequestList, Timeline
from cli.top.words import plain
from common.errors import (
    BatonError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownRequestError,
    UnreachableError,
)
from loadgen.events import error_in
from loadgen.http_client import HttpClient, RequestFailed

T = TypeVar("T", bound=msgspec.Struct)

MAX_REQUESTS = 100  # most requests that the list shows
_MAX_BODY_BYTES = 32 * 2**20
_CLUSTER_PATH, _REQUESTS_PATH = "/v1/cluster", "/v1/requests"


class NotARouterError(BatonError):
    """Raised if something else than a router answers, or a version without these endpoints."""


class RouterApi:
    """Reads from one router. Each call has a deadline.

    Calls raise UnavailableError if trying again may help, UnauthenticatedError or PermissionDeniedError if only another
    API key would, and NotARouterError.
    """

    def __init__(self, client: HttpClient, url: str, *, has_key: bool, timeout_s: float) -> None:
        self.url = plain(url)
        self._client = client
        self._has_key = has_key
        self._timeout_s = timeout_s

    async def cluster(self) -> ClusterView:
        """Returns the cluster as it is now. Raises BatonError, see above."""
        return await self._get(_CLUSTER_PATH, ClusterView)

    async def requests(self) -> RequestList:
        """Returns the last requests, the newest first. Raises BatonError, see above."""
        return await self._get(f"{_REQUESTS_PATH}?limit={MAX_REQUESTS}", RequestList)

    async def timeline(self, request: Request) -> Timeline:
        """Returns a request's timeline. Raises UnknownRequestError if the router keeps it no more, or see above."""
        path = f"{_REQUESTS_PATH}/{quote(request.id, safe='')}"
        if request.tenant:  # request ids are unique within a tenant only
            path += f"?tenant={quote(request.tenant, safe='')}"
        try:
            return await self._get(path, Timeline)
        except NotARouterError as error:  # it answers as a router: what it lacks is the timeline
            raise UnknownRequestError("The router keeps the timeline of this request no more.") from error

    async def _get(self, path: str, answer: type[T]) -> T:
        body = bytearray()

        def take(part: bytes, _: float) -> None:
            body.extend(part)
            if len(body) > _MAX_BODY_BYTES:
                raise RequestFailed("invalid response", f"the answer has more than {_MAX_BODY_BYTES} bytes")

        try:
            response = await self._client.request("GET", path, timeout_s=self._timeout_s, on_body=take)
        except RequestFailed as error:
            if error.kind == "invalid response":
                raise self._not_a_router(path, plain(error.message)) from error
            raise UnreachableError(plain(error.message)) from error
        if response.status != 200:
            raise self._refusal(path, response.status, response.body)
        try:
            return msgspec.json.decode(body, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_a_router(path, f"the answer is not a router's: {plain(str(error))}") from error

    def _refusal(self, path: str, status: int, body: bytes) -> BatonError:
        if status == 401:
            if self._has_key:
                return UnauthenticatedError(f"the router does not accept the API key in {KEY_VARIABLE}")
            return UnauthenticatedError(f"the router asks for an API key: set {KEY_VARIABLE} to an operator's")
        if status == 403:
            return PermissionDeniedError(f"the cluster is for operators: set {KEY_VARIABLE} to an operator's key")
        if status == 429 or status >= 500:
            return UnavailableError(f"GET {path}: status {status}: {plain(error_in(body))}")
        return self._not_a_router(path, f"status {status}")

    def _not_a_router(self, path: str, why: str) -> NotARouterError:
        path = path.partition("?")[0]
        return NotARouterError(f"{self.url} is not the HTTP address of a Baton router: GET {path}: {why}")
