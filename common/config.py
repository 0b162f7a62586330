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
`--help-all` shows all. Below them stand examples and exit codes.

A `Meta` on the field gives the help text (description) and the bounds, which are checked here, by name:
"--block-size: must be >= 1, got 0", or "baton.yaml: decode.block_size: must be ..." if that is where the value came
from. A __post_init__ that compares settings raises ValueError and names them by their options. Every error is a
ConfigError; a process prints it on one line and exits with 2.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import msgspec.inspect as mi
import yaml

from common.errors import ConfigError
from common.setting_values import Setting, byte_size_text, convert, kind_in_words, show, unwrap, without_none

T = TypeVar("T", bound=msgspec.Struct)

CONFIG_ERROR_EXIT_CODE = 2
PROCESS_EXIT_CODES = {
    0: "stopped as asked",
    1: "failed while it ran; the log says why",
    CONFIG_ERROR_EXIT_CODE: "a wrong setting; nothing was started",
}

_OPTION = re.compile(r"--[a-z0-9]+(?:-[a-z0-9]+)*")
_BYTE_SIZE_FIELD = re.compile(r".*_(memory|bytes)")
_HELP_ALL = "--help-all"
REQUIRED = "required"  # stands for the default of a setting that has none
_USAGE = "%(prog)s [options]"


