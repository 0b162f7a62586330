"""The value of the setting `speculative`: a method, and its options as in "ngram:depth=5,min=2,max=4"."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, NamedTuple

import msgspec
import msgspec.inspect as mi
from msgspec import Meta

from common.errors import ConfigError
from common.setting_values import Setting, convert

MAX_DEPTH = 16  # drafts of a request in a step
MAX_MATCH = 16  # tokens
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Depth = Annotated[int, Meta(ge=1, le=MAX_DEPTH)]
MatchLength = Annotated[int, Meta(ge=1, le=MAX_MATCH)]


class NgramOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `ngram`."""

    depth: Depth = 5  # most drafts
    min: MatchLength = 2  # tokens that must have stood there before
    max: MatchLength = 4  # of which more make no better match

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ConfigError(f"--speculative: ngram: min is {self.min}, above max, which is {self.max}")


class SuffixOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `suffix`."""

    depth: Depth = 8  # most drafts
    memory: Annotated[int, Meta(ge=2**20, le=2**36)] = 64 * 2**20  # bytes for outputs of earlier requests


class DraftModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `draft`."""

    method: ClassVar[str] = "draft"
    model: str = ""  # local directory or hub id of a smaller model of the same vocabulary; must be given
    depth: Depth = 4  # most drafts
    revision: str | None = None  # on the hub

    def __post_init__(self) -> None:
        if not self.model:
            name = self.method
            raise ConfigError(f"--speculative: {name}: model is missing, as in {name}:model=PATH_OR_ID,depth=4")


class Eagle3Options(DraftModelOptions, frozen=True, kw_only=True):
    """Options of `eagle3`, of a head for the model instead of a smaller model."""

    method: ClassVar[str] = "eagle3"


class MtpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `mtp`, of the model's own multi-token heads."""

    method: ClassVar[str] = "mtp"
    depth: Depth = 1  # most drafts


Options = MtpOptions | NgramOptions | SuffixOptions | DraftModelOptions
_OPTIONS: dict[str, type[Options]] = {
    "ngram": NgramOptions,
    "suffix": SuffixOptions,
    "draft": DraftModelOptions,
    "eagle3": Eagle3Options,
    "mtp": MtpOptions,
}


HeadOptions = Eagle3Options | MtpOptions
ByWorker = DraftModelOptions | MtpOptions  # of what the worker runs beside the model


class SpeculativeMethod(NamedTuple):
    """The method that proposes drafts."""

    name: str  # of a proposer, or its module:factory
    options: Options | None  # None: from outside the package, without any


def parse_speculative(text: str) -> SpeculativeMethod:
    """Raises ConfigError that names --speculative."""
    name, _, given = text.partition(":")
    if name not in _OPTIONS:
        if _PLACE.fullmatch(text):
            return SpeculativeMethod(text, None)
        known = ", ".join(_OPTIONS)
        raise ConfigError(f"--speculative: {text!r} is none of {known}, and not a module:factory of a proposer")
    described = mi.type_info(_OPTIONS[name])
    assert isinstance(described, mi.StructType)
    kinds = {field.name: field.type for field in described.fields}
    values: dict[str, object] = {}
    for pair in filter(None, given.split(",")):
        option, is_given, value = map(str.strip, pair.partition("="))
        if option not in kinds or not is_given:
            raise ConfigError(f"--speculative: {name} has no option {pair!r}; it has {', '.join(kinds)}")
        if option in values:
            raise ConfigError(f"--speculative: {name}: {option} is given twice")
        values[option] = convert(value, kinds[option], Setting(f"--speculative: {name}:{option}", option == "memory"))
    return SpeculativeMethod(name, _OPTIONS[name](**values))  # type: ignore[arg-type]
