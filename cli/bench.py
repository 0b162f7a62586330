"""`baton bench`: load on an OpenAI endpoint, measured as its clients see it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import uvloop
from msgspec import Meta

from cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from cli.http_endpoint import ENVIRONMENT_HELP, EndpointOptions, allow_connections, endpoint_url, open_endpoint
from cli.progress import ProgressBar
from cli.whole_file import check_writable, replacing
from common.config import ArgumentParser, add_arguments, build, epilog_of
from common.errors import BatonError, ConfigError
from loadgen import page
from loadgen.compare import Difference, differences, order
from loadgen.endpoint import Api, OpenAIEndpoint, first_model
from loadgen.figures import Figures, as_json, requests_as_json, summarise
from loadgen.load import Run, RunInterrupted, run_load
from loadgen.prompts import WordSource, check_endpoint, words_of_endpoint, words_of_tokenizer
from loadgen.slo import Slo, parse_slo
from loadgen.sweep import Found, Try, attainment_alone, highest_rate
from loadgen.table import as_table
from loadgen.workload import Conversation, LoadOptions, build_conversations

_SUMMARIES = {
    "serve": "Sends load to an endpoint and prints TTFT, ITL, TPOT, E2E latency, throughput and goodput.",
    "sweep": "Finds the highest request rate that keeps the SLOs of --goodput.",
    "compare": "Runs two endpoints in turn and says whether they differ beyond noise.",
}
_EXAMPLES = {
    "serve": (
        "baton bench serve --input-len 256 --output-len 64 --ignore-eos --request-rate 4",
        "baton bench serve --api chat --dataset-name multi-turn --max-concurrency 8 --html report.html",
        "baton bench serve --dataset-name trace --dataset-path conversation_trace.jsonl --goodput ttft:500 tpot:50",
    ),
    "sweep": ("baton bench sweep --input-len 256 --output-len 64 --ignore-eos --goodput ttft:500 tpot:50",),
    "compare": ("baton bench compare --url http://127.0.0.1:8000 --url-b http://127.0.0.1:8001 --request-rate 4",),
}
_EXIT_CODES = {
    0: "success",
    EXIT_FAILED: "the endpoint refused the API key or the first request, or requests failed",
    2: "a wrong option or file",
    EXIT_UNREACHABLE: "nothing answers at --url",
    EXIT_INTERRUPTED: "interrupted; serve prints the figures of the requests that had ended",
}
_OWN_RATE = frozenset({"request_rate", "num_prompts"})  # options that sweep decides
_LEAST_REQUESTS = 20  # fewest requests of a try, and of the run that sends them one at a time


class BenchOptions(EndpointOptions, frozen=True, kw_only=True):
    """Endpoint: where requests go."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Endpoint": ("url", "api", "model", "tokenizer", "tls_ca", "timeout_s")
    }

    api: Annotated[Api, Meta(description="completions: /v1/completions. chat: /v1/chat/completions.")] = "completions"
    model: Annotated[str | None, Meta(description="Model name; default: the first that /v1/models lists.")] = None
    tokenizer: Annotated[
        str,
        Meta(
            description="Directory of the model, or its tokenizer.json, for prompts of exact length; default: two "
            "requests measure how many tokens the endpoint makes of a word."
        ),
    ] = ""


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Search: which rates are tried."""

    attainment: Annotated[
        float, Meta(gt=0, le=100, description="Requests that have to keep the SLOs, in percent; a failed one does not.")
    ] = 99.0
    start_rate: Annotated[float, Meta(gt=0, le=1e5, description="Rate tried first, in requests/s.")] = 1.0
    precision: Annotated[
        float, Meta(gt=0, le=1, description="Share by which the rate that keeps and the one that breaks may differ.")
    ] = 0.05
    try_s: Annotated[float, Meta(gt=0, description="Seconds for which requests are sent at each rate.")] = 30.0


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison: the other endpoint, and how often each is measured."""

    url_b: Annotated[str, Meta(min_length=1, description="The other endpoint; it gets the same API key.")]
    model_b: Annotated[str | None, Meta(description="Its model; default: the first it lists.")] = None
    repeats: Annotated[
        int,
        Meta(ge=3, le=50, description="How often the runs ABBA are made; with fewer than 3 no difference can show."),
    ] = 3


