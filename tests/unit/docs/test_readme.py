"""What the README shows is what the programs understand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli.main import COMMANDS
from common.config import build, field_names, load_yaml, parse
from decode_service.config import DecodeConfig
from deploy.cluster_config import SECTIONS, ClusterConfig, parse_cluster
from prefill_service.config import PrefillConfig
from router.config import RouterConfig

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
CONFIGS = {"cluster": ClusterConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(start: str) -> list[list[str]]:
    text = "\n".join(blocks("sh") + blocks("console")).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(start)]


def test_the_yaml_example(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    file = tmp_path / "baton.yaml"
    file.write_text(example)
    document = load_yaml(file)
    document.check_names(SECTIONS)
    for name, config in CONFIGS.items():
        assert build(config, None, document.section(name)) != build(config)


def test_the_commands() -> None:
    found = commands("baton ")
    assert len(found) >= 7
    for _, name, *options in found:
        assert name in COMMANDS
        if name == "serve":
            parse(CONFIGS[options[0]], options[1:], prog="", section="")
        elif name == "up":
            parse_cluster(options)


def test_the_table_of_settings() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", README, re.MULTILINE)
    assert len(rows) >= 10
    for settings, owners in rows:
        if settings.startswith(("`POST", "`GET")) or "grpc.health" in settings:
            continue
        for setting in re.findall(r"`(\w+)`", settings):
            for owner in re.findall(r"cluster|pods|router", owners) or list(CONFIGS):
                for role in ("prefill", "decode") if owner == "pods" else (owner,):
                    assert setting in field_names(CONFIGS[role]), (setting, role)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_examples_compile(code: str) -> None:
    compile(code, "README.md", "exec")
