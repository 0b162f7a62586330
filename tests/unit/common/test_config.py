"""Settings from the command line, YAML and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from msgspec import Meta

from common.config import (
    ArgumentParser,
    add_arguments,
    build,
    described_settings,
    field_names,
    load_yaml,
    parse,
    report_config_error,
    to_arguments,
)
from common.engine.config import EngineConfig
from common.errors import ConfigError
from common.setting_values import parse_byte_size
from decode_service.config import DecodeConfig
from deploy.cluster_config import ClusterConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per block.")] = 16
    kv_cache_memory: Annotated[int, Meta(ge=1)] | None = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse prefixes.")] = True


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    cache: Cache = Cache(block_size=32)
    name: Annotated[str, Meta(description="100% yours.")] = "pod"
    policy: Literal["fcfs", "priority"] = "fcfs"
    peers: tuple[str, ...] = ()
    weights: list[int] = []
    options: dict[str, str | int | float | bool] = {}
    timeout_s: Annotated[float, Meta(gt=0, description="Patience.")] = 2.0
    target_ms: Literal["auto"] | Annotated[float, Meta(gt=0)] | None = "auto"
    max_bytes: Annotated[int, Meta(description="Room.")] = 3 * 2**20
    internal: Cache | None = None  # no setting


class Strict(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("--low: must not exceed --high")


def pod(*argv: str, section: dict[str, object] | None = None) -> Pod:
    parser = ArgumentParser(prog="test")
    add_arguments(parser, Pod)
    return build(Pod, parser.parse_args(argv), section)


def test_defaults_come_from_the_instance_that_nests() -> None:
    assert pod() == Pod()
    assert pod("--name", "x").cache.block_size == 32


def test_command_line_wins_over_yaml_and_yaml_over_defaults() -> None:
    built = pod("--block-size", "8", section={"block_size": 4, "policy": "priority", "enable_prefix_caching": False})
    assert built.cache == Cache(block_size=8, enable_prefix_caching=False)
    assert built.policy == "priority"
    assert pod("--enable-prefix-caching", section={"enable_prefix_caching": False}).cache.enable_prefix_caching
    assert not pod("--no-enable-prefix-caching").cache.enable_prefix_caching


@pytest.mark.parametrize("argv", [["--peers", "a:1,b:2"], ["--peers", "a:1", "--peers", "b:2"]])
def test_lists_repeat_or_take_commas(argv: list[str]) -> None:
    assert pod(*argv).peers == ("a:1", "b:2")


def test_lists_and_mappings_in_yaml() -> None:
    built = pod(section={"peers": "a:1, b:2", "weights": [1, 2], "options": {"path": "/x", "size": 3}})
    assert built.peers == ("a:1", "b:2")
    assert built.weights == [1, 2]
    assert built.options == {"path": "/x", "size": 3}


def test_options_as_json() -> None:
    built = pod("--options", '{"size": 3, "rate": 0.5, "path": "/a"}', "--options", "size=4")
    assert built.options == {"size": 4, "rate": 0.5, "path": "/a"}


def test_options_as_pairs_keep_their_plain_types() -> None:
    built = pod("--options", "path=/a=b", "--options", "size=3", "--options", "rate=0.5", "--options", "fsync=true")
    assert built.options == {"path": "/a=b", "size": 3, "rate": 0.5, "fsync": True}


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 2**29), ("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("7", 7), ("64k", 2**16)]
)
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_byte_size(text) == size
    assert pod("--kv-cache-memory", text).cache.kv_cache_memory == size
    assert pod(section={"kv_cache_memory": text}).cache.kv_cache_memory == size


def test_none_unsets_an_optional() -> None:
    assert pod("--kv-cache-memory", "none", section={"kv_cache_memory": 5}).cache.kv_cache_memory is None
    assert pod(section={"kv_cache_memory": None}).cache.kv_cache_memory is None


@pytest.mark.parametrize("value", ["auto", 2.5, None])
def test_a_number_may_be_a_word(value: str | float | None) -> None:
    assert pod("--target-ms", str(value)).target_ms == value
    assert pod(section={"target_ms": value}).target_ms == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-size", "0"], "--block-size: must be >= 1, got 0"),
        (["--block-size", "2000"], "--block-size: must be <= 1024, got 2000"),
        (["--block-size", "x"], "--block-size: expected an integer, got 'x'"),
        (["--kv-cache-memory", "4 apples"], "--kv-cache-memory: expected a size such as 512MiB or 4GB, got '4 apples'"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory: must be >= 1, got 0"),
        (["--timeout-s", "nan"], "--timeout-s: must be > 0, got nan"),
        (["--timeout-s", "inf"], "--timeout-s: must be finite, got 'inf'"),
        (["--target-ms", "fast"], "--target-ms: expected number, above 0, auto or none, got 'fast'"),
        (["--target-ms", "-1"], "--target-ms: expected number, above 0, auto or none, got '-1'"),
        (["--policy", "lifo"], "--policy: must be one of fcfs, priority, got 'lifo'"),
        (["--weights", "1,x"], "--weights: expected an integer, got 'x'"),
        (["--options", "path"], "--options: expected KEY=VALUE or a JSON object, got 'path'"),
        (["--options", "{path"], "--options: expected KEY=VALUE or a JSON object, got '{path'"),
        (["--internal", "x"], "--internal: unknown option; see test --help"),
    ],
)
def test_bad_options_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pod(*argv)
    assert caught.value.message == message


def test_bad_yaml_is_named_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefill:\n  blok_size: 4\ndecode:\n  block_size: [1]\nrouter: 7\n")
    document = load_yaml(file)
    with pytest.raises(ConfigError, match=r"baton.yaml: prefill.blok_size: unknown setting; did you mean block_size\?"):
        build(Pod, None, document.section("prefill"))
    with pytest.raises(ConfigError, match=r"baton.yaml: decode.block_size: expected an integer, got \[1\]"):
        build(Pod, None, document.section("decode"))
    with pytest.raises(ConfigError, match=r"baton.yaml: router: expected a mapping, got 7"):
        document.section("router")
    with pytest.raises(ConfigError, match=r"baton.yaml: router: unknown setting; known: decode, prefill"):
        document.check_names(["prefill", "decode"])
    assert build(Pod, None, document.section("absent")) == Pod()


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "\x00"])
def test_unusable_yaml_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--config: "):
        load_yaml(file)
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        load_yaml(tmp_path / "absent")


def test_required_and_cross_field_checks() -> None:
    with pytest.raises(ConfigError, match="--address: required"):
        parse(Strict, [], prog="test", section="strict")
    with pytest.raises(ConfigError, match="--low: must not exceed --high"):
        parse(Strict, ["--address", "a", "--low", "2"], prog="test", section="strict")


def test_cross_field_checks_name_each_setting_by_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("strict: {address: a, low: 2}")
    with pytest.raises(ConfigError) as caught:
        parse(Strict, ["--config", str(file)], prog="test", section="strict")
    assert caught.value.message == f"{file}: strict.low: must not exceed --high"
    with pytest.raises(ConfigError) as caught:
        parse(Strict, ["--config", str(file), "--low", "3"], prog="test", section="strict")
    assert caught.value.message == "--low: must not exceed --high"


def test_parse_reads_its_section(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("strict: {address: yaml, high: 9}\nother: {anything: 1}\n")
    built = parse(Strict, ["--config", str(file), "--low", "3"], prog="test", section="strict")
    assert built == Strict(address="yaml", low=3, high=9)


def test_settings_travel_to_another_process_as_options() -> None:
    settings = Pod(
        cache=Cache(block_size=8, enable_prefix_caching=False),
        name="-x y",
        peers=("a:1", "b:2"),
        options={"path": "/a=b", "fsync": True, "size": 3},
        timeout_s=0.25,
    )
    assert pod(*to_arguments(settings)) == settings
    assert to_arguments(Pod()) == []
    unset = EngineConfig()
    assert to_arguments(unset) == []


def test_help_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Pod, ["--help"], prog="test", section="pod")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--block-size N Tokens per block. (default: 32)" in text
    assert "Reuse prefixes. (default: on)" in text
    assert "100% yours. (default: pod)" in text
    assert "Patience. (default: 2)" in text
    assert "Room. (default: 3MiB)" in text
    assert "--policy {fcfs,priority}" in text
    assert "--internal" not in text


def test_settings_are_described_with_types_bounds_and_defaults() -> None:
    rows = {setting.name: (setting.kind, setting.default) for setting in described_settings(Pod)}
    assert rows == {
        "block_size": ("integer, 1 to 1024", "32"),
        "kv_cache_memory": ("size in bytes, at least 1, or none", ""),
        "enable_prefix_caching": ("on or off", "on"),
        "name": ("text", "pod"),
        "policy": ("one of fcfs, priority", "fcfs"),
        "peers": ("list", ""),
        "weights": ("list", ""),
        "options": ("mapping", ""),
        "timeout_s": ("number, above 0", "2"),
        "target_ms": ("number, above 0, auto or none", "auto"),
        "max_bytes": ("size in bytes", "3MiB"),
    }
    assert described_settings(Strict)[0].default == "required"


class Everyday(Pod, frozen=True, kw_only=True):
    """A process: and this is not part of its topic."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {"A topic": ("timeout_s",), "KV": ("options",)}
    EVERYDAY: ClassVar[frozenset[str]] = frozenset({"block_size"})


