"""Generates `common/pb` from `proto/`: `python -m common.rpc.codegen` (or `make proto`)."""

from __future__ import annotations

import re
import sysconfig
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO_ROOT = REPOSITORY / "proto"
TARGET = REPOSITORY / "common" / "pb"


def generate(target: Path) -> list[Path]:
    """Write message classes, stubs and their type stubs into `target`; returns the files written.

    protoc derives Python packages from proto packages (`baton.v1`); ours live in `common.pb`, so imports are rewritten.
    """
    from grpc_tools import protoc

    protos = sorted(PROTO_ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        arguments = ["protoc", f"-I{PROTO_ROOT}", "-I" + str(Path(protoc.__file__).parent / "_proto"), *outputs]
        scripts = Path(sysconfig.get_path("scripts"))  # named, so that they are found in an environment not activated
        arguments += [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        if protoc.main([*arguments, *map(str, protos)]) != 0:
            raise RuntimeError("protoc failed; its messages are above")
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
