"""Values of settings: from YAML or from the text of a command line to the type of their field, within its bounds."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec.inspect as mi

from common.errors import ConfigError

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_byte_size(text: str) -> int:
    """Bytes in "4GB" (10^9), "512MiB" or "512M" (2^20), "1048576". Raises ValueError."""
    match = _BYTE_SIZE.fullmatch(text.strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size in bytes: {text!r}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def byte_size_text(size: int) -> str:
    """Returns the size in the largest unit of 1024 that divides it."""
    exponent = min((size & -size).bit_length() - 1, 49) // 10 if size else 0
    return f"{size >> 10 * exponent}{('', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def unwrap(kind: mi.Type) -> tuple[mi.Type, str]:
    """The type below `Metadata` wrappers, and the description they carry."""
    help_text = ""
    while isinstance(kind, mi.Metadata):
        help_text = help_text or str((kind.extra_json_schema or {}).get("description", ""))
        kind = kind.type
    return kind, help_text


def _options(kind: mi.Type) -> list[mi.Type]:
    """The members of a union; any other type is the only one."""
    kind, _ = unwrap(kind)
    return [unwrap(option)[0] for option in kind.types] if isinstance(kind, mi.UnionType) else [kind]


def without_none(kind: mi.Type) -> mi.Type:
    """The one type beside None, or `kind` itself if there are several or none."""
    others = [option for option in _options(kind) if not isinstance(option, mi.NoneType)]
    return others[0] if len(others) == 1 else unwrap(kind)[0]


def kind_in_words(kind: mi.Type, *, is_byte_size: bool = False) -> str:
    """Returns the type and bounds of a setting for a reader: "integer, 0 to 65535, or none"."""
    options = _options(kind)
    words = ["none"] * any(isinstance(option, mi.NoneType) for option in options)
    shapes = [option for option in options if not isinstance(option, mi.NoneType)]
    if len(shapes) > 1:
        words = [str(word) for option in shapes if isinstance(option, mi.LiteralType) for word in option.values] + words
        shapes = [option for option in shapes if not isinstance(option, mi.LiteralType)]
    text = _shape_in_words(shapes[0], is_byte_size=is_byte_size) if len(shapes) == 1 else "a plain value"
    if len(words) < 2:
        return ", or ".join([text, *words])
    return f"{text}, {', '.join(words[:-1])} or {words[-1]}"


def _shape_in_words(shape: mi.Type, *, is_byte_size: bool) -> str:
    match shape:
        case mi.BoolType():
            return "on or off"
        case mi.IntType():
            if is_byte_size:
                return "size in bytes" + _bounds_in_words(shape, byte_size_text)
            return "integer" + _bounds_in_words(shape, str)
        case mi.FloatType():
            return "number" + _bounds_in_words(shape, "{:g}".format)
        case mi.LiteralType():
            return "one of " + ", ".join(map(str, shape.values))
        case mi.ListType() | mi.VarTupleType():
            return "list"
        case mi.DictType():
            return "mapping"
        case _:
            return "text"


def _bounds_in_words(kind: mi.IntType | mi.FloatType, show_bound: Callable[[Any], str]) -> str:
    if kind.ge is not None and kind.le is not None:
        return f", {show_bound(kind.ge)} to {show_bound(kind.le)}"
    bounds = ((kind.ge, "at least"), (kind.gt, "above"), (kind.le, "at most"), (kind.lt, "below"))
    return "".join(f", {words} {show_bound(bound)}" for bound, words in bounds if bound is not None)


class Setting(NamedTuple):
    """The setting for which a value is converted."""

    name: str  # its name in error messages
    is_byte_size: bool

    def refuse(self, problem: str) -> ConfigError:
        """The error to raise for its value."""
        return ConfigError(f"{self.name}: {problem}", param=self.name)


def convert(value: object, kind: mi.Type, setting: Setting) -> object:
    """`value`, from YAML or as command line text, as `kind`. Raises ConfigError."""
    kind, _ = unwrap(kind)
    match kind:
        case mi.UnionType():
            return _convert_union(value, kind, setting)
        case mi.BoolType():
            return _to_bool(value, setting)
        case mi.IntType():
            return _bounded(_to_int(value, setting), kind, setting)
        case mi.FloatType():
            return _bounded(_to_finite(value, setting), kind, setting)
        case mi.StrType():
            return _to_str(value, kind, setting)
        case mi.LiteralType():
            return _to_choice(value, kind, setting)
        case mi.ListType():
            return _to_list(value, kind, setting)
        case mi.VarTupleType():
            return tuple(_to_list(value, kind, setting))
        case mi.DictType():
            return _to_dict(value, kind, setting)
        case _:
            raise TypeError(f"{setting.name}: settings of type {type(kind).__name__} are not supported")


def _convert_union(value: object, kind: mi.UnionType, setting: Setting) -> object:
    """None or a word if allowed and meant, else the first member that takes the value; text is tried last."""
    options = _options(kind)
    if any(isinstance(option, mi.NoneType) for option in options) and (
        value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    ):
        return None
    options = [option for option in options if not isinstance(option, mi.NoneType)]
    if any(isinstance(option, mi.LiteralType) and value in option.values for option in options):
        return value
    if len(options) == 1:
        return convert(value, options[0], setting)
    options = [option for option in options if not isinstance(option, mi.LiteralType)]
    order = (mi.IntType, mi.FloatType, mi.BoolType, mi.StrType)
    for option in sorted(options, key=lambda option: order.index(type(option))):
        try:
            return convert(value, option, setting)
        except ConfigError:
            continue
    raise setting.refuse(f"expected {kind_in_words(kind)}, got {show(value)}")


def _to_bool(value: object, setting: Setting) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise setting.refuse(f"expected true or false, got {show(value)}")


def _to_int(value: object, setting: Setting) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return parse_byte_size(value) if setting.is_byte_size else int(value)
        except ValueError:
            pass
    expected = "a size such as 512MiB or 4GB" if setting.is_byte_size else "an integer"
    raise setting.refuse(f"expected {expected}, got {show(value)}")


def _to_finite(value: object, setting: Setting) -> float:
    """Rejects infinity: times become deadlines of calls, and gRPC treats an infinite one as expired."""
    number = _to_float(value, setting)
    if math.isinf(number):
        raise setting.refuse(f"must be finite, got {show(value)}")
    return number


def _to_float(value: object, setting: Setting) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise setting.refuse(f"expected a number, got {show(value)}")


def _bounded(value: float, kind: mi.IntType | mi.FloatType, setting: Setting) -> float:
    for bound, sign, holds in (
        (kind.ge, ">=", operator.ge),
        (kind.gt, ">", operator.gt),
        (kind.le, "<=", operator.le),
        (kind.lt, "<", operator.lt),
    ):
        if bound is not None and not holds(value, bound):  # NaN holds for no bound
            raise setting.refuse(f"must be {sign} {bound}, got {value}")
    return value


def _to_str(value: object, kind: mi.StrType, setting: Setting) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # YAML reads `revision: 7` as a number
    if not isinstance(value, str):
        raise setting.refuse(f"expected text, got {show(value)}")
    if len(value) < (kind.min_length or 0):
        raise setting.refuse("must not be empty" if kind.min_length == 1 else f"needs {kind.min_length} characters")
    if kind.max_length is not None and len(value) > kind.max_length:
        raise setting.refuse(f"must have at most {kind.max_length} characters, got {len(value)}")
    if kind.pattern is not None and not re.search(kind.pattern, value):
        raise setting.refuse(f"must match {kind.pattern}, got {value!r}")
    return value


def _to_choice(value: object, kind: mi.LiteralType, setting: Setting) -> object:
    for choice in kind.values:
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    choices = ", ".join(map(str, kind.values))
    raise setting.refuse(f"must be one of {choices}, got {show(value)}")


def _to_list(value: object, kind: mi.ListType | mi.VarTupleType, setting: Setting) -> list[object]:
    """Each element may itself be a comma-separated list; YAML may give a list or such a text."""
    items = value if isinstance(value, list) else [value]
    parts: list[object] = []
    for item in items:
        parts += [part.strip() for part in item.split(",") if part.strip()] if isinstance(item, str) else [item]
    return [convert(part, kind.item_type, setting) for part in parts]


def _to_dict(value: object, kind: mi.DictType, setting: Setting) -> dict[str, object]:
    pairs: dict[str, object] = {}
    if isinstance(value, dict):
        pairs = {str(key): item for key, item in value.items()}
    elif isinstance(value, list):
        for item in value:
            pairs.update(_to_pairs(str(item), setting))
    else:
        raise setting.refuse(f"expected a mapping, got {show(value)}")
    return {key: convert(item, kind.value_type, setting) for key, item in pairs.items()}


def _to_pairs(text: str, setting: Setting) -> dict[str, object]:
    """Reads one KEY=VALUE, or a JSON object."""
    key, separator, value = text.partition("=")
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            return dict(json.loads(text))
    elif separator and key.strip():
        return {key.strip(): value}
    raise setting.refuse(f"expected KEY=VALUE or a JSON object, got {show(text)}")


def show(value: object) -> str:
    """A value as an error message quotes it."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