class _Target(NamedTuple):
    """An endpoint, and what its prompts are made of."""

    endpoint: OpenAIEndpoint
    words: WordSource


class _Asked(NamedTuple):
    """The options of a command."""

    endpoint: BenchOptions
    load: LoadOptions
    slo: Slo
    args: argparse.Namespace

    def settings(self, *more: msgspec.Struct) -> dict[str, object]:
        """The settings that a report names."""
        parts = (self.endpoint, self.load, *more)
        shown = {name: value for part in parts for name, value in msgspec.structs.asdict(part).items()}
        return {**shown, "goodput": " ".join(self.args.goodput)}

    def resolved(self) -> _Asked:
        """The same with URL and model of the endpoint where they are defaults. Raises BatonError."""
        return self._replace(endpoint=_resolved(self.endpoint))


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code; raises BatonError."""
    args = create_parser().parse_args(argv)
    for option in ("json", "html"):
        if (path := getattr(args, option)) is not None:
            check_writable(path, option)
    allow_connections()
    return int(args.run(args))


def serve(args: argparse.Namespace) -> int:
    """Sends the load once."""
    asked = _asked(args).resolved()

    async def measure() -> Run:
        async with _reached(asked.endpoint, asked.load) as target:
            await _warm_up(target, asked.load)
            try:
                return await _measure(target, asked.load, "")
            except RunInterrupted as interruption:
                return interruption.run

    run = uvloop.run(measure())
    if not run.samples:
        sys.stderr.write("interrupted before a request had ended\n")
        return EXIT_INTERRUPTED
    figures = summarise(run, asked.slo)
    print(as_table(figures, asked.slo, asked.load))
    settings = asked.settings()
    _write(args, "json", lambda: _json({"settings": settings, **as_json(figures), "requests": requests_as_json(run)}))
    _write(args, "html", lambda: page.run_page(run, figures, asked.slo, asked.load, settings))
    if run.num_unfinished:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if figures.failed else 0


def sweep(args: argparse.Namespace) -> int:
    """Searches the highest rate."""
    search = build(SweepOptions, args)
    asked = _asked(args, exclude=_OWN_RATE)
    if not asked.slo:
        raise ConfigError("--goodput: required; the SLOs that the rate has to keep", param="goodput")
    if asked.load.dataset_name in ("file", "trace"):
        raise ConfigError("--dataset-name: sweep makes its requests itself; use serve for a file", param="dataset_name")
    asked = asked.resolved()
    found = uvloop.run(_search(asked, search))
    print(found.summary)
    settings = {name: value for name, value in asked.settings(search).items() if name not in _OWN_RATE}
    results = {
        "highest_rate": found.kept,
        "lowest_broken_rate": found.broken,
        "attainment_one_at_a_time": found.alone,
        "tries": [*map(Try._asdict, found.tries)],
    }
    _write(args, "json", lambda: _json({"settings": settings, **results}))
    _write(args, "html", lambda: page.sweep_page(found, search.attainment / 100, settings))
    return 0 if found.kept is not None else EXIT_FAILED


def compare(args: argparse.Namespace) -> int:
    """Runs both endpoints in turn."""
    other = build(CompareOptions, args)
    asked = _asked(args).resolved()
    endpoint_b = _resolved(msgspec.structs.replace(asked.endpoint, url=other.url_b, model=other.model_b))
    other = msgspec.structs.replace(other, model_b=endpoint_b.model)
    runs = uvloop.run(_in_turn(asked, endpoint_b, other.repeats))
    figures = {side: [_usable(run, asked.slo, side) for run in runs[side]] for side in "AB"}
    found = differences(figures["A"], figures["B"])
    print(_difference_table(found, 2 * other.repeats))
    failed = {side: sum(each.failed for each in figures[side]) for side in "AB"}
    if any(failed.values()):
        print(f"note: failed requests: A {failed['A']}, B {failed['B']}; they are in none of the figures")
    settings = asked.settings(other)
    _write(args, "json", lambda: _json(_comparison(found, figures, settings)))
    _write(args, "html", lambda: page.compare_page(found, runs["A"], runs["B"], settings))
    return EXIT_FAILED if any(failed.values()) else 0


async def _in_turn(asked: _Asked, endpoint_b: BenchOptions, repeats: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {"A": [], "B": []}
    turns = order(repeats)
    async with _reached(asked.endpoint, asked.load) as a, _reached(endpoint_b, asked.load) as b:
        b = b._replace(words=a.words)  # the same prompts
        for number, side in enumerate(turns):
            # Two runs in a row send the same prompts, one to each side; later ones send others, which no cache knows.
            load = msgspec.structs.replace(asked.load, seed=asked.load.seed + number // 2)
            target = a if side == "A" else b
            runs[side].append(await _run(target, load, f"run {number + 1} of {len(turns)}, {side}"))
    return runs


def _usable(run: Run, slo: Slo, side: str) -> Figures:
    figures = summarise(run, slo)
    if not figures.completed:
        kind, errors = next(iter(figures.errors.items()))
        raise BatonError(f"{side}: all requests of a run failed, {kind}: {errors.example}")
    return figures


def _comparison(
    found: Sequence[Difference], figures: dict[str, list[Figures]], settings: dict[str, object]
) -> dict[str, Any]:
    return {
        "settings": settings,
        "differences": [
            {**each._asdict(), "ratio": each.ratio, "is_significant": each.is_significant} for each in found
        ],
        "runs": {side: [as_json(each) for each in figures[side]] for side in figures},
    }


def _difference_table(found: Sequence[Difference], num_runs: int) -> str:
    lines = [f"{'median of ' + str(num_runs) + ' runs each':<34}{'A':>12}{'B':>12}{'B to A':>9}{'p':>8}"]
    for each in found:
        ratio = "-" if each.ratio is None else f"{each.ratio:+.1%}"
        lines.append(f"{each.name:<34}{each.a:>12.2f}{each.b:>12.2f}{ratio:>9}{each.p_value:>8.3f}  {each.verdict}")
    return "\n".join([*lines, "p: exact rank-sum test over runs, corrected for the number of figures (Holm)"])


async def _search(asked: _Asked, search: SweepOptions) -> Found:
    seeds = itertools.count(asked.load.seed)  # other prompts each time, which no cache knows
    needed = search.attainment / 100
    async with _reached(asked.endpoint, asked.load) as target:

        async def measure(rate: float) -> float:
            count = max(_LEAST_REQUESTS, round(rate * search.try_s))
            load = msgspec.structs.replace(asked.load, request_rate=str(rate), num_prompts=count, seed=next(seeds))
            run = await _run(target, load, f"{rate:.4g} requests/s")
            return summarise(run, asked.slo).attainment or 0.0

        async def measure_alone() -> float:
            load = msgspec.structs.replace(asked.load, num_prompts=_LEAST_REQUESTS, seed=next(seeds))
            share = await attainment_alone(_conversations(load, target), target.endpoint, asked.slo, attainment=needed)
            _print_share("one at a time", share, is_kept=share >= needed)
            return share

        return await highest_rate(
            measure,
            measure_alone,
            start=search.start_rate,
            attainment=needed,
            precision=search.precision,
            on_try=_print_try,
        )


def _print_try(each: Try) -> None:
    _print_share(f"{each.rate:.4g} requests/s", each.attainment, is_kept=each.is_kept)


def _print_share(load: str, share: float, *, is_kept: bool) -> None:
    verdict = "kept" if is_kept else "broken"
    print(f"{load:>21}  {share:>7.1%} of requests within the SLOs: {verdict}", flush=True)


def _resolved(options: BenchOptions) -> BenchOptions:
    options = msgspec.structs.replace(options, url=endpoint_url(options))
    return options if options.model is not None else uvloop.run(_with_first_model(options))


async def _with_first_model(options: BenchOptions) -> BenchOptions:
    client = open_endpoint(options)
    try:
        return msgspec.structs.replace(options, model=await first_model(client))
    finally:
        client.close()


@contextlib.asynccontextmanager
async def _reached(options: BenchOptions, load: LoadOptions) -> AsyncIterator[_Target]:
    """Yields an endpoint, whose model is named, once it has answered. Raises BatonError."""
    assert options.model is not None
    client = open_endpoint(options)
    try:
        endpoint = OpenAIEndpoint(
            client, options.api, options.model, timeout_s=options.timeout_s, extra_body=load.request_fields()
        )
        if options.tokenizer:
            words = words_of_tokenizer(Path(options.tokenizer))
            await check_endpoint(endpoint, words.prompt(words.words_for(16, "check")))
        else:
            words = await words_of_endpoint(endpoint)
        yield _Target(endpoint, words)
    finally:
        client.close()


async def _run(target: _Target, load: LoadOptions, title: str) -> Run:
    await _warm_up(target, load)
    return await _measure(target, load, title)


async def _warm_up(target: _Target, load: LoadOptions) -> None:
    if load.num_warmups:
        warmups = msgspec.structs.replace(load, num_prompts=load.num_warmups, seed=load.seed + 10**6)
        await run_load(_conversations(warmups, target), target.endpoint, max_concurrency=load.max_concurrency)


async def _measure(target: _Target, load: LoadOptions, title: str) -> Run:
    """Raises RunInterrupted if it is cancelled while requests are sent."""
    conversations = _conversations(load, target)
    with ProgressBar(sum(len(each.turns) for each in conversations), title=title) as bar:
        return await run_load(
            conversations,
            target.endpoint,
            max_concurrency=load.max_concurrency,
            on_end=lambda sample: bar.advance(has_failed=sample.failure is not None),
        )


def _conversations(load: LoadOptions, target: _Target) -> list[Conversation]:
    conversations = build_conversations(load, target.words)
    if not target.endpoint.takes_messages and any(turn.messages for each in conversations for turn in each.turns):
        raise ConfigError(f"--dataset-path: {load.dataset_path} has chats, which need --api chat", param="dataset_path")
    return conversations


def _asked(args: argparse.Namespace, *, exclude: frozenset[str] = frozenset()) -> _Asked:
    return _Asked(build(BenchOptions, args), build(LoadOptions, args, exclude=exclude), parse_slo(args.goodput), args)


def create_parser() -> ArgumentParser:
    """The parser of all three commands."""
    parser = ArgumentParser(
        prog="baton bench",
        description="Sends load to an OpenAI endpoint, Baton or another, and measures it as its clients see it.",
        epilog=epilog_of(
            examples=[example for examples in _EXAMPLES.values() for example in examples],
            exit_codes=_EXIT_CODES,
            more=ENVIRONMENT_HELP,
        ),
    )
    commands = parser.add_subparsers(metavar="{serve,sweep,compare}", required=True)
    for run, own, exclude in (
        (serve, None, frozenset[str]()),
        (sweep, SweepOptions, _OWN_RATE),
        (compare, CompareOptions, frozenset[str]()),
    ):
        _add_command(commands, run, own, exclude)
    return parser


def _add_command(
    commands: Any, run: Callable[[argparse.Namespace], int], own: type[msgspec.Struct] | None, exclude: frozenset[str]
) -> None:
    name = run.__name__
    subparser = commands.add_parser(
        name,
        help=_SUMMARIES[name],
        description=_SUMMARIES[name],
        usage="%(prog)s [options]",
        epilog=epilog_of(examples=_EXAMPLES[name], exit_codes=_EXIT_CODES, more=ENVIRONMENT_HELP),
    )
    for struct, left_out in ((own, frozenset[str]()), (BenchOptions, frozenset[str]()), (LoadOptions, exclude)):
        if struct is not None:
            add_arguments(subparser, struct, exclude=left_out)
    output = subparser.add_argument_group("Results")
    output.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="SLOs of a request in milliseconds: ttft, tpot, e2el, and itl for its longest gap: ttft:500 tpot:50.",
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="Write the results as JSON.")
    output.add_argument("--html", type=Path, metavar="FILE", help="Write a report with plots, one self-contained file.")
    subparser.set_defaults(run=run)


def _write(args: argparse.Namespace, option: str, text: Callable[[], str]) -> None:
    path: Path | None = getattr(args, option)
    if path is None:
        return
    with replacing(path, option) as file:
        file.write(text().encode())
    sys.stderr.write(f"{path} written\n")


def _json(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"
