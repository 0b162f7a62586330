"""Reports as one HTML file each, which loads nothing: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from common import __version__
from loadgen.charts import Chart, Series, shares, svg
from loadgen.compare import ALPHA, Difference
from loadgen.figures import Distribution, Figures, concurrency, latencies_ms, tokens_per_second
from loadgen.load import Run
from loadgen.slo import Slo
from loadgen.sweep import Found
from loadgen.table import LATENCIES, remarks, rows
from loadgen.workload import LoadOptions

Settings = Mapping[str, object]  # by name, as the report shows them

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --soft: #5b6675; --rule: #dde2e8;
  --c0: #2a6fb0; --c1: #c2571a; --c2: #2b8a57; --c3: #8a4fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --paper: #14181e; --soft: #9aa5b4; --rule: #2c343f;
  --c0: #6fb1ee; --c1: #f0995f; --c2: #6cc997; --c3: #c79ae6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; margin: .5rem 0; } caption { text-align: left; color: var(--soft); }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .9rem .25rem 0; text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; } th:first-child, td:first-child { text-align: left; font-weight: normal; }
td.words { text-align: left; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 14px; fill: var(--ink); } .grid { stroke: var(--rule); }
.line { fill: none; stroke-width: 1.8; } .dot { fill-opacity: .55; }
""" + "".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .dot.c{n}, .key.c{n} {{ fill: var(--c{n}); }}\n" for n in range(4)
)
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def run_page(run: Run, figures: Figures, slo: Slo, options: LoadOptions, settings: Settings) -> str:
    """Returns the report of `baton bench serve`."""
    return _page(
        "Load on an endpoint",
        [
            _table("Results", ("", "value"), rows(figures, slo, options)),
            _latency_table(figures),
            _remarks(figures),
            _charts(run_charts(run)),
            _settings(settings),
        ],
    )


def sweep_page(found: Found, needed: float, settings: Settings) -> str:
    """Returns the report of `baton bench sweep`."""
    tries = sorted(found.tries)
    chart = Chart(
        "Requests within the SLOs, by rate",
        "requests/s",
        "%",
        [
            Series("measured", [(each.rate, 100 * each.attainment) for each in tries]),
            Series("needed", [(each.rate, 100 * needed) for each in tries]),
        ],
    )
    lines = [
        (f"{each.rate:.4g}", f"{100 * each.attainment:.1f}", "kept" if each.is_kept else "broken") for each in tries
    ]
    return _page(
        "Highest rate within the SLOs",
        [
            f"<p>{escape(found.summary)}</p>",
            _table("Rates tried", ("requests/s", "within the SLOs (%)", "SLOs"), lines),
            _charts([chart]),
            _settings(settings),
        ],
    )


def compare_page(found: Sequence[Difference], runs_a: Sequence[Run], runs_b: Sequence[Run], settings: Settings) -> str:
    """Returns the report of `baton bench compare`."""
    lines = [
        (each.name, f"{each.a:.2f}", f"{each.b:.2f}", _change(each.ratio), f"{each.p_value:.3f}", each.verdict)
        for each in found
    ]
    titles = ("", "A", "B", "B to A", "p", f"at {ALPHA:.0%}")
    all_a, all_b = _all_latencies(runs_a), _all_latencies(runs_b)
    charts = [
        Chart(f"{title}, all runs", "ms", "% of them", [shares("A", all_a[name]), shares("B", all_b[name])])
        for name, (_, title) in LATENCIES.items()
    ]
    return _page(
        "Two endpoints compared",
        [
            _table(f"Medians over {len(runs_a)} runs of each, in the order ABBA", titles, lines),
            '<p class="soft">Exact rank-sum test over runs; p-values are corrected for their number (Holm).</p>',
            _charts(charts),
            _settings(settings),
        ],
    )


def run_charts(run: Run) -> list[Chart]:
    """Returns the plots of one run."""
    good = [sample for sample in run.samples if sample.failure is None]
    values = latencies_ms(good)
    ttfts = [(sample.sent_s - run.started_s, 1e3 * sample.ttft_s) for sample in good]
    tokens = [(second + 0.5, number) for second, number in enumerate(tokens_per_second(run).tolist())]
    under_way = [(when_s - run.started_s, float(number)) for when_s, number in concurrency(good)]
    return [
        *(Chart(title, "ms", "% of them", [shares(short, values[name])]) for name, (short, title) in LATENCIES.items()),
        Chart("Time to First Token, by time of sending", "s", "ms", [Series("TTFT", ttfts, is_line=False)]),
        Chart("Output tokens per second", "s", "tokens/s", [Series("tokens", tokens)]),
        Chart("Requests under way", "s", "requests", [Series("requests", under_way)]),
    ]


def _change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:+.1%}"


def _all_latencies(runs: Iterable[Run]) -> dict[str, list[float]]:
    return latencies_ms(sample for run in runs for sample in run.samples if sample.failure is None)


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f"{_HEAD}<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>{escape(title)}</h1><p class="soft">baton bench {escape(__version__)}</p>\n{body}\n</body></html>\n'
    )


def _table(caption: str, titles: Sequence[str], lines: Iterable[Sequence[str]], words: int = -1) -> str:
    """`words`: the column of text, if there is one."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    cells = (
        "".join(
            f"<td{' class=words' if column == words else ''}>{escape(cell)}</td>" for column, cell in enumerate(line)
        )
        for line in lines
    )
    body = "".join(f"<tr>{each}</tr>\n" for each in cells)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>\n{body}</table>"


def _latency_table(figures: Figures) -> str:
    lines = [(f"{title} ({short})", *_cells(figures.latencies[name])) for name, (short, title) in LATENCIES.items()]
    if figures.send_delay is not None:
        lines.append(("Sent after the scheduled time", *_cells(figures.send_delay)))
    return _table("Latencies (ms)", ("", "mean", "median", "std", "p90", "p99"), lines)


def _cells(values: Distribution) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _remarks(figures: Figures) -> str:
    lines = [(kind, str(errors.num_requests)) for kind, errors in figures.errors.items()]
    errors = _table("Errors", ("kind", "requests"), lines) if lines else ""
    return errors + "".join(f"<p>{escape(remark)}</p>" for remark in remarks(figures))


def _charts(charts: Iterable[Chart]) -> str:
    return '<div class="charts">' + "\n".join(svg(chart) for chart in charts) + "</div>"


def _settings(settings: Settings) -> str:
    lines = [(name, "" if value is None else str(value)) for name, value in settings.items()]
    return "<h2>Settings</h2>" + _table("", ("option", "value"), lines, words=1)
