"""What docs/kv.md says is what the programs understand."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import msgspec
import pytest

import decode_service.handoff
from cli.kv import _parser
from common import errors
from common.config import build, field_names, load_yaml
from deploy.cluster_config import SECTIONS
from kv_store.base import StoreConnectorOptions
from kv_store.nixl.connector import NixlOptions
from kv_store.redis_store import RedisOptions
from kv_store.shared_storage import SharedStorageOptions
from kv_store.tiered_connector import NixlTierOptions
from tests.unit.docs.test_site import CONFIGS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "kv.md").read_text()
OPTIONS = {"Every store": RedisOptions, "shared": SharedStorageOptions, "redis": RedisOptions, "nixl": NixlOptions}
NAMES = re.compile(r"^\| `(\w+)` \| ([^|]*) \|", re.MULTILINE)


def section(heading: str) -> str:
    (text,) = re.findall(rf"^##+ {heading}[^\n]*\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    return {None: "none", "": '""'}.get(field.default, str(field.default))


@pytest.mark.parametrize("heading", ["Every store", "`shared-storage`", "`redis`", "`nixl`"])
def test_the_options_of_connectors(heading: str) -> None:
    options = OPTIONS[heading.strip("`").partition("-")[0]]
    known = {field.name: field for field in msgspec.structs.fields(options)}
    rows = [row for row in NAMES.findall(section(heading)) if not row[0].startswith("UCX_")]
    assert rows
    for name, default in rows:
        assert default == default_of(known[name]), name
    own = set(options.__struct_fields__) - set(options.__base__.__struct_fields__)
    if heading != "Every store":
        assert own == {name for name, _ in rows}


def test_the_options_of_tiers() -> None:
    rows = dict(NAMES.findall(section("Tiers")))
    own = set(NixlTierOptions.__struct_fields__) - set(NixlOptions.__struct_fields__)
    assert rows.keys() == own | {"lookup_timeout_s"}
    for options in (NixlTierOptions, StoreConnectorOptions):
        for known in msgspec.structs.fields(options):
            assert rows.get(known.name, default_of(known)) == default_of(known), known.name


def test_the_leases() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (prefill|decode) \| ([^|]*) \|", section("Leases"), re.MULTILINE)
    assert len(rows) >= 3
    for name, role, default in rows:
        assert name in field_names(CONFIGS[role])
        assert default == str(getattr(CONFIGS[role](), name))


def test_the_reasons() -> None:
    told = {name for name, _ in NAMES.findall(section("When KV")) if name not in ("recompute", "fail")}
    handoff = set(re.findall(r"^    ([a-z_]+)  +\S", inspect.getdoc(decode_service.handoff) or "", re.MULTILINE))
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TransferError)
    ]
    assert len(handoff) >= 9
    assert told == handoff | {kind.reason for kind in kinds} | {"incomplete"}


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_yaml_examples(tmp_path: Path, example: str) -> None:
    (tmp_path / "baton.yaml").write_text(example)
    document = load_yaml(tmp_path / "baton.yaml")
    document.check_names(SECTIONS)
    for name in document:
        build(CONFIGS[name], None, document.section(name))


def test_the_commands() -> None:
    lines = re.findall(r"^\$ baton kv (.*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        _parser().parse_args(shlex.split(line))


def test_the_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).resolve().parents[3] / "docs" / target).exists(), target
