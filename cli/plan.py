"""`baton plan`: how many prefill and decode pods a load needs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cli import plan_ranks
from cli.environment import KEY_VARIABLE, api_key
from cli.exit_codes import EXIT_FAILED, EXIT_UNREACHABLE, OF_TOOLS
from cli.router_address import fetch_json
from common.config import ArgumentParser, epilog_of
from common.errors import ConfigError
from common.setting_values import show
from planning.learned import LEARNED_PATH, Learned, read_learned
from planning.plan import Plan, make_plan
from planning.profile import EngineProfile, load_profile
from planning.report import as_json, describe, svg
from planning.search import Planner, Slo
from planning.simulator.hardware import NO_DRAFTS, Drafts
from planning.values import write_values
from planning.workload import Workload, read_trace, synthetic

_DESCRIPTION = (
    "Says how many prefill and decode pods keep the SLOs of a load, why it takes so many, and how much more each step "
    "of scale holds. It simulates clusters of the engine that a profile describes, with the router's own policies, and "
    "takes each pod to have its cores or its GPU to itself."
)
_EXAMPLES = (
    "baton plan --profile qwen3.json --slo-ttft 500ms --slo-itl 50ms --rate 10 --isl 2000 --osl 200",
    "baton plan --url http://127.0.0.1:8000 --slo-ttft 2s --slo-itl 100 --trace conversation_trace.jsonl",
    "baton plan --profile qwen3.json --slo-ttft 500 --slo-itl 50 --rate 10 --isl 2000 --osl 200 --values plan.yaml",
    "baton plan ranks Qwen/Qwen3-0.6B --memory 1GiB",
)
_ENVIRONMENT = f"""\
environment:
  {KEY_VARIABLE}  operator's API key of the router of --url"""
