"""Writes a CycloneDX bill of materials of what a wheel installs: `python -m tests.dist.bill_of_materials WHEEL`.

pip resolves the wheel's extras `all` and `nixl` under constraints.txt, as users are told to install it; nothing is
installed. The file has each package's version and the hash of the file that pip would take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "all,nixl"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes WHEEL's name with the ending .cdx.json beside it."""
    parser = argparse.ArgumentParser(prog="python -m tests.dist.bill_of_materials", description=__doc__)
    parser.add_argument("wheel", type=Path)
    wheel: Path = parser.parse_args(argv).wheel
    requirements = "\n".join(pinned(_resolve(wheel)))
    output = wheel.with_suffix(".cdx.json")
    command = ["cyclonedx_py", "requirements", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
    _run(*command, "--output-file", str(output), "-", text=requirements)
    sys.stdout.write(f"{output}: {requirements.count('==')} packages\n")
    return 0


def pinned(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a requirements file, sorted by name, from pip's installation report."""
    for item in sorted(report["install"], key=lambda item: str(item["metadata"]["name"]).lower()):
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        pins = "".join(f" --hash={algorithm}:{digest}" for algorithm, digest in hashes.items())
        yield f"{item['metadata']['name']}=={item['metadata']['version']}{pins}"


def _resolve(wheel: Path) -> dict[str, Any]:
    options = ["--dry-run", "--ignore-installed", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    report = _run("pip", "install", *options, "--report", "-", f"{wheel.resolve()}[{EXTRAS}]")
    resolved: dict[str, Any] = json.loads(report)
    return resolved


def _run(*command: str, text: str = "") -> str:
    """Runs a module of this Python and returns its output."""
    done = subprocess.run([sys.executable, "-m", *command], input=text, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
