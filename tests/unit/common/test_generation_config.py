"""Where the sampling defaults come from, and which values are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.generation_config import SamplingDefaults, read_sampling_defaults
from common.types import SamplingParams

FILE = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_new_tokens": 300, "do_sample": True, "eos_token_id": [1, 2]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", FILE)


def write(directory: Path, content: object) -> Path:
    directory.mkdir()
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_a_request_wins_over_the_option_over_the_file_over_openai(model: Path) -> None:
    defaults = read_sampling_defaults("auto", {"top_p": 0.5, "top_k": 7}, model)
    expected = SamplingParams(temperature=0.6, top_p=0.5, top_k=3)
    assert defaults.params({"top_k": 3}) == expected
    assert defaults.max_tokens == 300
    for part in ("temperature=0.6", str(model), "top_p=0.5 (--override-generation-config)"):
        assert part in defaults.summary


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_without_a_file_openais_defaults_hold(model: Path, source: str) -> None:
    defaults = read_sampling_defaults(source, {}, model)
    assert defaults == SamplingDefaults()
    assert defaults.params({}) == SamplingParams()
    assert read_sampling_defaults(source, {"min_p": 0.1}, model).params({}) == SamplingParams(min_p=0.1)


def test_a_model_may_have_no_file(tmp_path: Path) -> None:
    assert read_sampling_defaults("auto", {}, tmp_path) == SamplingDefaults()


def test_another_file(model: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"temperature": 0, "top_k": -1, "top_p": None})
    for source in (other, other / "generation_config.json"):
        assert read_sampling_defaults(str(source), {}, model).values == {"temperature": 0, "top_k": 0}


@pytest.mark.parametrize(
    ("source", "overrides", "limit"),
    [
        ("auto", {}, None),
        ("auto", {"max_new_tokens": 50}, 50),
        ("none", {"max_new_tokens": 50}, 50),
        ("other", {}, 300),
        ("other", {"max_new_tokens": 50}, 50),
    ],
)
def test_what_the_operator_sets_is_a_limit(
    model: Path, tmp_path: Path, source: str, overrides: dict[str, float], limit: int | None
) -> None:
    """As with vLLM: the model's own max_new_tokens is only a default."""
    write(tmp_path / "other", FILE)
    defaults = read_sampling_defaults(str(tmp_path / "other") if source == "other" else source, overrides, model)
    assert defaults.max_tokens_limit == limit
    assert defaults.max_tokens == (limit or 300)
    assert defaults.limit_tokens(40) == 40
    assert defaults.limit_tokens(1000) == (limit or 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_bad_value_is_refused_with_file_and_field(tmp_path: Path, name: str, value: object) -> None:
    directory = write(tmp_path / "model", {name: value})
    with pytest.raises(ConfigError, match=rf"--generation-config: .*generation_config.json: {name} must be") as caught:
        read_sampling_defaults("auto", {}, directory)
    assert caught.value.param == "generation_config"
    with pytest.raises(ConfigError, match=f"--override-generation-config: {name} must be"):
        read_sampling_defaults("none", {name: value}, directory)  # type: ignore[dict-item]


@pytest.mark.parametrize("content", ["{", "[]", "\ud800"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"--generation-config: .*generation_config\.json"):
        read_sampling_defaults("auto", {}, tmp_path)


def test_a_file_that_is_named_must_be_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither auto, none nor a directory"):
        read_sampling_defaults(str(tmp_path / "nowhere"), {}, model)


def test_an_unknown_name_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'temprature' is not a sampling default; did you mean temperature\?"):
        read_sampling_defaults("auto", {"temprature": 1.0}, model)
