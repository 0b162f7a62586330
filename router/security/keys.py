"""API keys as they are written in a file or in the environment. Only their SHA-256 digests are kept.

    - name: team-a                      # for logs and metrics
      hash: sha256:9f86d0...            # of the key; `baton keys new` prints both
      weight: 2                         # share while requests queue; default 1
      requests_per_minute: 600
      tokens_per_minute: 1000000        # prompt and output
      max_concurrent: 32                # generations at once
      operator: true                    # may see what concerns all tenants; default false
      models: [polite, terse]           # names of models and LoRA adapters that it may use; default: all
      min_priority: -5                  # the most urgent that its requests may ask for; default 0
      share_cache: true                 # with all others that say so; or
      cache_salt: team                  # with all others that name the same

No error repeats what was written where a key may stand.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, NoReturn

import msgspec
import yaml
from msgspec import Meta

from common.errors import ConfigError
from router.fairness.tenant import Tenant

MIN_KEY_CHARS = 16
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_NAMED_HASH = re.compile(rf"({NAME_PATTERN}):sha256:([0-9a-f]{{64}})(:operator)?")
_SALT_CHARS = 32

Name = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}\Z")]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

_DEFAULT_MIN_PRIORITY = 0  # a tenant that could go before all others by saying so would starve them


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's quota. None: no limit of its own."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and outputs
    max_concurrent: int | None = None  # generations at once


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, known by its digest."""

    digest: bytes  # SHA-256 of the key
    tenant: Tenant
    quota: Quota
    is_operator: bool = False  # may see what concerns all tenants


class KeyTable:
    """The keys that are valid together."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises ConfigError if two have the same name or the same hash."""
        self._by_digest: dict[bytes, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            name = key.tenant.name
            if name in names:
                raise ConfigError(f"two keys are named {name}")
            if key.digest in self._by_digest:
                raise ConfigError(f"{name} and {self._by_digest[key.digest].tenant.name} are the same key")
            names.add(name)
            self._by_digest[key.digest] = key

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_digest.values())

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, presented: str) -> ApiKey | None:
        """The key that a client presents. How long it takes tells nothing about the keys: it depends on a digest."""
        digest = digest_of(presented)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    hash: str
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    min_priority: Priority = _DEFAULT_MIN_PRIORITY
    models: Annotated[list[str], Meta(min_length=1)] | None = None
    operator: bool = False
    share_cache: bool = False
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


def generate_key() -> str:
    """A fresh key of 256 random bits."""
    return f"baton-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """SHA-256. Fast hashing is safe here: a key is random and long, not a password that could be guessed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_key_file(text: str) -> list[ApiKey]:
    """The keys of a file. Raises ConfigError that says which entry is wrong, and why."""
    try:
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its text quotes the file
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ConfigError(f"not valid YAML near line {line}") from None
    except yaml.YAMLError:
        raise ConfigError("not valid YAML") from None
    if not isinstance(document, list) or not document:
        raise ConfigError("expected a list of keys, each with name and hash")
    return [_parse_entry(f"key {number}", entry) for number, entry in enumerate(document, 1)]


def parse_key_list(text: str) -> list[ApiKey]:
    """The keys of BATON_API_KEYS, separated by commas: name:sha256:<hex>, name:sha256:<hex>:operator, or plain ones.
    Raises ConfigError."""
    keys = []
    for number, word in enumerate((word.strip() for word in text.split(",")), 1):
        if named := _NAMED_HASH.fullmatch(word):
            name, digest, is_operator = named[1], bytes.fromhex(named[2]), named[3] is not None
        elif "sha256:" in word:
            expected = "name:sha256:<64 lower-case hexadecimal digits>, with or without :operator"
            raise ConfigError(f"key {number}: expected {expected}")
        elif len(word) < MIN_KEY_CHARS:
            raise ConfigError(f"key {number}: shorter than {MIN_KEY_CHARS} characters")
        else:
            name, digest, is_operator = f"env-{number}", digest_of(word), False
        tenant = Tenant(name, _salt("key", digest.hex()), min_priority=_DEFAULT_MIN_PRIORITY)
        keys.append(ApiKey(digest, tenant, Quota(), is_operator))
    return keys


def _parse_entry(where: str, entry: object) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a mapping with name and hash")
    known = _Entry.__struct_fields__
    if not entry.keys() <= set(known):
        raise ConfigError(f"{where}: unknown setting; known: {', '.join(known)}")
    try:
        parsed = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).replace('`$.', '`')}") from None
    found = _HASH.fullmatch(parsed.hash)
    if found is None:
        _refuse(where, "hash: expected sha256:<64 lower-case hexadecimal digits>; `baton keys new` prints one")
    if parsed.share_cache and parsed.cache_salt is not None:
        _refuse(where, "share_cache and cache_salt exclude each other")
    digest = bytes.fromhex(found[1])
    if parsed.share_cache:
        salt = _salt("shared", "")
    elif parsed.cache_salt is not None:
        salt = _salt("named", parsed.cache_salt)
    else:
        salt = _salt("key", digest.hex())
    quota = Quota(parsed.requests_per_minute, parsed.tokens_per_minute, parsed.max_concurrent)
    models = None if parsed.models is None else frozenset(parsed.models)
    tenant = Tenant(parsed.name, salt, parsed.weight, parsed.min_priority, models)
    return ApiKey(digest, tenant, quota, parsed.operator)


def _refuse(where: str, problem: str) -> NoReturn:
    raise ConfigError(f"{where}: {problem}")


def _salt(kind: str, text: str) -> str:
    """All tenants' salts have one length, so that none is a prefix of another's, whatever a client adds to its own."""
    return hashlib.sha256(f"baton.tenant.v1\0{kind}\0{text}".encode()).hexdigest()[:_SALT_CHARS]
