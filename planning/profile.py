"""The profile of an engine: what a plan has to know of it. JSON, so that a person can read and keep it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import ConfigError
from common.setting_values import show
from planning.simulator.hardware import NO_DRAFTS, Drafts, Hardware
from planning.steps import Seconds, StepFit

VERSION = 1
_MOST_BLOCK_TOKENS = 512
_MOST_BLOCKS = 64  # of a request in a simulation, which takes a time that grows with them
_FIELD = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<field>.*)`)?")

Count = Annotated[int, Meta(ge=1, le=2**40)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long it takes from the end of a prefill until decode can go on: `latency_s`, and `token_s` for each token
    whose KV is not yet there."""

    connector: str  # with which it was measured; empty: it is a guess
    latency_s: Seconds
    token_s: Seconds

    def bytes_per_s(self, kv_bytes_per_token: int) -> float:
        """Returns the rate at which KV travels; infinite if it takes no time."""
        return kv_bytes_per_token / self.token_s if self.token_s else float("inf")


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of step that was measured, and what the fit makes of it."""

    prompt_tokens: int
    context_tokens: int  # before those tokens, of the same prompt
    num_decoding: int
    decode_context: int
    measured_s: float
    fitted_s: float


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: a model on a machine, in a dtype, on so many threads."""

    version: int
    source: Literal["measured", "learned"]  # by `baton profile-engine`, or by a router from its pods' reports
    model: str
    machine: str
    device: str
    dtype: str
    num_threads: int  # 0: not on a CPU, or unknown
    block_size: Count  # tokens
    num_blocks: Count
    kv_bytes_per_token: Annotated[int, Meta(ge=0)]  # 0: unknown
    max_model_len: Count
    max_num_batched_tokens: Count
    max_num_seqs: Count
    steps: StepFit
    handoff: Handoff
    request_s: Seconds = 0.003  # of router and pods for one request, beside its steps
    message_s: Seconds = 0.0005  # between router and pod
    fit_error: float = 0.0  # median of the relative errors of the fit
    points: list[Point] = []

    def hardware(self, mean_tokens: float, target_itl_s: float, drafts: Drafts = NO_DRAFTS) -> Hardware:
        """Returns a pod of the simulator, for requests of so many tokens: the longer, the larger are its blocks."""
        block_size = self.block_size
        while mean_tokens / block_size > _MOST_BLOCKS and 2 * block_size <= max(_MOST_BLOCK_TOKENS, self.block_size):
            block_size *= 2
        return Hardware(
            name=self.model,
            steps=self.steps,
            handoff_s=self.handoff.latency_s,
            handoff_token_s=self.handoff.token_s,
            num_blocks=max(2, self.num_blocks * self.block_size // block_size),
            block_size=block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            target_itl_s=target_itl_s,
            message_s=self.message_s,
            request_s=self.request_s,
            drafts=drafts,
        )


def load_profile(path: Path) -> EngineProfile:
    """Reads a profile. Raises ConfigError that names the file, and the field if one is wrong."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--profile: cannot read {path}: {error.strerror}", param="profile") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--profile: {path} is not JSON: {error}", param="profile") from error
    return parse_profile(document, str(path))


def parse_profile(document: Any, source: str) -> EngineProfile:
    """Checks a decoded document. Raises ConfigError, which names `source`."""
    version = document.get("version") if isinstance(document, dict) else None
    if version is None:
        raise ConfigError(f"{source}: not a profile of `baton profile-engine`", param="profile")
    if version != VERSION:
        raise ConfigError(
            f"{source}: version: this Baton reads profiles of version {VERSION}, not {show(version)}; "
            "measure again with `baton profile-engine`",
            param="profile",
        )
    try:
        return msgspec.convert(document, EngineProfile)
    except msgspec.ValidationError as error:
        found = _FIELD.fullmatch(str(error))
        assert found is not None
        where = f"{source}: {found['field']}" if found["field"] else source
        raise ConfigError(f"{where}: {found['problem'].replace('`', '')}", param="profile") from error


def write_profile(profile: EngineProfile, path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror}", param="output") from error
