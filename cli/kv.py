"""`baton kv`: looks into the store through which pods share KV blocks, checks it, or empties it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from cli.exit_codes import OF_TOOLS
from common.config import ArgumentParser, Section, add_arguments, build, epilog_of, field_names, load_yaml
from common.errors import ConfigError
from deploy.cluster_state import the_cluster
from kv_store.inspection import (
    INSPECTABLE,
    NAMESPACE,
    StoredBlock,
    StoreInspector,
    find_problem,
    is_checked,
    open_inspector,
)

EXIT_CORRUPT = 1  # `verify` found a block that is not what its name says
_REMOVE_BATCH = 500  # blocks removed per round trip, where the store has round trips
_CONFIG_SECTION = "cluster"  # section of the settings file of `baton up`
_DESCRIPTION = (
    "Looks into the store through which pods share KV blocks, checks it, or empties it. By default it is the store of "
    "the cluster that `baton up --detach` started."
)
_EXAMPLES = (
    "baton kv inspect",
    "baton kv verify --connector redis --config baton.yaml",
    "baton kv purge --connector-path /mnt/kv --all --yes",
)
_EXIT_CODES = OF_TOOLS | {EXIT_CORRUPT: "verify found a corrupt block"}
_SUMMARIES = {
    "inspect": "Prints the blocks, bytes and ages of every namespace, which is one model's part of the store.",
    "verify": f"Checks every block against its name and digest. Exit code {EXIT_CORRUPT} if any is corrupt.",
    "purge": "Deletes blocks. Pods that use the store go on: they compute what they miss.",
}


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Store: which one. The same settings as those of `baton up` and of the pods."""

    connector: Annotated[
        str,
        Meta(min_length=1, description=f"Whose store: {' or '.join(INSPECTABLE)}; or nixl, for the store below it."),
    ] = "shared-storage"
    connector_path: Annotated[str, Meta(description="Directory of the shared-storage connector.")] = ""
    connector_options: Annotated[
        dict[str, str | int | float | bool], Meta(description="Further options of the connector, such as url.")
    ] = {}


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code; raises ConfigError, also if the store fails on the way."""
    args = _parser().parse_args(argv)
    settings = _settings(args)
    options = dict(settings.connector_options)
    if settings.connector_path:
        options["path"] = settings.connector_path
    with contextlib.closing(open_inspector(settings.connector, options)) as store:
        return int(args.run(store, args))


def inspect(store: StoreInspector, _: argparse.Namespace) -> int:
    """Prints a line per namespace."""
    contents = summarise(store.blocks())
    if not contents:
        print("The store is empty.")
        return 0
    now = time.time()
    width = max(len("namespace"), *map(len, contents))
    print(f"{'namespace':<{width}}  {'blocks':>9}  {'bytes':>10}  {'oldest use':>12}  {'newest use':>12}")
    for namespace, content in sorted(contents.items()):
        ages = f"{_age(content.oldest_use, now):>12}  {_age(content.newest_use, now):>12}"
        print(f"{namespace:<{width}}  {content.num_blocks:>9}  {format_bytes(content.num_bytes):>10}  {ages}")
    return 0


def verify(store: StoreInspector, args: argparse.Namespace) -> int:
    """Prints what is corrupt, and deletes it if asked to."""
    num_blocks = num_bytes = num_corrupt = num_deleted = num_others = 0
    for block in store.blocks(args.namespace):
        num_blocks += 1
        num_bytes += block.num_bytes
        if not is_checked(block):
            num_others += 1
            continue
        problem = find_problem(store, block)
        if problem is None:
            continue
        num_corrupt += 1
        print(f"corrupt: {block.namespace} {block.hash_hex}: {problem.message}")
        if args.delete_corrupt:
            num_deleted += store.remove([block])
    deleted = f", deleted: {num_deleted}" if args.delete_corrupt else ""
    others = f"; in another version's format, not checked: {num_others}" if num_others else ""
    print(f"blocks: {num_blocks}, {format_bytes(num_bytes)}; corrupt: {num_corrupt}{deleted}{others}")
    return EXIT_CORRUPT if num_corrupt else 0


def purge(store: StoreInspector, args: argparse.Namespace) -> int:
    """Deletes one namespace, or all."""
    if not args.yes and not _confirmed(store, args.namespace):
        print("Nothing deleted.")
        return 0
    num_deleted = sum(map(store.remove, _batches(store.blocks(args.namespace))))
    print(f"deleted: {num_deleted}")
    return 0


@dataclass
class Content:
    """The content of one namespace."""

    num_blocks: int = 0
    num_bytes: int = 0
    oldest_use: float | None = None  # seconds since 1970; None: unknown
    newest_use: float | None = None

    def add(self, block: StoredBlock) -> None:
        """Counts a block."""
        self.num_blocks += 1
        self.num_bytes += block.num_bytes
        if block.used_at is not None:
            self.oldest_use = min(block.used_at, self.oldest_use or block.used_at)
            self.newest_use = max(block.used_at, self.newest_use or block.used_at)


def summarise(blocks: Iterable[StoredBlock]) -> dict[str, Content]:
    """Content by namespace."""
    contents: dict[str, Content] = {}
    for block in blocks:
        contents.setdefault(block.namespace, Content()).add(block)
    return contents


def format_bytes(num_bytes: float) -> str:
    """ "512 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_age(seconds: float) -> str:
    """ "3 min ago"; by another machine's clock it may be in the future."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _age(used_at: float | None, now: float) -> str:
    return "unknown" if used_at is None else format_age(now - used_at)


def _confirmed(store: StoreInspector, namespace: str | None) -> bool:
    """Asks the person at the terminal. Raises ConfigError if there is none."""
    if not sys.stdin.isatty():
        raise ConfigError("--yes: required when stdin is not a terminal", param="yes")
    sizes = [block.num_bytes for block in store.blocks(namespace)]
    answer = input(f"Delete {len(sizes)} blocks, {format_bytes(sum(sizes))}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _batches(blocks: Iterator[StoredBlock]) -> Iterator[list[StoredBlock]]:
    while batch := list(itertools.islice(blocks, _REMOVE_BATCH)):
        yield batch


def _settings(args: argparse.Namespace) -> StoreSettings:
    """Returns the settings given, else those of the cluster in the background. Raises ConfigError."""
    is_given = any(getattr(args, name) is not None for name in ("config", *field_names(StoreSettings)))
    if args.name is not None and is_given:
        raise ConfigError("--name: the cluster knows its store; leave out the options that name one", param="name")
    cluster = None if is_given else the_cluster(args.name)
    if cluster is None:
        return build(StoreSettings, args, _section(args.config))
    if cluster.store is None:
        raise ConfigError(f"the cluster {cluster.name} has no store of KV blocks: its pods share none")
    store = cluster.store
    return StoreSettings(
        connector=store.connector, connector_path=store.connector_path, connector_options=store.connector_options
    )


def _section(path: str | None) -> Section:
    """The store's settings out of those of a cluster."""
    if path is None:
        return Section({})
    section = load_yaml(path).section(_CONFIG_SECTION)
    known = {name: section[name] for name in field_names(StoreSettings) if name in section}
    return Section(known, source=section.source, path=section.path)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="baton kv", description=_DESCRIPTION, epilog=epilog_of(examples=_EXAMPLES, exit_codes=_EXIT_CODES)
    )
    commands = parser.add_subparsers(metavar="{inspect,verify,purge}", required=True)
    subparsers = {}
    for run in (inspect, verify, purge):
        name = run.__name__
        summary = _SUMMARIES[name]
        subparser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog_of(exit_codes=_EXIT_CODES if name == "verify" else OF_TOOLS),
        )
        subparser.add_argument(
            "--name", help="The cluster in the background whose store it is. (default: the only one, else default)"
        )
        subparser.add_argument(
            "--config", metavar="FILE", help=f"YAML file; its section `{_CONFIG_SECTION}` gives defaults."
        )
        add_arguments(subparser, StoreSettings)
        subparser.set_defaults(run=run)
        subparsers[name] = subparser
    _add_namespace(subparsers["verify"], "Only this one.")
    subparsers["verify"].add_argument("--delete-corrupt", action="store_true", help="Delete what is corrupt.")
    what = subparsers["purge"].add_mutually_exclusive_group(required=True)
    _add_namespace(what, "The one to empty.")
    what.add_argument("--all", action="store_true", help="All namespaces.")
    subparsers["purge"].add_argument("--yes", action="store_true", help="Do not ask.")
    return parser


def _add_namespace(parser: argparse._ActionsContainer, summary: str) -> None:
    parser.add_argument("--namespace", metavar="NAME", type=_namespace, help=f"{summary} See `baton kv inspect`.")


def _namespace(text: str) -> str:
    if not NAMESPACE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a name such as v3-0123456789abcdef-16, got {text!r}")
    return text
