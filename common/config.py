"""Settings: one msgspec struct per component feeds the command line, YAML and `--help`.

Precedence is command line > YAML section > default of the struct. A field `max_num_seqs` is the option
`--max-num-seqs` and the YAML key `max_num_seqs`; nested structs are flattened, so field names are unique within a
component. Fields that hold another struct or None are set by the program and are no settings.

    type                         command line                           YAML
    int, float, str, Literal     --port 8000                            port: 8000
    bool                         --flag / --no-flag                     flag: true
    X | None                     --revision main; "none" unsets         revision: null
    list[X], tuple[X, ...]       --decode a:1,b:2 or repeated           [a:1, b:2] or "a:1,b:2"
    dict[str, X]                 --option key=value, repeated, or JSON  {key: value}
    int named *_memory, *_bytes  512MiB, 4GB, 1048576                   the same

`--help` groups settings by topic: the first line of their struct's docstring up to a colon, unless the struct's TOPICS
(heading -> names) has another one for them. Of a struct that names EVERYDAY settings, `--help` shows only these and
`--help-all` shows all.

A `Meta` on the field gives the help text (description) and the bounds, which are checked here, by name:
"--block-size: must be >= 1, got 0", or "baton.yaml: decode.block_size: must be ..." if that is where the value came
from. A __post_init__ that compares settings raises ValueError and names them by their options. Every error is a
ConfigError; a process prints it on one line and exits with 2.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import operator
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import msgspec.inspect as mi
import yaml

from common.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

CONFIG_ERROR_EXIT_CODE = 2

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_OPTION = re.compile(r"--[a-z0-9]+(?:-[a-z0-9]+)*")
_BYTE_SIZE_FIELD = re.compile(r".*_(memory|bytes)")
_HELP_ALL = "--help-all"
_USAGE = "%(prog)s [options]"


class ArgumentParser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError; abbreviated and unknown options end up here as well."""
        raise ConfigError(message)


