"""Stands in for Grafana: reads its provisioned data sources and dashboards, and serves /api/health and what it found.

Queries go to the data source's own address, as those of Grafana would, so that a wrong one shows.
"""

from __future__ import annotations

import http.server
import json
import pathlib
import re
import signal
import sys
import urllib.request

PROVISIONING = pathlib.Path("/etc/grafana/provisioning")


def find(kind: str, key: str) -> list[str]:
    """Values of `key` in the provisioning files of `kind`."""
    files = sorted((PROVISIONING / kind).glob("*.yaml"))
    return [value for file in files for value in re.findall(rf"\b{key}: *([^\s,}}]+)", file.read_text())]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/api/health":
            self._answer({"database": "ok"})
        elif self.path == "/dashboards":
            found = [path for root in find("dashboards", "path") for path in pathlib.Path(root).glob("*.json")]
            self._answer([json.loads(path.read_text())["title"] for path in found])
        elif self.path.startswith("/query?"):
            (source,) = find("datasources", "url")
            with urllib.request.urlopen(f"{source}/api/v1/{self.path[1:]}", timeout=10) as response:
                self._answer(json.load(response))
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer(("", 3000), Handler).serve_forever()
