"""The figures as lines for the terminal, a page of markdown and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.compare.limits import Limits
from benchmarks.compare.offline import Row
from benchmarks.compare.serving import ServingRow

PEERS = ("vllm", "transformers", "generate_batch", "invariant")
_TITLES = {
    "baton": "Baton",
    "vllm": "vLLM",
    "transformers": "transformers",
    "generate_batch": "generate_batch",
    "invariant": "batch-invariant",
    "baton_ngram": "Baton, n-gram",
    "vllm_ngram": "vLLM, n-gram",
}
_COLOURS = {
    "baton": "#2f6fde",
    "vllm": "#d9822b",
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


def format_row(row: Row) -> str:
    """One line."""
    peers = [name for name in PEERS if name in row.figures]
    others = "  ".join(f"{name} {median(row, name):.4g} (x{ahead(row, name):.2f})" for name in peers)
    same = "" if all(row.same_tokens.values()) else f"  tokens: {_tokens(row)}"
    return (
        f"{row.model:<6} {row.precision:<9} {row.measure:<30} {median(row, 'baton'):>9.4g} {row.unit:<9} {others}  "
        f"{100 * share_of_limit(row):.0f} % of the limit{same}"
    )


def format_serving(row: ServingRow) -> list[str]:
    """A line for each figure."""
    lines = []
    for figure, (title, unit, higher_is_better) in _SERVING.items():
        medians = {name: statistics.median(each[figure] for each in runs) for name, runs in row.figures.items()}
        ratio = medians["baton"] / medians["vllm"] if "vllm" in medians else float("nan")
        lines.append(
            f"| {row.model} | {row.precision} | {row.load} | {title} | {unit} | "
            + " | ".join(_spread([each[figure] for each in runs]) for runs in row.figures.values())
            + f" | {ratio if higher_is_better else 1 / ratio:.2f} |"
        )
    return lines


def format_speculation(row: Row) -> str:
    """One line of a table: figures of each side, and ratios of those of the same turn."""
    cells = [_spread(figures) for figures in row.figures.values()]
    for pair in _ratios(row):
        turns = zip(*(row.figures[name] for name in pair), strict=True)
        cells.append(_spread([above / below for above, below in turns]))
    cells.append(_tokens(row))
    return f"| {row.model} | {row.precision} | {row.measure} | {' | '.join(cells)} |"


def _ratios(row: Row) -> list[tuple[str, str]]:
    pairs = (("baton_ngram", "baton"), ("vllm_ngram", "vllm"), ("baton_ngram", "vllm_ngram"))
    return [pair for pair in pairs if row.figures.keys() >= set(pair)]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def _tokens(row: Row) -> str:
    """Names the sides whose tokens are not Baton's."""
    different = [
        _TITLES[name] + " (by design)" * (name == "vllm" and row.precision == "int8")
        for name, same in row.same_tokens.items()
        if not same
    ]
    return f"not {', '.join(different)}" if different else "yes"


def format_page(
    machine: Mapping[str, str],
    limits: Mapping[str, Limits],
    names: Sequence[str],
    rows: Sequence[Row],
    speculating: Sequence[Row],
    serving: Sequence[ServingRow],
    drawing: str,
) -> str:
    """The page. `drawing`: the file of the plot, beside it."""
    peers = [name for name in PEERS if name in names]
    lines = [
        "# Baton next to what users would run instead",
        "",
        "`python -m benchmarks.compare`; medians, ranges of the repeats in brackets. A ratio above 1: Baton is ahead.",
        "The limit is the shortest time in which the machine, as measured in the same run, could read or multiply what",
        "the work needs. With int8 weights vLLM rounds activations too, which Baton does not: tokens differ by design.",
        "The limit is that of Baton then, which reads all weights as int8 and multiplies in the type that is named.",
        "",
        f"![Each side's share of what the machine could do]({drawing})",
        "",
        *(f"- {key}: {value}" for key, value in machine.items()),
        *(
            f"- {precision}: reads {each.read_bytes_per_s / 1e9:.1f} GB/s, "
            f"multiplies {each.flops_per_s / 1e9:,.0f} GFLOP/s in {each.dtype}"
            for precision, each in limits.items()
        ),
        "",
        "| model | type | measure | unit | "
        + " | ".join(_TITLES[name] for name in names)
        + " | "
        + " | ".join(f"Baton / {_TITLES[name]}" for name in peers)
        + " | of the limit | same tokens |",
        "|---" * (6 + len(names) + len(peers)) + "|",
    ]
    lines += [
        f"| {row.model} | {row.precision} | {row.measure} | {row.unit} | "
        + " | ".join(_spread(row.figures[name]) if name in row.figures else "" for name in names)
        + " | "
        + " | ".join(f"{ahead(row, name):.2f}" if name in row.figures else "" for name in peers)
        + f" | {100 * share_of_limit(row):.0f} % | {_tokens(row)} |"
        for row in rows
    ]
    if speculating:
        columns = [_TITLES[name] for name in speculating[0].figures]
        columns += [f"{_TITLES[above]} / {_TITLES[below]}" for above, below in _ratios(speculating[0])]
        lines += ["", "## Speculation", "", f"| model | type | tokens/s | {' | '.join(columns)} | same tokens |"]
        lines.append("|---" * (4 + len(columns)) + "|")
        lines += map(format_speculation, speculating)
    if serving:
        sides = " | ".join(_TITLES[name] for name in serving[0].figures)
        lines += ["", "## Serving", "", f"| model | type | load | figure | unit | {sides} | Baton / vLLM |"]
        lines.append("|---" * (6 + len(serving[0].figures)) + "|")
        lines += [line for row in serving for line in format_serving(row)]
    return "\n".join(lines) + "\n"


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