class Section(Mapping[str, object]):
    """A mapping of a YAML file that knows where it stands, for error messages."""

    def __init__(self, values: Mapping[str, object], *, source: str = "", path: str = "") -> None:
        self._values = values
        self._own: Mapping[str, object] = values  # without what `over` brought in
        self.source = source  # the file
        self.path = path  # dotted path within it; empty: the document itself
        self._below: Section | None = None  # names the settings that this section does not have

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def name_of(self, key: str) -> str:
        """Returns the name of the setting in error messages: "baton.yaml: prefill.block_size"."""
        if self._below is not None and key not in self._own:
            return self._below.name_of(key)
        dotted = f"{self.path}.{key}" if self.path else key
        return f"{self.source}: {dotted}" if self.source else dotted

    def over(self, below: Section) -> Section:
        """Merges two sections. This one takes precedence; mappings are merged key by key."""
        values = {**below, **self}
        for key in self.keys() & below.keys():
            own, other = self[key], below[key]
            if isinstance(own, dict) and isinstance(other, dict):
                values[key] = {**other, **own}
        merged = Section(values, source=self.source, path=self.path)
        merged._own, merged._below = self._own, below
        return merged

    def section(self, name: str) -> Section:
        """The mapping under `name`; empty if there is none. Raises ConfigError if it is something else."""
        values = self._values.get(name)
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(f"{self.name_of(name)}: expected a mapping, got {_show(values)}", param=name)
        path = f"{self.path}.{name}" if self.path else name
        return Section(values, source=self.source, path=path)

    def check_names(self, known: Iterable[str]) -> None:
        """Raises ConfigError for a key that is not among `known`, with the closest of them."""
        names = sorted(known)
        for key in self._values:
            if key not in names:
                close = difflib.get_close_matches(str(key).replace("-", "_"), names, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
                raise ConfigError(f"{self.name_of(str(key))}: unknown setting; {hint}", param=str(key))


def load_yaml(path: str | Path) -> Section:
    """The document of a YAML file as a Section. Raises ConfigError if it cannot be read or is no mapping."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"--config: {path} is not valid YAML: {detail}", param="config") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of sections, got {_show(document)}", param="config")
    return Section(document, source=str(path))


class _Leaf(NamedTuple):
    """One setting: a field that is no nested struct."""

    name: str
    type: mi.Type
    help: str
    default: object  # msgspec.NODEFAULT: required
    topic: str  # heading of its group in the help

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_byte_size(self) -> bool:
        return _BYTE_SIZE_FIELD.fullmatch(self.name) is not None


def field_names(struct_type: type[msgspec.Struct], *, exclude: frozenset[str] = frozenset()) -> list[str]:
    """Names of all settings of `struct_type`, nested ones included."""
    return [leaf.name for leaf in _leaves(struct_type, exclude)]


def create_parser(
    struct_type: type[msgspec.Struct],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    exclude: frozenset[str] = frozenset(),
) -> ArgumentParser:
    """A parser with one option per setting of `struct_type`.

    If the struct has EVERYDAY settings, `--help` describes these only, unless `arguments` ask for `--help-all`.
    """
    everyday: Collection[str] | None = getattr(struct_type, "EVERYDAY", None)
    shown = None if _HELP_ALL in arguments else everyday
    epilog = None
    if shown is not None:
        num_others = len(field_names(struct_type, exclude=exclude)) - len(shown)
        epilog = f"{num_others} more settings, rarely needed: {prog} {_HELP_ALL}"
    parser = ArgumentParser(prog=prog, description=description, epilog=epilog, allow_abbrev=False, usage=_USAGE)
    if everyday is not None:
        parser.add_argument(_HELP_ALL, action="help", help="show all settings and exit")
    add_arguments(parser, struct_type, exclude=exclude, shown=shown)
    return parser


def add_arguments(
    parser: argparse.ArgumentParser,
    struct_type: type[msgspec.Struct],
    *,
    exclude: frozenset[str] = frozenset(),
    shown: Collection[str] | None = None,
) -> None:
    """Adds one option per setting of `struct_type` to `parser`, except for the field names in `exclude`.

    Help has a group for each topic, and describes the settings in `shown` only, if that is given. Parsing keeps the
    text (None: not given); `build` converts and checks it.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in _leaves(struct_type, exclude):
        if leaf.topic not in groups:
            groups[leaf.topic] = parser.add_argument_group(leaf.topic)
        text = _help(leaf) if shown is None or leaf.name in shown else argparse.SUPPRESS
        _add_argument(groups[leaf.topic], leaf, text)


def _add_argument(group: argparse._ArgumentGroup, leaf: _Leaf, text: str) -> None:
    shape = _without_none(leaf.type)
    if isinstance(shape, mi.BoolType):
        group.add_argument(leaf.option, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif isinstance(shape, mi.ListType | mi.VarTupleType | mi.DictType):
        group.add_argument(leaf.option, action="append", metavar=_metavar(leaf, shape), help=text)
    else:
        group.add_argument(leaf.option, metavar=_metavar(leaf, shape), help=text)


def build(
    struct_type: type[T],
    args: argparse.Namespace | None = None,
    section: Mapping[str, object] | None = None,
    *,
    exclude: frozenset[str] = frozenset(),
) -> T:
    """A `struct_type` from parsed options, else the YAML section, else defaults.

    Raises ConfigError that names the setting if a value is invalid, a required one is missing or a key is unknown.
    """
    where = section if isinstance(section, Section) else Section(section or {})
    where.check_names(field_names(struct_type, exclude=exclude))
    values: dict[str, object] = {}
    names: dict[str, str] = {}  # option -> name in error messages, for settings from YAML
    for leaf in _leaves(struct_type, exclude):
        given = getattr(args, leaf.name, None)
        if given is not None:
            values[leaf.name] = _convert(given, leaf.type, _Setting(leaf.option, leaf.is_byte_size))
        elif leaf.name in where:
            names[leaf.option] = where.name_of(leaf.name)
            values[leaf.name] = _convert(where[leaf.name], leaf.type, _Setting(names[leaf.option], leaf.is_byte_size))
        elif leaf.default is msgspec.NODEFAULT:
            raise ConfigError(f"{leaf.option}: required", param=leaf.name)
    try:
        return _construct(struct_type, values)
    except ValueError as error:  # from a __post_init__, which knows settings by their options
        raise ConfigError(_OPTION.sub(lambda found: names.get(found[0], found[0]), str(error))) from error


def parse(
    struct_type: type[T],
    argv: Sequence[str] | None,
    *,
    prog: str,
    section: str,
    description: str | None = None,
    exclude: frozenset[str] = frozenset(),
) -> T:
    """The settings of a process: its options plus those of each `--config FILE`, of which it reads `section`."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = create_parser(struct_type, arguments, prog=prog, description=description, exclude=exclude)
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help=f"YAML file; its section `{section}` gives defaults. Of several files the later one wins.",
    )
    args = parser.parse_args(arguments)
    settings = Section({})
    for file in args.config:
        settings = load_yaml(file).section(section).over(settings)
    return build(struct_type, args, settings, exclude=exclude)


def to_arguments(settings: msgspec.Struct, *, exclude: frozenset[str] = frozenset()) -> list[str]:
    """The options that make another process `build` the same settings; those at their defaults are left out."""
    values = dict(_flat_values(settings))
    arguments: list[str] = []
    for leaf in _leaves(type(settings), exclude):
        value = values[leaf.name]
        if value == leaf.default:
            continue
        if isinstance(value, bool):
            arguments.append(leaf.option if value else f"--no-{leaf.option.removeprefix('--')}")
        elif isinstance(value, dict):
            arguments += [f"{leaf.option}={key}={_text(item)}" for key, item in value.items()]
        elif isinstance(value, list | tuple):
            arguments += [f"{leaf.option}={_text(item)}" for item in value]
        else:
            arguments.append(f"{leaf.option}={_text(value)}")
    return arguments


def report_config_error(error: ConfigError) -> int:
    """Prints the error on one line of stderr and returns the exit code, 2."""
    sys.stderr.write(f"baton: error: {' '.join(error.message.split())}\n")
    sys.stderr.flush()
    return CONFIG_ERROR_EXIT_CODE


def parse_byte_size(text: str) -> int:
    """Bytes in "4GB" (10^9), "512MiB" or "512M" (2^20), "1048576". Raises ValueError."""
    match = _BYTE_SIZE.fullmatch(text.strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size in bytes: {text!r}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


# --- struct -> settings ---


def _leaves(struct_type: type[msgspec.Struct], exclude: frozenset[str]) -> list[_Leaf]:
    described = mi.type_info(struct_type)
    assert isinstance(described, mi.StructType)
    leaves = list(_walk(described, msgspec.NODEFAULT, exclude))
    names = [leaf.name for leaf in leaves]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{struct_type.__name__}: settings are not unique: {', '.join(sorted(twice))}")
    return leaves


def _walk(described: mi.StructType, instance: object, exclude: frozenset[str]) -> Iterator[_Leaf]:
    """Leaves of a struct; `instance` is the default of the field that holds it, whose values win over the class's."""
    for field in described.fields:
        if field.name in exclude:
            continue
        field_type, help_text = _unwrap(field.type)
        if instance is not msgspec.NODEFAULT:
            default: object = getattr(instance, field.name)
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            default = field.default
        if isinstance(field_type, mi.StructType):
            yield from _walk(field_type, default, exclude)
        elif not isinstance(_without_none(field_type), mi.StructType | mi.UnionType):
            yield _Leaf(field.name, field_type, help_text, default, _topic(described.cls, field.name))


def _topic(struct_type: type[msgspec.Struct], name: str) -> str:
    """The heading that TOPICS gives the setting, else the first line of the struct's docstring up to a colon."""
    topics: Mapping[str, Collection[str]] = getattr(struct_type, "TOPICS", {})
    for topic, names in topics.items():
        if name in names:
            return topic
    return (struct_type.__doc__ or struct_type.__name__).splitlines()[0].partition(":")[0].rstrip(".")


def _unwrap(kind: mi.Type) -> tuple[mi.Type, str]:
    """The type below `Metadata` wrappers, and the description they carry."""
    help_text = ""
    while isinstance(kind, mi.Metadata):
        help_text = help_text or str((kind.extra_json_schema or {}).get("description", ""))
        kind = kind.type
    return kind, help_text


def _without_none(kind: mi.Type) -> mi.Type:
    kind, _ = _unwrap(kind)
    if isinstance(kind, mi.UnionType):
        others = [_unwrap(option)[0] for option in kind.types if not isinstance(option, mi.NoneType)]
        if len(others) == 1:
            return others[0]
    return kind


def _construct(struct_type: type[T], values: Mapping[str, object]) -> T:
    """Fills `struct_type` and its nested structs from the flat `values`; what is absent keeps its default.

    Raises ValueError if a __post_init__ does.
    """

    def fill(target: type[msgspec.Struct], base: msgspec.Struct | None) -> msgspec.Struct:
        described = mi.type_info(target)
        assert isinstance(described, mi.StructType)
        changes: dict[str, Any] = {}
        for field in described.fields:
            field_type, _ = _unwrap(field.type)
            if isinstance(field_type, mi.StructType):  # may bear the name of a setting within it
                nested = getattr(base, field.name) if base is not None else _default_of(field)
                changes[field.name] = fill(field_type.cls, nested)
            elif field.name in values:
                changes[field.name] = values[field.name]
        return msgspec.structs.replace(base, **changes) if base is not None else target(**changes)

    filled = fill(struct_type, None)
    assert isinstance(filled, struct_type)
    return filled


def _default_of(field: mi.Field) -> msgspec.Struct | None:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()  # type: ignore[no-any-return]
    return field.default if isinstance(field.default, msgspec.Struct) else None


def _flat_values(settings: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for name in type(settings).__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from _flat_values(value)
        else:
            yield name, value


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# --- help ---


def _help(leaf: _Leaf) -> str:
    if leaf.default is msgspec.NODEFAULT:
        suffix = "required"
    elif leaf.default in (None, "", (), [], {}):
        suffix = ""
    else:
        suffix = f"default: {_default_text(leaf)}"
    text = f"{leaf.help} ({suffix})" if suffix else leaf.help
    return text.replace("%", "%%")


def _default_text(leaf: _Leaf) -> str:
    match leaf.default:
        case bool(is_on):
            return "on" if is_on else "off"
        case int(size) if leaf.is_byte_size and size:
            exponent = min((size & -size).bit_length() - 1, 49) // 10  # of 1024, in the largest unit that divides it
            return f"{size >> 10 * exponent}{('', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
        case float(number):
            return f"{number:g}"
        case other:
            return str(other)


def _metavar(leaf: _Leaf, shape: mi.Type) -> str:
    match shape:
        case mi.LiteralType():
            return "{" + ",".join(map(str, shape.values)) + "}"
        case mi.IntType():
            return "BYTES" if leaf.is_byte_size else "N"
        case mi.FloatType():
            return "X"
        case mi.ListType() | mi.VarTupleType():
            return "A,B"
        case mi.DictType():
            return "KEY=VALUE"
        case _:
            return "TEXT"


# --- values ---


class _Setting(NamedTuple):
    """The setting for which a value is converted."""

    name: str  # its name in error messages
    is_byte_size: bool

    def refuse(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.name}: {problem}", param=self.name)


def _convert(value: object, kind: mi.Type, setting: _Setting) -> object:
    """`value`, from YAML or as command line text, as `kind`. Raises ConfigError."""
    kind, _ = _unwrap(kind)
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


def _convert_union(value: object, kind: mi.UnionType, setting: _Setting) -> object:
    """None if allowed and meant, else the first member that takes the value; text is tried last."""
    if any(isinstance(option, mi.NoneType) for option in kind.types) and (
        value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    ):
        return None
    options = [option for option in kind.types if not isinstance(option, mi.NoneType)]
    if len(options) == 1:
        return _convert(value, options[0], setting)
    order = (mi.IntType, mi.FloatType, mi.BoolType, mi.StrType)
    for option in sorted(options, key=lambda option: order.index(type(option))):
        try:
            return _convert(value, option, setting)
        except ConfigError:
            continue
    raise setting.refuse(f"expected a plain value, got {_show(value)}")


def _to_bool(value: object, setting: _Setting) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise setting.refuse(f"expected true or false, got {_show(value)}")


def _to_int(value: object, setting: _Setting) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return parse_byte_size(value) if setting.is_byte_size else int(value)
        except ValueError:
            pass
    expected = "a size such as 512MiB or 4GB" if setting.is_byte_size else "an integer"
    raise setting.refuse(f"expected {expected}, got {_show(value)}")


def _to_finite(value: object, setting: _Setting) -> float:
    """Rejects infinity: times become deadlines of calls, and gRPC treats an infinite one as expired."""
    number = _to_float(value, setting)
    if math.isinf(number):
        raise setting.refuse(f"must be finite, got {_show(value)}")
    return number


def _to_float(value: object, setting: _Setting) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise setting.refuse(f"expected a number, got {_show(value)}")


def _bounded(value: float, kind: mi.IntType | mi.FloatType, setting: _Setting) -> float:
    for bound, sign, holds in (
        (kind.ge, ">=", operator.ge),
        (kind.gt, ">", operator.gt),
        (kind.le, "<=", operator.le),
        (kind.lt, "<", operator.lt),
    ):
        if bound is not None and not holds(value, bound):  # NaN holds for no bound
            raise setting.refuse(f"must be {sign} {bound}, got {value}")
    return value


def _to_str(value: object, kind: mi.StrType, setting: _Setting) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # YAML reads `revision: 7` as a number
    if not isinstance(value, str):
        raise setting.refuse(f"expected text, got {_show(value)}")
    if len(value) < (kind.min_length or 0):
        raise setting.refuse("must not be empty" if kind.min_length == 1 else f"needs {kind.min_length} characters")
    if kind.max_length is not None and len(value) > kind.max_length:
        raise setting.refuse(f"must have at most {kind.max_length} characters, got {len(value)}")
    if kind.pattern is not None and not re.search(kind.pattern, value):
        raise setting.refuse(f"must match {kind.pattern}, got {value!r}")
    return value


def _to_choice(value: object, kind: mi.LiteralType, setting: _Setting) -> object:
    for choice in kind.values:
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    choices = ", ".join(map(str, kind.values))
    raise setting.refuse(f"must be one of {choices}, got {_show(value)}")


def _to_list(value: object, kind: mi.ListType | mi.VarTupleType, setting: _Setting) -> list[object]:
    """Each element may itself be a comma-separated list; YAML may give a list or such a text."""
    items = value if isinstance(value, list) else [value]
    parts: list[object] = []
    for item in items:
        parts += [part.strip() for part in item.split(",") if part.strip()] if isinstance(item, str) else [item]
    return [_convert(part, kind.item_type, setting) for part in parts]


def _to_dict(value: object, kind: mi.DictType, setting: _Setting) -> dict[str, object]:
    pairs: dict[str, object] = {}
    if isinstance(value, dict):
        pairs = {str(key): item for key, item in value.items()}
    elif isinstance(value, list):
        for item in value:
            pairs.update(_to_pairs(str(item), setting))
    else:
        raise setting.refuse(f"expected a mapping, got {_show(value)}")
    return {key: _convert(item, kind.value_type, setting) for key, item in pairs.items()}


def _to_pairs(text: str, setting: _Setting) -> dict[str, object]:
    """Of one KEY=VALUE, or of a JSON object."""
    key, separator, value = text.partition("=")
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            return dict(json.loads(text))
    elif separator and key.strip():
        return {key.strip(): value}
    raise setting.refuse(f"expected KEY=VALUE or a JSON object, got {_show(text)}")


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