class ArgumentParser(argparse.ArgumentParser):
    """argparse without abbreviations that raises ConfigError instead of printing its usage and exiting."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _HelpFormatter, **kwargs})
        self.hints: Mapping[str, str] = {}  # advice for options that this command does not have, by option

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Raises ConfigError for what is not known, with the closest option; also of a subcommand."""
        try:
            parsed, unknown = super().parse_known_args(args, namespace)
        except ConfigError:  # such as a required option that is missing because its name is misspelt
            if self._subparsers is None and (misspelt := self._misspelt(args or ())):
                raise self._unknown(misspelt) from None
            raise
        if unknown:
            raise self._unknown(unknown)
        return parsed, unknown

    def _misspelt(self, arguments: Iterable[str]) -> list[str]:
        options = (text for text in itertools.takewhile(lambda text: text != "--", arguments) if text.startswith("--"))
        return [option for option in options if option.partition("=")[0] not in self._option_string_actions]

    def _unknown(self, arguments: Sequence[str]) -> ConfigError:
        given = next((text for text in arguments if text.startswith("-")), None)
        if given is None:
            return ConfigError(f"{show(arguments[0])}: unexpected argument; see {self.prog} --help")
        option = given.partition("=")[0]
        if option in self.hints:
            return ConfigError(f"{option}: {self.hints[option]}")
        known = [name for name in self._option_string_actions if name not in ("--help", _HELP_ALL)]
        close = difflib.get_close_matches(option.replace("_", "-").lower(), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} {self._full_help}"
        return ConfigError(f"{option}: unknown option; {hint}")

    @property
    def _full_help(self) -> str:
        return _HELP_ALL if _HELP_ALL in self._option_string_actions else "--help"


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions, and leaves texts of several lines (examples) as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def epilog_of(*, examples: Sequence[str] = (), exit_codes: Mapping[int, str], more: str = "") -> str:
    """Returns the text below the options in a help text."""
    parts = [more] if more else []
    if examples:
        parts.append("\n".join(["examples:", *(f"  {example}" for example in examples)]))
    parts.append("\n".join(["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in sorted(exit_codes.items()))]))
    return "\n\n".join(parts)


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
            raise ConfigError(f"{self.name_of(name)}: expected a mapping, got {show(values)}", param=name)
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
        raise ConfigError(f"--config: {path} must hold a mapping of sections, got {show(document)}", param="config")
    return Section(document, source=str(path))


class _Leaf(NamedTuple):
    """One setting: a field that is no nested struct."""

    name: str
    type: mi.Type
    help: str
    default: object  # msgspec.NODEFAULT: required
    topic: str  # heading of its group in the help
    prefix: str = ""  # of its option

    @property
    def option(self) -> str:
        return "--" + self.destination.replace("_", "-")

    @property
    def destination(self) -> str:
        """Its attribute among parsed options."""
        return f"{self.prefix}_{self.name}" if self.prefix else self.name

    @property
    def is_byte_size(self) -> bool:
        return _BYTE_SIZE_FIELD.fullmatch(self.name) is not None


def field_names(struct_type: type[msgspec.Struct], *, exclude: frozenset[str] = frozenset()) -> list[str]:
    """Names of all settings of `struct_type`, nested ones included."""
    return [leaf.name for leaf in _leaves(struct_type, exclude)]


class SettingDescription(NamedTuple):
    """A setting's text in the help, and the rest that the reference page needs."""

    name: str
    topic: str  # heading of its group
    kind: str  # in words: "integer, at least 1"
    default: str  # as the help has it; "required"; empty: unset
    text: str
    is_everyday: bool  # shown by --help, not only by --help-all


def described_settings(
    struct_type: type[msgspec.Struct], *, exclude: frozenset[str] = frozenset()
) -> list[SettingDescription]:
    """Describes all settings of `struct_type`, nested ones included."""
    leaves = _leaves(struct_type, exclude)
    everyday: Collection[str] = getattr(struct_type, "EVERYDAY", [leaf.name for leaf in leaves])
    return [
        SettingDescription(
            name=leaf.name,
            topic=leaf.topic,
            kind=kind_in_words(leaf.type, is_byte_size=leaf.is_byte_size),
            default=_default_text(leaf),
            text=leaf.help,
            is_everyday=leaf.name in everyday,
        )
        for leaf in leaves
    ]


def create_parser(
    struct_type: type[msgspec.Struct],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    usage: str = _USAGE,
    examples: Sequence[str] = (),
    exclude: frozenset[str] = frozenset(),
    exit_codes: Mapping[int, str] = PROCESS_EXIT_CODES,
) -> ArgumentParser:
    """A parser with one option per setting of `struct_type`.

    If the struct has EVERYDAY settings, `--help` describes these only, unless `arguments` ask for `--help-all`.
    """
    everyday: Collection[str] | None = getattr(struct_type, "EVERYDAY", None)
    shown = None if _HELP_ALL in arguments else everyday
    more = f"More settings, rarely needed: {prog} {_HELP_ALL}" if shown is not None else ""
    epilog = epilog_of(examples=examples, exit_codes=exit_codes, more=more)
    parser = ArgumentParser(prog=prog, description=description, epilog=epilog, usage=usage)
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
    scope: str = "",
    prefix: str = "",
) -> None:
    """Adds one option per setting of `struct_type` to `parser`, except for the field names in `exclude`.

    Help has a group for each topic, with `scope` before its heading, and describes the settings in `shown` only, if
    that is given. Parsing keeps the text (None: not given); `build` converts and checks it. With a `prefix`, the
    options are --<prefix>-<setting>.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in _leaves(struct_type, exclude, prefix):
        if leaf.topic not in groups:
            groups[leaf.topic] = parser.add_argument_group(scope + leaf.topic)
        text = _help(leaf) if shown is None or leaf.name in shown else argparse.SUPPRESS
        _add_argument(groups[leaf.topic], leaf, text)


def _add_argument(group: argparse._ArgumentGroup, leaf: _Leaf, text: str) -> None:
    shape = without_none(leaf.type)
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
    prefix: str = "",
) -> T:
    """A `struct_type` from parsed options, those with this prefix, else the YAML section, else defaults.

    Raises ConfigError that names the setting if a value is invalid, a required one is missing or a key is unknown.
    """
    where = section if isinstance(section, Section) else Section(section or {})
    where.check_names(field_names(struct_type, exclude=exclude))
    values: dict[str, object] = {}
    names: dict[str, str] = {}  # option without prefix -> name in error messages
    for leaf in _leaves(struct_type, exclude, prefix):
        option = leaf._replace(prefix="").option
        names[option] = leaf.option
        given = getattr(args, leaf.destination, None)
        if given is not None:
            values[leaf.name] = convert(given, leaf.type, Setting(leaf.option, leaf.is_byte_size))
        elif leaf.name in where:
            names[option] = where.name_of(leaf.name)
            values[leaf.name] = convert(where[leaf.name], leaf.type, Setting(names[option], leaf.is_byte_size))
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
    examples: Sequence[str] = (),
    exclude: frozenset[str] = frozenset(),
) -> T:
    """The settings of a process: its options plus those of each `--config FILE`, of which it reads `section`."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = create_parser(
        struct_type, arguments, prog=prog, description=description, examples=examples, exclude=exclude
    )
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
        if value != leaf.default:
            arguments += _words(leaf, value)
    return arguments


def given_arguments(
    struct_type: type[msgspec.Struct],
    args: argparse.Namespace,
    *,
    exclude: frozenset[str] = frozenset(),
    prefix: str = "",
) -> list[str]:
    """The options of `struct_type` that were given, with this prefix, for another process, which has them without.
    Raises ConfigError for an invalid value."""
    arguments: list[str] = []
    for leaf in _leaves(struct_type, exclude, prefix):
        given = getattr(args, leaf.destination, None)
        if given is not None:
            value = convert(given, leaf.type, Setting(leaf.option, leaf.is_byte_size))
            arguments += _words(leaf._replace(prefix=""), value)
    return arguments


def _words(leaf: _Leaf, value: object) -> list[str]:
    if isinstance(value, bool):
        return [leaf.option if value else f"--no-{leaf.option.removeprefix('--')}"]
    if isinstance(value, dict):
        return [f"{leaf.option}={key}={_text(item)}" for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [f"{leaf.option}={_text(item)}" for item in value]
    return [f"{leaf.option}={_text(value)}"]


def report_config_error(error: ConfigError) -> int:
    """Prints the error on one line of stderr and returns the exit code, 2."""
    sys.stderr.write(f"baton: error: {' '.join(error.message.split())}\n")
    sys.stderr.flush()
    return CONFIG_ERROR_EXIT_CODE


# --- struct -> settings ---


def _leaves(struct_type: type[msgspec.Struct], exclude: frozenset[str], prefix: str = "") -> list[_Leaf]:
    described = mi.type_info(struct_type)
    assert isinstance(described, mi.StructType)
    leaves = [leaf._replace(prefix=prefix) for leaf in _walk(described, msgspec.NODEFAULT, exclude)]
    names = [leaf.name for leaf in leaves]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{struct_type.__name__}: settings are not unique: {', '.join(sorted(twice))}")
    return leaves


def _walk(described: mi.StructType, instance: object, exclude: frozenset[str]) -> Iterator[_Leaf]:
    """Leaves of a struct; `instance` is the default of the field that holds it, whose values win over the class's."""
    for field in described.fields:
        if field.name in exclude:
            continue
        field_type, help_text = unwrap(field.type)
        if instance is not msgspec.NODEFAULT:
            default: object = getattr(instance, field.name)
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            default = field.default
        if isinstance(field_type, mi.StructType):
            yield from _walk(field_type, default, exclude)
        elif not _has_struct(without_none(field_type)):
            yield _Leaf(field.name, field_type, help_text, default, _topic(described.cls, field.name))


def _has_struct(kind: mi.Type) -> bool:
    options = kind.types if isinstance(kind, mi.UnionType) else (kind,)
    return any(isinstance(option, mi.StructType) for option in options)


def _topic(struct_type: type[msgspec.Struct], name: str) -> str:
    """The heading that TOPICS gives the setting, else the first line of the struct's docstring up to a colon."""
    topics: Mapping[str, Collection[str]] = getattr(struct_type, "TOPICS", {})
    for topic, names in topics.items():
        if name in names:
            return topic
    return (struct_type.__doc__ or struct_type.__name__).splitlines()[0].partition(":")[0].rstrip(".")


def _construct(struct_type: type[T], values: Mapping[str, object]) -> T:
    """Fills `struct_type` and its nested structs from the flat `values`; what is absent keeps its default.

    Raises ValueError if a __post_init__ does.
    """

    def fill(target: type[msgspec.Struct], base: msgspec.Struct | None) -> msgspec.Struct:
        described = mi.type_info(target)
        assert isinstance(described, mi.StructType)
        changes: dict[str, Any] = {}
        for field in described.fields:
            field_type, _ = unwrap(field.type)
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
    default = _default_text(leaf)
    suffix = default if default in ("", REQUIRED) else f"default: {default}"
    text = f"{leaf.help} ({suffix})" if suffix else leaf.help
    return text.replace("%", "%%")


def _default_text(leaf: _Leaf) -> str:
    match leaf.default:
        case msgspec.NODEFAULT:
            return REQUIRED
        case unset if unset in (None, "", (), [], {}):
            return ""
        case bool(is_on):
            return "on" if is_on else "off"
        case int(size) if leaf.is_byte_size:
            return byte_size_text(size)
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
