"""The committed stubs are what the protos say."""

from pathlib import Path

import pytest

from common.rpc import codegen
from common.types import SamplingParams
from common.types.parameters import Parameter, ParameterField, Range, parameters_of


def test_committed_stubs_are_fresh(tmp_path: Path) -> None:
    generated = {path.name: path.read_text() for path in codegen.generate(tmp_path)}
    committed = {path.name: path.read_text() for path in codegen.TARGET.glob("*_pb2*")}
    assert generated.keys() == committed.keys()
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale}"


def test_the_protos_have_every_sampling_parameter() -> None:
    for proto in codegen.PROTO_ROOT.rglob("*.proto"):
        assert codegen.with_parameters(proto.read_text()) == proto.read_text(), f"run `make proto`: {proto}"


def test_a_new_parameter_joins_the_protos(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its number; what is not a parameter stays."""
    table = parameters_of(SamplingParams)
    new = ParameterField("top_a", float, 0.0, False, Parameter("Something.", Range(0, 1), 14, 15, "double"))
    monkeypatch.setattr(codegen, "parameters_of", lambda _: {**table, "top_a": new})
    written = "".join(codegen.with_parameters(proto.read_text()) for proto in codegen.PROTO_ROOT.rglob("*.proto"))
    assert "  optional double top_a = 14;" in written
    assert "  optional double top_a = 15;" in written
    assert written.count(" // Something. In [0, 1]. Default 0.") == 2
    assert "repeated string stop = 9;" in written
