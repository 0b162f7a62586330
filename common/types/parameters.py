"""The facts of a sampling parameter beside its type and default: SamplingParams is a table of these.

The ranges that are checked, the fields of HTTP bodies and of two messages in `proto/`, and docs/api.md come from it. A
new parameter is a new line there and the sampler's business; `make proto api-docs` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec


class Range(NamedTuple):
    """Numbers that are allowed."""

    low: float
    high: float = float("inf")
    low_included: bool = True
    integer: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        above = value >= self.low if self.low_included else value > self.low  # NaN compares false
        return above and value <= self.high

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        if self.high == float("inf"):
            return f"{kind} of at least {self.low}"
        return f"{kind} in {self.interval}"

    @property
    def interval(self) -> str:
        """Such as (0, 1]; a bound beyond 32 bits as a power."""
        low = "-2^63" if self.low == -(2**63) else self.low
        high = "2^64)" if self.high == 2**64 - 1 else f"{self.high}]"
        return f"{'[' if self.low_included else '('}{low}, {high}"


TOKEN_IDS = tuple[int, ...]
TOKEN_SEQUENCES = tuple[tuple[int, ...], ...]
TEXTS = tuple[str, ...]
BIASES = dict[int, float]  # by token id
ARGUMENTS = dict[str, str | int | float | bool]


class Parameter(NamedTuple):
    """Stands in the annotation of a field of SamplingParams."""

    doc: str  # what it does; one line
    allowed: Range | None  # of a number, or of each value of a mapping; None: what the type says
    tag: int | None  # field number in baton.v1.SamplingParams; None: pods have no use for it
    option_tag: int | None  # field number in baton.v1.GenerateOptions; None: clients do not give it
    proto_type: str  # "double", "uint32", "bool" and so on; of what a list or mapping holds
    max_entries: int | None = None  # of a list or mapping
    max_chars: int | None = None  # of each text
    max_token_ids: int | None = None  # of all sequences together


class ParameterField(NamedTuple):
    """One field of SamplingParams."""

    name: str
    kind: Any  # float, int, bool, one of the kinds above, or a struct, which each protocol writes in its own way
    default: Any
    is_optional: bool  # None is a value
    parameter: Parameter

    @property
    def is_struct(self) -> bool:
        """Whether a value has fields of its own."""
        return isinstance(self.kind, type) and issubclass(self.kind, msgspec.Struct)


@cache
def parameters_of(struct: type[msgspec.Struct]) -> Mapping[str, ParameterField]:
    """The table, by name."""
    hints = get_type_hints(struct, include_extras=True)
    fields = (_field_of(field, hints[field.name]) for field in msgspec.structs.fields(struct))
    return {field.name: field for field in fields}


def _field_of(field: msgspec.structs.FieldInfo, hint: Any) -> ParameterField:
    kind, parameter = get_args(hint)
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    is_optional = type(None) in options
    plain = next(option for option in options if option is not type(None))
    return ParameterField(field.name, plain, field.default, is_optional, parameter)
