"""The figures as a page of markdown and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from benchmarks.compare.limits import Limits
from benchmarks.compare.offline import Row
from benchmarks.compare.serving import ServingRow
from benchmarks.harness.report import Page, spread
from benchmarks.harness.report import row as table_row

PEERS = ("vllm", "openvino", "llamacpp", "transformers", "generate_batch", "invariant")
_WORDS = """\
`python -m benchmarks.compare`; medians, ranges of the repeats in brackets. A ratio above 1: Baton is ahead.
The limit is the shortest time in which the machine, as measured in the same run, could read or multiply what
the work needs. With int8 weights vLLM rounds activations too, which Baton does not, and OpenVINO rounds weights in its
own way: tokens differ by design.
The limit is that of Baton then, which reads all weights as int8 and multiplies in the type that is named.

![Each side's share of what the machine could do]({drawing})"""
_TITLES = {
    "baton": "Baton",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "transformers": "transformers",
    "generate_batch": "generate_batch",
    "invariant": "batch-invariant",
    "baton_ngram": "Baton, n-gram",
    "vllm_ngram": "vLLM, n-gram",
}
_COLOURS = {
    "baton": "#2f6fde",
    "vllm": "#d9822b",
    "openvino": "#3f9f6f",
    "llamacpp": "#b0507a",
    "transformers": "#7a8594",
    "generate_batch": "#b3bac2",
    "invariant": "#8fb3f0",
}
_SERVING = {
    "output_throughput": ("throughput", "tokens/s", True),
    "median_ttft_ms": ("TTFT p50", "ms", False),
    "median_itl_ms": ("ITL p50", "ms", False),
    "p99_itl_ms": ("ITL p99", "ms", False),
}


def median(row: Row, name: str) -> float:
    """Returns the median of a side's repeats."""
    return statistics.median(row.figures[name])


def ahead(row: Row, peer: str) -> float:
    """How many times as good Baton is."""
    ratio = median(row, "baton") / median(row, peer)
    return ratio if row.higher_is_better else 1 / ratio


def share_of_limit(row: Row) -> float:
    """How close Baton comes to what the machine could do."""
    share = median(row, "baton") / row.limit
    return share if row.higher_is_better else 1 / share


def offline_columns(names: Sequence[str]) -> str:
    """Returns the columns of the table of batches."""
    sides = [_TITLES[name] for name in names]
    ratios = [f"Baton / {_TITLES[name]}" for name in PEERS if name in names]
    return " | ".join(["model", "type", "measure", "unit", *sides, *ratios, "of the limit", "same tokens"])


def offline_row(row: Row, names: Sequence[str]) -> str:
    """Returns a line of the table of batches."""
    figures = [spread(row.figures[name]) if name in row.figures else "" for name in names]
    ratios = [f"{ahead(row, name):.2f}" if name in row.figures else "" for name in PEERS if name in names]
    share = f"{100 * share_of_limit(row):.0f} %"
    return table_row(row.model, row.precision, row.measure, row.unit, *figures, *ratios, share, _tokens(row))


def serving_columns(names: Sequence[str]) -> str:
    """Returns the columns of the table of servers."""
    return " | ".join(["model | type | load | figure | unit", *(_TITLES[name] for name in names), "Baton / vLLM"])


def serving_rows(row: ServingRow) -> Iterator[str]:
    """Yields a line of the table of servers for each figure."""
    for figure, (title, unit, higher_is_better) in _SERVING.items():
        found = {name: [each[figure] for each in runs] for name, runs in row.figures.items()}
        medians = {name: statistics.median(values) for name, values in found.items()}
        ratio = medians["baton"] / medians["vllm"] if "vllm" in medians else float("nan")
        better = f"{ratio if higher_is_better else 1 / ratio:.2f}"
        yield table_row(row.model, row.precision, row.load, title, unit, *map(spread, found.values()), better)


def speculation_columns(names: Sequence[str]) -> str:
    """Returns the columns of the table of speculation."""
    ratios = [f"{_TITLES[above]} / {_TITLES[below]}" for above, below in _pairs(names)]
    return " | ".join(["model", "type", "tokens/s", *(_TITLES[name] for name in names), *ratios, "same tokens"])


def speculation_row(row: Row) -> str:
    """Returns a line of the table of speculation: figures of each side, and ratios of those of the same turn."""
    ratios = []
    for pair in _pairs(row.figures):
        turns = zip(*(row.figures[name] for name in pair), strict=True)
        ratios.append(spread([above / below for above, below in turns]))
    return table_row(row.model, row.precision, row.measure, *map(spread, row.figures.values()), *ratios, _tokens(row))


def _pairs(names: Collection[str]) -> list[tuple[str, str]]:
    pairs = (("baton_ngram", "baton"), ("vllm_ngram", "vllm"), ("baton_ngram", "vllm_ngram"))
    return [(above, below) for above, below in pairs if above in names and below in names]


def _tokens(row: Row) -> str:
    """Names the sides whose tokens are not Baton's."""
    different = [
        _TITLES[name]
        + " (by design)" * (name in ("vllm", "openvino", "llamacpp") and row.precision not in ("float32", "bfloat16"))
        for name, same in row.same_tokens.items()
        if not same
    ]
    return f"not {', '.join(different)}" if different else "yes"


def open_page(machine: Mapping[str, str], limits: Mapping[str, Limits], drawing: str) -> Page:
    """Returns a page without results. `drawing`: the file of the plot, beside it."""
    facts = {
        name: f"reads {each.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {each.flops_per_s / 1e9:,.0f} GFLOP/s in {each.dtype}"
        for name, each in limits.items()
    }
    return Page("Baton next to what users would run instead", _WORDS.format(drawing=drawing), {**machine, **facts})


def plot(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Bars: each side's figure as a share of the limit."""
    bar, gap, left, width = 12, 14, 330, 900
    height = 60 + sum(len(row.figures) * bar + gap for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<g font-size="12"><text x="10" y="20">Share of what the machine could do at most</text>',
    ]
    for number, name in enumerate(names):
        x = left + number * 130
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="38">{_TITLES[name]}</text>')
    y = 56.0
    for row in rows:
        parts.append(
            f'<text x="10" y="{y + bar * len(row.figures) / 2 + 4}">{row.model} {row.precision}, {row.measure}</text>'
        )
        for name in row.figures:
            share = median(row, name) / row.limit
            share = share if row.higher_is_better else 1 / share
            length = min(1.0, share) * (width - left - 60)
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar - 2}" fill="{_COLOURS[name]}"/>')
            parts.append(
                f'<text x="{left + length + 4:.1f}" y="{y + bar - 3}" font-size="10">{100 * share:.0f} %</text>'
            )
            y += bar
        y += gap
    return "\n".join([*parts, "</g></svg>"]) + "\n"
