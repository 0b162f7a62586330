"""The images of the compose file, on a machine that reaches no registry of images."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common import __version__
from tests.compose.engine import Engine, run

ROOT = Path(__file__).resolve().parents[2]
PYTHON_IMAGE = "python:3.11-slim-bookworm"
STAND_INS = {"redis": "redis:7.4-bookworm", "prometheus": "prom/prometheus:v3.7.3", "grafana": "grafana/grafana:12.2.1"}
ROUTER, CPU = (f"baton-{target}:{__version__}" for target in ("router", "cpu"))
_INCLUDE = "python3.11,python3-pip,python3-venv,ca-certificates"
_INDEX_PORT = 28379
_SURPLUS = ("var/cache/apt/archives", "usr/share/doc", "usr/share/man", "usr/share/locale")


def make_base(engine: Engine) -> None:
    """Makes the Python image from Debian's packages, with this machine's certificates, under its official name."""
    if engine.has_image(PYTHON_IMAGE):
        return
    root = engine.directory / "base"
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        run(["debootstrap", "--variant=minbase", f"--include={_INCLUDE}", "bookworm", str(root)], timeout_s=900)
        for path in _SURPLUS:
            shutil.rmtree(root / path, ignore_errors=True)
        (root / "usr/share/man/man1").mkdir(parents=True)  # packages that are installed later want it
        bundle = "etc/ssl/certs/ca-certificates.crt"
        shutil.copyfile(f"/{bundle}", root / bundle)
        (root / "complete").touch()
    engine.import_image(root, PYTHON_IMAGE)


def make_stand_ins(engine: Engine, targets: Iterable[str] = STAND_INS) -> None:
    """Builds Redis, Prometheus and a stand-in for Grafana from Debian's packages, or some of them."""
    for target in targets:
        directory = str(ROOT / "tests/compose/stand_ins")
        engine.client(
            "build", "--network", "host", "--target", target, "--tag", STAND_INS[target], directory, timeout_s=900
        )


def make_images(engine: Engine) -> str:
    """Runs `make images` for router and CPU, as users do. Returns its output."""
    with torch_index() as url:
        env = {
            **engine.env,
            "IMAGES": "router cpu",
            "ENGINE": engine.program,
            "BUILD_FLAGS": "--network host",
            **({"TORCH_INDEX_URL": url} if url else {}),
        }
        return run(["nice", "-n", "19", "make", "images"], env=env, cwd=ROOT, timeout_s=3000)


@contextlib.contextmanager
def torch_index() -> Iterator[str]:
    """Serves a wheel of torch found on this machine (PIP_FIND_LINKS) as a package index; "" if there is none."""
    directories = [Path(each) for each in os.environ.get("PIP_FIND_LINKS", "").split()]
    wheels = [wheel for each in directories if each.is_dir() for wheel in sorted(each.glob("torch-*.whl"))]
    if not wheels:
        yield ""
        return
    with _index_server(functools.partial(_IndexHandler, wheels)) as server:
        thread = threading.Thread(target=server.serve_forever, name="torch-index")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def _index_server(handler: Callable[..., _IndexHandler]) -> http.server.ThreadingHTTPServer:
    """Listens on the same port each time, if it is free: another URL would have the engine install torch once more."""
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", _INDEX_PORT), handler)
    except OSError:
        return http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)


class _IndexHandler(http.server.BaseHTTPRequestHandler):
    """A package index (PEP 503) that has nothing but torch."""

    def __init__(self, wheels: list[Path], *args: object) -> None:
        self._wheels = {f"/torch/{wheel.name.replace('+', '%2B')}": wheel for wheel in wheels}
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path == "/torch/":
            links = "".join(f'<a href="{path}">{wheel.name}</a>\n' for path, wheel in self._wheels.items()).encode()
            self._head("text/html", len(links))
            self.wfile.write(links)
        elif wheel := self._wheels.get(self.path):
            self._head("application/octet-stream", wheel.stat().st_size)
            with wheel.open("rb") as content:
                shutil.copyfileobj(content, self.wfile)
        else:
            self.send_error(404)

    def _head(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""
