"""The pages of the site: all in its navigation, references as the code has them, examples that the programs accept."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from cli import bench
from cli.main import COMMANDS
from common.config import build, create_parser, load_yaml, parse
from decode_service.config import DecodeConfig
from deploy.cluster_config import SECTIONS, ClusterConfig, parse_cluster
from docs_site import cells_page, configuration_page, metrics_page
from prefill_service.config import PrefillConfig
from router.config import RouterConfig

CONFIGS = {"cluster": ClusterConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}
ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
TEXTS = {page.name: page.read_text() for page in PAGES}
PACKAGES = (
    "cli", "common", "decode_service", "deploy", "kv_store", "loadgen", "planning", "prefill_service", "router",
)  # fmt: skip
NEW_PAGES = (
    "quickstart.md",
    "bare_processes.md",
    "air_gapped.md",
    "sizing.md",
    "failures.md",
    "observability.md",
    "bench.md",
    "run_batch.md",
    "kv_quantization.md",
)
"""Pages whose commands are held to what the programs accept."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], re.DOTALL)


def entries(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        assert isinstance(node, list | dict)
        for child in node.values() if isinstance(node, dict) else node:
            yield from entries(child)


def test_the_navigation_has_every_page_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)  # its own tags are not for SafeLoader
    assert sorted(entries(site["nav"])) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


@pytest.mark.parametrize("page", [configuration_page, metrics_page], ids=["configuration", "metrics"])
def test_a_reference_is_what_the_code_says(page) -> None:
    assert page.PAGE.read_text() == page.page(), "run `make reference`"


def test_tables_of_tests_are_what_the_tests_say() -> None:
    for page, text in cells_page.pages().items():
        assert page.read_text() == text, "run `make reference`"


def test_the_configuration_has_what_the_help_has() -> None:
    page = TEXTS["configuration.md"]
    for config in CONFIGS.values():
        options = create_parser(config, ["--help-all"], prog="")._option_string_actions
        for option in options.keys() - {"-h", "--help", "--help-all"}:
            if not option.startswith("--no-"):
                assert f"`{option.removeprefix('--').replace('-', '_')}`" in page, option


# --- metrics ---


@cache
def syntax_trees() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def defined_metrics() -> set[str]:
    """Names that the code gives to constructors of metrics."""
    calls = (node for tree in syntax_trees() for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    firsts = (argument for call in calls for argument in call.args[:2])  # of a table, the kind comes first
    values = (first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str))
    return {value for value in values if re.fullmatch(r"baton_(router|pod)_[a-z_]+", value)}


def exposed_metrics() -> dict[str, str]:
    """Name in a scrape -> type."""
    rows = metrics_page.router_metrics() + metrics_page.worker_metrics() + metrics_page.pod_metrics()
    return {row.name: row.kind for row in rows}


def test_the_metrics_page_has_every_metric_that_the_code_defines() -> None:
    defined = defined_metrics()
    assert len(defined) >= 50
    assert defined <= {name.removesuffix("_total") for name in exposed_metrics()}


def test_vllms_names_are_given_for_metrics_that_exist() -> None:
    assert metrics_page.VLLM_NAMES.keys() <= exposed_metrics().keys()


def test_every_metric_that_a_page_names_exists() -> None:
    exposed = set(exposed_metrics())
    for name, kind in exposed_metrics().items():
        suffixes = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}.get(kind, ())
        exposed |= {f"{name}_{suffix}" for suffix in suffixes}
    for page, text in TEXTS.items():
        assert set(re.findall(r"\bbaton_(?!llm\b)[a-z_]+[a-z]\b", text)) <= exposed, page


# --- failure modes ---


@cache
def texts_in_code() -> str:
    nodes = (node for tree in syntax_trees() for node in ast.walk(tree))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(texts)


def log_lines() -> list[str]:
    """What stands in backticks in columns that quote lines."""
    lines: list[str] = []
    columns: list[int] = []
    for row in TEXTS["failures.md"].splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")] if row.startswith("|") else []
        if row.startswith("|---"):
            continue
        if not cells:
            columns = []
        elif not columns:
            columns = [at for at, cell in enumerate(cells) if cell.startswith(("log line", "line"))] or [-1]
        elif columns != [-1]:
            lines += [text for at in columns for text in re.findall(r"`([^`]+)`", cells[at])]
    return lines


def test_the_log_lines_of_failures_are_those_of_the_code() -> None:
    lines = log_lines()
    assert len(lines) > 40
    for line in lines:
        for part in re.split(r"\.\.\.|, |: |; |' |--\S+", line):
            words = part.strip(" :;,'()[]")
            if len(words) >= 8 and words != "Address already in use":  # that is the operating system's
                assert words in texts_in_code(), (line, words)


# --- examples ---


@pytest.mark.parametrize("page", NEW_PAGES)
def test_the_commands(page: str) -> None:
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split(" | ")[0].removeprefix("/opt/baton/bin/")
            if not command.startswith("baton "):
                continue
            _, name, *options = shlex.split(command, comments=True)
            assert name in COMMANDS or name == "--version"
            if name == "up" and "--config" not in options:  # the file is an example of its own
                parse_cluster(options)
            if name == "bench":
                bench.create_parser().parse_args(options)


@pytest.mark.parametrize("page", ["quickstart.md", "tools.md"])
def test_the_python_examples_compile(page: str) -> None:
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        compile(example, page, "exec")


@pytest.mark.parametrize("page", ["quickstart.md", "configuration.md", "bare_processes.md", "kv_quantization.md"])
def test_the_settings(page: str, tmp_path: Path) -> None:
    (example,) = blocks(page, "yaml")
    (tmp_path / "baton.yaml").write_text(example)
    document = load_yaml(tmp_path / "baton.yaml")
    document.check_names(SECTIONS)
    for name in document:
        build(CONFIGS[name], None, document.section(name))


def test_the_systemd_units() -> None:
    units = blocks("bare_processes.md", "ini")
    assert len(units) == 3
    for text in units:
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(text)
        service = unit["Service"]
        program, serve, role, *options = shlex.split(service["ExecStart"])
        assert (program, serve) == ("/opt/baton/bin/baton", "serve")
        options.remove("--config")
        options.remove("/etc/baton/baton.yaml")
        parse(CONFIGS[role], options, prog="", section="")
        assert service["KillMode"] == "mixed", "SIGTERM to the engine would end running requests"
        grace_s = RouterConfig(decode=("a:1",)).shutdown_grace_s if role == "router" else DecodeConfig().drain_timeout_s
        assert float(service["TimeoutStopSec"]) > grace_s


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_name_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).is_file(), target
