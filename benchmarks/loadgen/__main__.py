"""Measures the cost of `baton bench serve`, and compares its figures with those of `vllm bench serve`.

    python -m benchmarks.loadgen [--vllm-bench "vllm bench serve"] [--markdown FILE]

Ceiling: streams of a server whose tokens cost almost nothing; tokens and requests per second of the load generator's
processor time, which is what one core can do. As fast as they go, tokens come many to a read, as they do where an
endpoint is far faster than its clients; paced, each comes in a read of its own. Agreement: both load generators in turn
on a server that keeps to a timetable (see benchmarks.loadgen.server), with the same load; medians over the repeats.
`make clients` installs vLLM's.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import make_parser
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, describe_torch_machine, row, table, verdict_word
from benchmarks.loadgen.server import MODEL, timetable
from common.demo_model import demo_model_path
from loadgen.figures import distribution

_CEILINGS = (  # API, streams at once, tokens of each, whether they are paced
    ("completions", 1, 2000, False),
    ("completions", 64, 2000, False),
    ("chat", 64, 2000, False),
    ("completions", 512, 400, False),
    ("completions", 64, 400, True),
    ("chat", 64, 400, True),
)
_ANSWERS = (64, 1, 4000)  # streams at once, tokens, requests
_REQUESTS = 200  # that both load generators send
_TOLERATED = 0.03
_FIGURES = (
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "itl") for statistic in ("mean", "median", "p99")),
    "request_throughput",
    "output_throughput",
)


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.loadgen", __doc__, repeats=5)
    parser.add_argument("--vllm-bench", metavar="COMMAND", help="command of `vllm bench serve`")
    args = parser.parse_args()
    words = f"`python -m benchmarks.loadgen`, whose help says what is measured. Medians of {args.repeats} repeats."
    page = Page("What the load generator costs", words, describe_torch_machine())
    for lines in (_ceilings(args.repeats), _agreement(args.vllm_bench, args.repeats) if args.vllm_bench else ()):
        for line in lines:
            page.add(line)
    page.write(args.markdown)
    return 0


def _ceilings(repeats: int) -> Iterator[str]:
    yield from ("", "## Ceiling of one core", "")
    yield from table("load | per second of processor time | per second, beside the server")
    for api, concurrency, tokens, paced in _CEILINGS:
        runs = [_ours(api, concurrency, tokens, 2 * concurrency, paced=paced) for _ in range(repeats)]
        load = f"{concurrency} stream{'s' * (concurrency > 1)} of {tokens:,} tokens, {api}{', paced' * paced}"
        yield _row(load, "tokens", [run["total_output_tokens"] for run in runs], runs)
    concurrency, tokens, requests = _ANSWERS
    runs = [_ours("completions", concurrency, tokens, requests, paced=False) for _ in range(repeats)]
    yield _row(f"answers of one token, {concurrency} at once", "requests", [run["completed"] for run in runs], runs)


def _row(load: str, unit: str, counts: Sequence[int], runs: Sequence[dict[str, Any]]) -> str:
    pairs = list(zip(counts, runs, strict=True))
    per_cpu = statistics.median(count / (run["load_generator_cpu_share"] * run["duration"]) for count, run in pairs)
    per_wall = statistics.median(count / run["duration"] for count, run in pairs)
    return row(load, f"{per_cpu:,.0f} {unit}", f"{per_wall:,.0f} {unit}")


def _agreement(command: str, repeats: int) -> Iterator[str]:
    loads = (
        (f"{_REQUESTS} requests at 20/s", ["--request-rate", "20"]),
        (f"{_REQUESTS} requests, 16 at once", ["--max-concurrency", "16"]),
    )
    for title, arrivals in loads:
        pairs = [
            (
                _ours("completions", None, 64, _REQUESTS, paced=True, more=arrivals),
                _theirs(command, 64, _REQUESTS, arrivals),
            )
            for _ in range(repeats)
        ]
        yield from ("", f"## Agreement with `vllm bench serve`: {title}", "")
        yield from table("figure | timetable | baton bench serve | vllm bench serve | ratio | ")
        planned = _planned()
        for name in _FIGURES:
            ours, theirs = (statistics.median(float(pair[side][name]) for pair in pairs) for side in (0, 1))
            truth = f"{planned[name]:,.2f}" if name in planned else ""
            verdict = verdict_word(abs(ours / theirs - 1) <= _TOLERATED)
            yield row(name, truth, f"{ours:,.2f}", f"{theirs:,.2f}", f"{ours / theirs:.4f}", verdict)


def _planned() -> dict[str, float]:
    """Returns the figures that clients would see of the server if nothing took time but its timetable."""
    pairs = [timetable(number) for number in range(_REQUESTS)]
    columns = {"ttft": [ttft_s for ttft_s, _ in pairs], "tpot": [gap_s for _, gap_s in pairs]}
    columns["itl"] = columns["tpot"]  # as many gaps of each request
    return {
        f"{statistic}_{name}_ms": value
        for name, seconds in columns.items()
        for statistic, value in distribution([1e3 * each for each in seconds])._asdict().items()
    }


def _ours(
    api: str, concurrency: int | None, tokens: int, requests: int, *, paced: bool, more: Sequence[str] = ()
) -> dict[str, Any]:
    limit = [] if concurrency is None else ["--max-concurrency", str(concurrency)]
    with _server(paced=paced) as url, tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        _run(
            sys.executable, "-m", "cli.main", "bench", "serve", "--url", url, "--api", api, *limit, *more,
            "--tokenizer", str(demo_model_path()), "--input-len", "64", "--output-len", str(tokens),
            "--num-prompts", str(requests), "--json", str(results),
        )  # fmt: skip
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def _theirs(command: str, tokens: int, requests: int, more: Sequence[str]) -> dict[str, Any]:
    with _server(paced=True) as url, tempfile.TemporaryDirectory() as scratch:
        _run(
            *shlex.split(command), "--backend", "openai", "--base-url", url, "--model", MODEL, *more,
            "--tokenizer", str(demo_model_path()), "--dataset-name", "random", "--random-input-len", "64",
            "--random-output-len", str(tokens), "--num-prompts", str(requests), "--disable-tqdm",
            "--save-result", "--result-dir", scratch, "--result-filename", "results.json",
        )  # fmt: skip
        found: dict[str, Any] = json.loads((Path(scratch) / "results.json").read_text())
        return found


@contextlib.contextmanager
def _server(*, paced: bool) -> Iterator[str]:
    """A server in a process of its own; its URL."""
    with Child("-m", "benchmarks.loadgen.server", *(["--paced"] if paced else [])) as child:
        yield f"http://127.0.0.1:{child.read_line()}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
