"""A model hub on this machine that serves one directory, and counts what it is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

MODEL = "acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Knows `MODEL`, whose files are those of a directory."""

    def __init__(self, directory: Path) -> None:
        self.requests: Counter[str] = Counter()  # by method and path
        self.url = ""
        self.files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.requests[f"{method} {path}"] += 1
        if path == f"/api/models/{MODEL}" or path.startswith(f"/api/models/{MODEL}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return _json(
                {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            )
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            return _json(tree)
        name = path.rpartition("/")[2]
        if path.startswith(f"/{MODEL}/resolve/") and name in self.files:
            content = self.files[name]
            tag = hashlib.sha1(content).hexdigest()
            return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextlib.contextmanager
def running_hub(directory: Path) -> Iterator[FakeHub]:
    """A hub that answers at `url`."""
    hub = FakeHub(directory)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="fake-hub")
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(30)
