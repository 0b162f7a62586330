"""The cluster as plain text, for scripts and where there is no terminal."""

from __future__ import annotations

import asyncio

from cli.top.columns import POD_COLUMNS
from cli.top.figures import ClusterFigures, figures_of, handoff_lines, rank_lines
from cli.top.router_api import RouterApi
from cli.top.words import plain


async def take_snapshot(api: RouterApi, interval_s: float) -> str:
    """Returns the cluster as text. Rates are those of an interval, which this takes. Raises BatonError."""
    before = await api.cluster()
    await asyncio.sleep(interval_s)
    return describe(figures_of(await api.cluster(), before), api.url)


def describe(figures: ClusterFigures, url: str) -> str:
    """Returns totals, pods and handoffs."""
    header = [column.title for column in POD_COLUMNS]
    rows = [header, *([column.text(pod) for column in POD_COLUMNS] for pod in figures.pods)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    table = [_line(cells, widths) for cells in rows] if figures.pods else ["No pods."]
    ranks = [f"{plain(each.pod.name)} {line}" for each in figures.pods for line in rank_lines(each.pod)]
    if ranks:
        ranks = ["", "RANKS (time of their steps since their start)", *ranks]
    handoffs = handoff_lines(figures.view)
    if handoffs:
        handoffs = ["", "HANDOFFS (ended: in the last 10 s)", *handoffs]
    return "\n".join([url, *figures.summary, "", *table, *ranks, *handoffs])


def _line(cells: list[str], widths: list[int]) -> str:
    padded = [
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for column, cell, width in zip(POD_COLUMNS, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()
