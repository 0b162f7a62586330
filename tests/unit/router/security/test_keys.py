"""API keys in files and in the environment."""

from __future__ import annotations

import hashlib

import pytest

from common.errors import ConfigError, InvalidRequestError
from router.fairness.tenant import Tenant
from router.security.key_source import ENVIRONMENT, load_keys
from router.security.keys import KeyTable, generate_key, parse_key_file, parse_key_list

KEY = "a-secret-key-of-the-tests"
HASH = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
OTHER = f"sha256:{'0' * 64}"


def salts(text):
    return [key.tenant.salt for key in parse_key_file(text)]


def test_an_entry_has_all_that_is_known_of_a_tenant():
    (key,) = parse_key_file(
        f"- {{name: a, hash: '{HASH}', weight: 2, requests_per_minute: 3, tokens_per_minute: 4.5, max_concurrent: 5,"
        " min_priority: -3}"
    )
    assert (key.tenant.name, key.tenant.weight, key.tenant.min_priority) == ("a", 2, -3)
    assert (key.quota.requests_per_minute, key.quota.tokens_per_minute, key.quota.max_concurrent) == (3, 4.5, 5)
    assert KeyTable([key]).find(KEY) is key
    for wrong in ("", KEY + "x", HASH, KEY.upper(), "\udce4"):
        assert KeyTable([key]).find(wrong) is None


def test_an_operator_is_one_whose_entry_says_so():
    file = f"[{{name: a, hash: '{HASH}', operator: true}}, {{name: b, hash: '{OTHER}'}}]"
    assert [key.is_operator for key in parse_key_file(file)] == [True, False]
    listed = parse_key_list(f"a:{HASH}:operator,b:{OTHER},another-secret-key")
    assert [key.is_operator for key in listed] == [True, False, False]
    assert listed[0].tenant.name == "a"


def test_tenants_share_no_salt_unless_they_say_so():
    own = salts(f"[{{name: a, hash: '{HASH}'}}, {{name: b, hash: '{OTHER}'}}]")
    shared = salts(f"[{{name: a, hash: '{HASH}', share_cache: true}}, {{name: b, hash: '{OTHER}', share_cache: true}}]")
    named = salts(f"[{{name: a, hash: '{HASH}', cache_salt: x}}, {{name: b, hash: '{OTHER}', cache_salt: x}}]")
    assert own[0] != own[1]
    assert shared[0] == shared[1]
    assert named[0] == named[1]
    assert len({*own, *shared, *named}) == 4
    assert {len(salt) for salt in (*own, *shared, *named)} == {32}  # none is the beginning of another
    assert own == salts(f"[{{name: renamed, hash: '{HASH}', weight: 9}}, {{name: b, hash: '{OTHER}'}}]")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a list of keys"),
        ("[]", "expected a list of keys"),
        ("{name: a}", "expected a list of keys"),
        (f"- {KEY}", "key 1: expected a mapping"),
        (f"- {KEY}: x", "key 1: unknown setting; known: name, hash"),
        (f"- {{name: a, hash: {KEY}}}", "key 1: hash: expected sha256:"),
        (f"- {{name: a, hash: 'sha256:{KEY}'}}", "key 1: hash: expected sha256:"),
        (f"- {{name: {KEY * 4}, hash: '{HASH}'}}", "key 1: Expected `str` matching regex"),
        (f"- {{name: 'a b', hash: '{HASH}'}}", "key 1: Expected `str` matching regex"),
        (f"- {{hash: '{HASH}'}}", "key 1: Object missing required field `name`"),
        (f"- {{name: a, hash: '{HASH}', operator: 1}}", "key 1: Expected `bool`, got `int` - at `operator`"),
        (f"- {{name: a, hash: '{HASH}', weight: 0}}", "key 1: Expected `float` > 0.0 - at `weight`"),
        (f"- {{name: a, hash: '{HASH}', max_concurrent: 0}}", "at `max_concurrent`"),
        (f"- {{name: a, hash: '{HASH}', min_priority: high}}", "at `min_priority`"),
        (f"- {{name: a, hash: '{HASH}', min_priority: 2147483648}}", "at `min_priority`"),
        (f"- {{name: a, hash: '{HASH}', tokens_per_minute: .nan}}", "at `tokens_per_minute`"),
        (f"- {{name: a, hash: '{HASH}', share_cache: true, cache_salt: x}}", "exclude each other"),
        (f"- name: a\n  hash: '{KEY}", "not valid YAML near line 2"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: a, hash: '{OTHER}'}}", "two keys are named a"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: b, hash: '{HASH}'}}", "b and a are the same key"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_repeats_no_key(tmp_path, text, problem):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(str(file), {})
    assert caught.value.message.startswith("--api-keys-file: ")
    assert problem in caught.value.message
    assert KEY not in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--api-keys-file: .*absent.yaml: cannot be read: No such file"):
        load_keys(str(tmp_path / "absent.yaml"), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        load_keys(str(tmp_path / "binary"), {})


def test_keys_of_the_environment():
    hashed, plain = parse_key_list(f"team:{HASH}, another-secret-key")
    assert hashed.tenant.name == "team"
    assert plain.tenant.name == "env-2"
    table = KeyTable([hashed, plain])
    assert table.find(KEY) is hashed
    assert table.find("another-secret-key") is plain
    assert plain.tenant.salt not in ("", hashed.tenant.salt)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("too-few-chars", "key 1: shorter than 16"),
        (f"team:{HASH},", "key 2: shorter"),
        (f"team:{HASH}0", "key 1: expected name:"),
        (f"team:{HASH}:admin", "key 1: expected name:"),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(text, problem):
    with pytest.raises(ConfigError) as caught:
        load_keys("", {ENVIRONMENT: text})
    assert caught.value.message.startswith(f"{ENVIRONMENT}: {problem}")
    assert text not in caught.value.message


def test_no_key_goes_before_others_unless_its_entry_says_so():
    (entry,) = parse_key_file(f"- {{name: a, hash: '{HASH}'}}")
    named, plain = parse_key_list(f"team:{HASH}, another-secret-key")
    assert [key.tenant.min_priority for key in (entry, named, plain)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("least", "asked", "given"),
    [(None, -9, -9), (0, 0, 0), (0, 7, 7), (-5, -5, -5), (-5, 0, 0), (3, 0, 3), (3, 4, 4)],
)
def test_a_request_has_the_priority_that_it_asks_for_where_its_key_may(least, asked, given):
    assert Tenant("a", min_priority=least).priority_of(asked) == given


@pytest.mark.parametrize(("least", "asked"), [(0, -1), (-5, -6), (3, 2), (3, -1)])
def test_more_urgent_than_a_key_may_ask_is_refused(least, asked):
    with pytest.raises(InvalidRequestError, match=f"at least {least} for this key, got {asked}") as caught:
        Tenant("a", min_priority=least).priority_of(asked)
    assert caught.value.param == "priority"


def test_both_together_and_neither(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: a, hash: '{HASH}'}}")
    keys = load_keys(str(file), {ENVIRONMENT: "another-secret-key"})
    assert {key.tenant.name for key in keys} == {"a", "env-1"}
    with pytest.raises(ConfigError, match="--api-keys-file: a and env-1 are the same key"):
        load_keys(str(file), {ENVIRONMENT: KEY})
    assert load_keys("", {}) is None


def test_fresh_keys_differ():
    assert generate_key() != generate_key()
    assert len(generate_key()) > 40


def test_without_a_key_nobody_has_a_name():
    assert Tenant() == Tenant(name="", salt="")
