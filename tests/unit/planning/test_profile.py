"""A profile is what was written, or is refused by the name of its field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from planning.learned import read_learned
from planning.profile import load_profile, write_profile
from planning.simulator.hardware import NO_DRAFTS, Drafts

STORED = Path(__file__).with_name("profile.json")
LEARNED = {"num_pods": 1, "is_known": True, "token_s": 0.001, "context_s": 1e-7, "num_blocks": 100}
LEARNED |= {"max_num_seqs": 8, "max_num_batched_tokens": 512}
MODEL = {"name": "demo", "block_size": 16, "max_model_len": 512, "handoff_s": 0.002, "handoff_token_s": 1e-5}
MODEL |= {"num_verified_drafts": 0, "num_accepted_drafts": 0, "num_draft_verifications": 0}
ANSWER = {"models": [MODEL | {"prefill": LEARNED | {"base_s": 0.01}, "decode": LEARNED | {"base_s": 0.02}}]}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = load_profile(STORED)
    write_profile(profile, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == profile


def test_blocks_of_the_simulator_hold_the_same_tokens() -> None:
    profile = load_profile(STORED)
    short, long = profile.hardware(100, 0.05), profile.hardware(4000, 0.05)
    assert (short.block_size, long.block_size) == (16, 64)
    assert short.num_blocks * short.block_size == long.num_blocks * long.block_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: this Baton reads profiles of version 1, not 2"),
        ({"version": None}, "not a profile of `baton profile-engine`"),
        ({"block_size": "x"}, "profile.json: block_size: Expected int, got str"),
        ({"steps": {"prefill_base_s": 1}}, "profile.json: steps: Object missing required field decode_base_s"),
        ({"surprise": 1}, "unknown field surprise"),
    ],
)
def test_another_one_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(STORED.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert message in caught.value.message


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text").write_text("steps:")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(tmp_path / "text")


def test_each_role_has_the_times_that_a_router_learned_of_it() -> None:
    profile, drafts = read_learned(ANSWER, None)
    assert (profile.source, profile.steps.prefill_base_s, profile.steps.decode_base_s) == ("learned", 0.01, 0.02)
    assert (profile.handoff.latency_s, profile.max_model_len) == (0.002, 512)
    assert drafts == NO_DRAFTS


def test_drafts_of_the_pods_are_part_of_what_was_learned() -> None:
    counts = {"num_verified_drafts": 400, "num_accepted_drafts": 300, "num_draft_verifications": 100}
    model = ANSWER["models"][0] | counts
    assert read_learned({"models": [model]}, None).drafts == Drafts(tokens_per_step=4.0, acceptance=0.75)


def test_a_router_that_has_learned_nothing_is_no_source() -> None:
    decode = LEARNED | {"base_s": 0.02, "is_known": False}
    with pytest.raises(ConfigError, match="too few steps of the decode pods of demo"):
        read_learned({"models": [MODEL | {"prefill": None, "decode": decode}]}, None)
    with pytest.raises(ConfigError, match="has no ready decode pod"):
        read_learned({"models": [MODEL | {"prefill": None, "decode": None}]}, None)
    with pytest.raises(ConfigError, match="serves no qwen; it serves: demo"):
        read_learned(ANSWER, "qwen")
