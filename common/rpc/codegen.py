"""Generates `common/pb` from `proto/`: `python -m common.rpc.codegen` (or `make proto`)."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO_ROOT = REPOSITORY / "proto"
TARGET = REPOSITORY / "common" / "pb"
PROTOC_TIMEOUT_S = 120.0


def generate(target: Path) -> list[Path]:
    """Write message classes, stubs and their type stubs into `target`; returns the files written.

    Raises `subprocess.CalledProcessError` if protoc fails, after protoc's own messages.
    protoc derives Python packages from proto packages (`baton.v1`); ours live in `common.pb`, so imports are rewritten.
    """
    protos = sorted(PROTO_ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        arguments = [f"-I{PROTO_ROOT}", *outputs]
        scripts = Path(sysconfig.get_path("scripts"))  # named, so that they are found in an environment not activated
        arguments += [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        # A process of its own: protoc forks, and brings a libprotobuf that another library's may be taken for.
        protoc = [sys.executable, "-m", "grpc_tools.protoc", *arguments, *map(str, protos)]
        subprocess.run(protoc, check=True, timeout=PROTOC_TIMEOUT_S)  # noqa: S603  # protoc, on our files
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for source in sorted(Path(scratch).rglob("*.py*")):
            text = re.sub(r"\bbaton\.v1\b(?=[ .]\S*_pb2| import)", "common.pb", source.read_text())
            text = text.replace("import baton.v1.", "import common.pb.").replace(
                "baton.v1.common_pb2", "common.pb.common_pb2"
            )
            destination = target / source.name
            destination.write_text(text)
            written.append(destination)
    return written


def main() -> None:
    """Regenerate the committed stubs and drop the ones whose proto is gone."""
    written = set(generate(TARGET))
    for stale in TARGET.glob("*_pb2*"):
        if stale not in written:
            stale.unlink()


if __name__ == "__main__":
    main()