_EXIT_CODES = OF_TOOLS | {
    EXIT_FAILED: "the router of --url refuses the API key, or fails",
    2: "a wrong option, profile or trace, or SLOs that no number of pods keeps",
    EXIT_UNREACHABLE: "no router answers at --url",
}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>ms|s)?")
_LEAST_REQUESTS, _MOST_REQUESTS = 500, 3000
_STAYS = 4  # length of a simulation, as a multiple of how long a request stays


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Returns the exit code; raises BatonError."""
    if argv[:1] == ["ranks"]:
        return plan_ranks.main(argv[1:])
    args = _parser().parse_args(argv)
    slo = Slo(_seconds(args.slo_ttft, "--slo-ttft"), _seconds(args.slo_itl, "--slo-itl"), args.percentile)
    workload = _workload(args, slo)
    profile, drafts = _engine(args)
    if args.tokens_per_step is None:
        workload = workload._replace(drafts=drafts)
    plan = make_plan(Planner(profile, workload, slo, on_try=_progress()), colocated=args.colocated)
    sys.stderr.write("\r\033[K" if sys.stderr.isatty() else "")
    if args.json:
        print(json.dumps(as_json(plan, profile, workload), indent=2))
    else:
        print(describe(plan, profile, workload))
    _write_files(args, plan, profile)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="baton plan",
        description=_DESCRIPTION,
        epilog=epilog_of(examples=_EXAMPLES, exit_codes=_EXIT_CODES, more=_ENVIRONMENT),
        usage="%(prog)s (--profile FILE | --url URL) --slo-ttft TIME --slo-itl TIME [options]",
    )
    engine = parser.add_argument_group("Engine")
    source = engine.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, metavar="FILE", help="Profile that `baton profile-engine` wrote.")
    source.add_argument("--url", metavar="URL", help="Router whose pods' step times to take, once it has learned them.")
    engine.add_argument("--model", metavar="NAME", help="Model of the router of --url. (default: its first)")
    engine.add_argument("--tls-ca", default="", metavar="FILE", help="PEM file of the authority of an https:// router.")
    targets = parser.add_argument_group("SLOs")
    targets.add_argument(
        "--slo-ttft", required=True, metavar="TIME", help="Longest time to the first token: 300ms, 0.5s; 300 is ms."
    )
    targets.add_argument(
        "--slo-itl", required=True, metavar="TIME", help="Longest gap between two tokens of a stream: 50ms; 50 is ms."
    )
    targets.add_argument(
        "--percentile",
        type=_number("--percentile", float, above=0.0, below=100.0),
        default=99.0,
        metavar="P",
        help="Share of first tokens, and of gaps, that must keep them, in percent. (default: %(default)g)",
    )
    load = parser.add_argument_group("Load")
    load.add_argument(
        "--rate", type=_number("--rate", float, above=0.0), metavar="R", help="Requests per second, Poisson arrivals."
    )
    load.add_argument("--isl", type=_number("--isl", int, above=0), metavar="TOKENS", help="Tokens of a prompt.")
    load.add_argument("--osl", type=_number("--osl", int, above=0), metavar="TOKENS", help="Tokens of an answer.")
    load.add_argument(
        "--spread",
        type=_number("--spread", float, above=-1e-9, below=3.0),
        default=0.0,
        metavar="SIGMA",
        help="Lengths are log-normal around --isl and --osl, with this sigma. (default: 0, all the same)",
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Recorded requests instead of --isl and --osl, as JSON lines with timestamp (ms), input_length, "
        "output_length and hash_ids (blocks of 512 tokens). --rate stretches its times.",
    )
    load.add_argument(
        "--tokens-per-step",
        type=_number("--tokens-per-step", float, above=0.99, below=33.0),
        metavar="N",
        help="Tokens that a request gets from each decode step, by drafts that pods verify; `baton bench` prints it. "
        "(default: 1, no drafts; with --url what the drafts of its pods have come to)",
    )
    load.add_argument(
        "--draft-acceptance",
        type=_number("--draft-acceptance", float, above=0.0, below=100.1),
        metavar="P",
        help="Percent of drafts that are right; the others cost time, too. Needs --tokens-per-step. (default: 100)",
    )
    load.add_argument(
        "--requests",
        type=_number("--requests", int, above=9),
        metavar="N",
        help=f"Requests to simulate. (default: {_LEAST_REQUESTS} to {_MOST_REQUESTS}, by rate)",
    )
    load.add_argument("--seed", type=int, default=1, help="Of arrivals and lengths. (default: %(default)s)")
    output = parser.add_argument_group("Plan")
    output.add_argument("--colocated", action="store_true", help="Plan pods that both prefill and decode.")
    output.add_argument("--json", action="store_true", help="As JSON.")
    output.add_argument("--values", type=Path, metavar="FILE", help="Write values for the Helm chart.")
    output.add_argument("--plot", type=Path, metavar="FILE", help="Write the plot as SVG.")
    return parser


def _workload(args: argparse.Namespace, slo: Slo) -> Workload:
    if args.draft_acceptance is not None and args.tokens_per_step is None:
        raise ConfigError("--draft-acceptance: only with --tokens-per-step", param="draft_acceptance")
    drafts = Drafts(args.tokens_per_step or 1.0, (args.draft_acceptance or 100.0) / 100)
    return _requests(args, slo)._replace(drafts=drafts)


def _requests(args: argparse.Namespace, slo: Slo) -> Workload:
    if args.trace is not None:
        for name in ("isl", "osl"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: not with --trace, which has the lengths", param=name)
        return read_trace(args.trace, args.rate, args.requests or _MOST_REQUESTS)
    for name in ("rate", "isl", "osl"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name}: required without --trace", param=name)
    stay_s = slo.ttft_s + args.osl * slo.itl_s
    usual = round(min(max(_STAYS * stay_s * args.rate, _LEAST_REQUESTS), _MOST_REQUESTS))
    return synthetic(args.rate, args.isl, args.osl, args.requests or usual, spread=args.spread, seed=args.seed)


def _engine(args: argparse.Namespace) -> Learned:
    if args.profile is not None:
        for name in ("model", "tls_ca"):
            if getattr(args, name):
                raise ConfigError(f"--{name.replace('_', '-')}: only with --url", param=name)
        return Learned(load_profile(args.profile), NO_DRAFTS)
    answer = fetch_json(args.url, LEARNED_PATH, args.tls_ca, api_key())
    return read_learned(answer, args.model)


def _write_files(args: argparse.Namespace, plan: Plan, profile: EngineProfile) -> None:
    for option, path, text in (
        ("values", args.values, write_values(plan, profile)),
        ("plot", args.plot, svg(plan)),
    ):
        if path is None:
            continue
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--{option}: cannot write {path}: {error.strerror}", param=option) from error
        sys.stderr.write(f"{path} written\n")


def _progress() -> Callable[[int], None]:
    """Counts simulations on a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show_count(number: int) -> None:
        sys.stderr.write(f"\r{number} simulations")
        sys.stderr.flush()

    return show_count


def _seconds(text: str, option: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found["number"]) / (1 if found["unit"] == "s" else 1e3) if found else 0.0
    if not 0 < seconds <= 3600:
        raise ConfigError(f"{option}: must be a time up to an hour such as 300ms or 0.5s, got {show(text)}")
    return seconds


def _number(option: str, kind: type, *, above: float, below: float = 1e9) -> Callable[[str], float]:
    """A type for argparse. Raises ConfigError outside of the bounds."""

    def parse(text: str) -> float:
        words = "an integer" if kind is int else "a number"
        try:
            number = kind(text)
        except ValueError:
            raise ConfigError(f"{option}: must be {words}, got {show(text)}") from None
        if not above < number < below:
            raise ConfigError(f"{option}: must be above {max(above, 0):g} and below {below:g}, got {text}")
        return float(number) if kind is float else number

    return parse
