"""The committed stubs are what the protos say."""

from pathlib import Path

from common.rpc import codegen


def test_committed_stubs_are_fresh(tmp_path: Path) -> None:
    generated = {path.name: path.read_text() for path in codegen.generate(tmp_path)}
    committed = {path.name: path.read_text() for path in codegen.TARGET.glob("*_pb2*")}
    assert generated.keys() == committed.keys()
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale}"
