"""The web page at / and the API's description at /docs: static files, which work without another server.

Neither needs an API key; what the scripts then ask for does. The Content-Security-Policy lets the files of this router
in and nothing else: no inline script, no other origin, no frame around the page.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from functools import cached_property
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_PATH = "/"
DOCS_PATH = "/docs"

_PAGE_FILES = ("api.js", "app.js", "cluster.js", "icon.svg", "playground.js", "requests.js", "style.css", "theme.js")
_DOCS_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_DOCS_POLICY = f"{_POLICY}; img-src 'self' data:; style-src 'self' 'unsafe-inline'"  # what Swagger UI draws with


class StaticFile:
    """A file of an installed package, read when it is first asked for."""

    def __init__(self, source: Traversable, policy: str) -> None:
        self._source = source
        self._policy = policy

    @cached_property
    def _body(self) -> bytes:
        return self._source.read_bytes()

    @cached_property
    def _headers(self) -> dict[str, str]:
        return {
            "cache-control": "no-cache",  # kept, but asked about each time: an upgrade shows at once
            "content-security-policy": self._policy,
            "etag": f'"{hashlib.sha256(self._body).hexdigest()[:32]}"',
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def serve(self, request: Request) -> Response:
        """The file, or 304 to a client that has it."""
        if self._headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type=_TYPES[self._source.name.rpartition(".")[2]])


def _page_files() -> dict[str, StaticFile]:
    static = importlib.resources.files("router.page") / "static"
    names = {PAGE_PATH: "index.html"} | {f"/page/{name}": name for name in _PAGE_FILES}
    return {path: StaticFile(static / name, _POLICY) for path, name in names.items()}


def _docs_files() -> dict[str, StaticFile]:
    own = importlib.resources.files("router.page") / "static"
    swagger = importlib.resources.files("fastapi_offline") / "static"
    return {
        DOCS_PATH: StaticFile(own / "docs.html", _DOCS_POLICY),
        f"{DOCS_PATH}/docs.js": StaticFile(own / "docs.js", _DOCS_POLICY),
        **{f"{DOCS_PATH}/{name}": StaticFile(swagger / name, _DOCS_POLICY) for name in _DOCS_FILES},
    }


def static_routes(*, has_page: bool) -> list[Route]:
    """Returns the routes of /docs and, with `has_page`, of the page."""
    files = _docs_files() | (_page_files() if has_page else {})
    return [Route(path, file.serve, methods=["GET"]) for path, file in files.items()]