def test_help_describes_what_operators_turn_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    described = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse(Everyday, [option], prog="test", section="pod")
        described[option] = " ".join(capsys.readouterr().out.split())
    assert "--block-size N Tokens per block." in described["--help"]
    assert "--policy" not in described["--help"]
    assert "More settings, rarely needed: test --help-all" in described["--help"]
    assert "--policy {fcfs,priority}" in described["--help-all"]
    assert "rarely needed" not in described["--help-all"]
    assert parse(Everyday, ["--policy", "priority"], prog="test", section="pod").policy == "priority"


def test_help_groups_settings_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Everyday, ["--help-all"], prog="test", section="pod")
    headings = [line[:-1] for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["options", "Cache", "A process", "KV", "A topic", "exit codes"]


PROCESSES = [RouterConfig, PrefillConfig, DecodeConfig, ClusterConfig]


@pytest.mark.parametrize("settings", PROCESSES)
def test_everyday_settings_are_settings_and_not_many(settings: Any) -> None:
    assert set(field_names(settings)) > settings.EVERYDAY
    assert len(settings.EVERYDAY) <= 25


@pytest.mark.parametrize("settings", PROCESSES)
def test_every_setting_has_a_topic(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for names in getattr(settings, "TOPICS", {}).values():
        assert set(names) <= set(field_names(settings))
    with pytest.raises(SystemExit):
        parse(settings, ["--help-all"], prog="test", section="process")
    assert "Other settings" not in capsys.readouterr().out


def test_the_engine_settings_parse() -> None:
    built = parse(EngineConfig, ["--num-blocks", "64", "--memory-fraction", "0.5"], prog="test", section="engine")
    assert built.cache.num_blocks == 64
    assert built.cache.memory_fraction == 0.5
    with pytest.raises(ConfigError, match="--num-blocks: must be >= 2, got 1"):
        parse(EngineConfig, ["--num-blocks", "1"], prog="test", section="engine")


def test_a_config_error_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_config_error(ConfigError("--port:\n  in use")) == 2
    assert capsys.readouterr().err == "baton: error: --port: in use\n"


def test_of_several_files_the_later_one_wins_and_mappings_are_joined(tmp_path: Path) -> None:
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    files[0].write_text("pod: {name: first, timeout_s: 2, options: {a: 1, b: 1}}")
    files[1].write_text("pod: {name: second, options: {b: 2, c: 2}}")
    argv = [word for file in files for word in ("--config", str(file))]
    built = parse(Pod, argv, prog="test", section="pod")
    assert (built.name, built.timeout_s) == ("second", 2.0)
    assert built.options == {"a": 1, "b": 2, "c": 2}


def test_a_fault_in_one_of_several_files_names_the_file(tmp_path: Path) -> None:
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    argv = [word for file in files for word in ("--config", str(file))]
    for broken, sound in (files, files[::-1]):
        broken.write_text("pod: {timeout_s: 0}")
        sound.write_text("pod: {name: x}")
        with pytest.raises(ConfigError, match=rf"^{broken}: pod\.timeout_s: must be > 0"):
            parse(Pod, argv, prog="test", section="pod")
