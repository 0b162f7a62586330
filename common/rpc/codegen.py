"""Generates `common/pb` from `proto/`: `python -m common.rpc.codegen` (or `make proto`).

The sampling parameters in `proto/` are written before that, from the table in `common.types.generation`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from common.types import SamplingParams
from common.types.parameters import ARGUMENTS, BIASES, TEXTS, TOKEN_IDS, TOKEN_SEQUENCES, ParameterField, parameters_of

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO_ROOT = REPOSITORY / "proto"
TARGET = REPOSITORY / "common" / "pb"
PROTOC_TIMEOUT_S = 120.0
_PROTO_FIELD = re.compile(r"  ((optional |repeated )?\w+|map<\w+, \w+>) (?P<name>\w+) = (?P<tag>\d+);")


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


def with_parameters(proto: str) -> str:
    """`proto` with the fields that come from SamplingParams written again: the lines with their numbers in the two
    messages that have them."""
    for message, of_engine in (("SamplingParams", True), ("GenerateOptions", False)):
        head, found, rest = proto.partition(f"message {message} {{\n")
        body, end, tail = rest.partition("\n}")
        if found:
            own = [line for line in body.splitlines() if not _is_parameter(line)]
            fields = sorted([*_lines(of_engine=of_engine), *own], key=_tag_of)
            proto = head + found + "\n".join(fields) + end + tail
    return proto


def _lines(*, of_engine: bool) -> list[str]:
    """Declarations of the parameters in one of the two messages."""
    tags = {
        field.name: field.parameter.tag if of_engine else field.parameter.option_tag
        for field in parameters_of(SamplingParams).values()
    }
    fields = parameters_of(SamplingParams)
    return [_line(fields[name], tag) for name, tag in tags.items() if tag is not None]


def _line(field: ParameterField, tag: int) -> str:
    """Fields are optional, so that one that is not set is told from one that is zero."""
    parameter = field.parameter
    comment = parameter.doc
    if parameter.allowed is not None and parameter.allowed.high != float("inf"):
        comment += f" In {parameter.allowed.interval}."
    if parameter.max_entries is not None:
        comment += f" At most {parameter.max_entries}."
    if isinstance(field.default, int | float) and field.name != "max_tokens":
        comment += f" Default {str(field.default).lower().removesuffix('.0')}."
    declared = f"  {_proto_type(field)} {field.name} = {tag};"
    return f"{declared:<40} // {comment}"


def _proto_type(field: ParameterField) -> str:
    kind = field.parameter.proto_type
    if field.kind in (BIASES, ARGUMENTS):
        return f"map<{'uint32' if field.kind == BIASES else 'string'}, {kind}>"
    return f"{'repeated' if field.kind in (TOKEN_IDS, TOKEN_SEQUENCES, TEXTS) else 'optional'} {kind}"


def _is_parameter(line: str) -> bool:
    match = _PROTO_FIELD.match(line)
    return match is not None and match["name"] in SamplingParams.__struct_fields__


def _tag_of(line: str) -> int:
    match = _PROTO_FIELD.match(line)
    assert match is not None, line  # these messages hold one field a line and nothing else
    return int(match["tag"])


def main() -> None:
    """Regenerate the committed stubs and drop the ones whose proto is gone."""
    for proto in PROTO_ROOT.rglob("*.proto"):
        proto.write_text(with_parameters(proto.read_text()))
    written = set(generate(TARGET))
    for stale in TARGET.glob("*_pb2*"):
        if stale not in written:
            stale.unlink()


if __name__ == "__main__":
    main()
