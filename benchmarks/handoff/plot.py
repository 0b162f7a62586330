"""The median gap of handoffs against the step time of the prefill pod, as SVG. Both axes are logarithmic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.handoff.measure import Results
from benchmarks.harness.checkouts import BEFORE

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 20, 50
_COLOURS = ("#1b6ca8", "#c2571a", "#3d8b37", "#7a4fa3")
_LEAST_MS = 0.1  # gaps below are drawn there: a logarithm has no zero
_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">
<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>"""


class _Axis(NamedTuple):
    """Maps values to pixels."""

    least: float
    most: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = math.log(value / self.least) / math.log(self.most / self.least)
        return self.start + share * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten."""
        decades = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        ticks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
        return [tick for tick in ticks if self.least <= tick <= self.most]


class _Series(NamedTuple):
    name: str
    colour: str
    is_before: bool
    points: Sequence[tuple[float, float]]  # seconds of the step, milliseconds of the gap


def draw(results: Results) -> str | None:
    """None if no handoffs were measured."""
    series = list(_series(results))
    if not series:
        return None
    steps = [step_s for each in series for step_s, _ in each.points]
    gaps = [gap_ms for each in series for _, gap_ms in each.points]
    across = _Axis(min(steps) / 1.2, max(steps) * 1.2, _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(gaps) / 1.5, max(gaps) * 1.5, _HEIGHT - _BOTTOM, _TOP)
    parts = [_HEAD, *_frame(across, up)]
    for place, each in enumerate(series):
        parts += _line(each, across, up, legend_y=_TOP + 10 + 20 * place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(results: Results) -> Iterator[_Series]:
    connectors = dict.fromkeys(cell.connector for taken in results.taken.values() for cell in taken.handoffs)
    for colour, connector in zip(_COLOURS, connectors, strict=False):
        for name, taken in results.taken.items():
            cells = [each for cell, each in taken.handoffs.items() if cell.connector == connector]
            points = sorted((each.step_s, max(statistics.median(each.gaps) * 1e3, _LEAST_MS)) for each in cells)
            if points:
                yield _Series(f"{connector}, {name}", colour, name == BEFORE, points)


def _frame(across: _Axis, up: _Axis) -> Iterator[str]:
    for tick in across.ticks:
        x = across.at(tick)
        yield f'<line x1="{x:.1f}" y1="{up.start}" x2="{x:.1f}" y2="{up.stop}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{up.start + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in up.ticks:
        y = up.at(tick)
        yield f'<line x1="{across.start}" y1="{y:.1f}" x2="{across.stop}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{across.start - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    middle_x, middle_y = (across.start + across.stop) / 2, (up.start + up.stop) / 2
    yield f'<text x="{middle_x}" y="{_HEIGHT - 10}" text-anchor="middle">step of the prefill pod, s</text>'
    yield (
        f'<text transform="translate(18 {middle_y}) rotate(-90)" text-anchor="middle">'
        "first to second token less a decode step, p50, ms</text>"
    )


def _line(series: _Series, across: _Axis, up: _Axis, *, legend_y: float) -> Iterator[str]:
    style = f'stroke="{series.colour}"' + (' stroke-dasharray="5 4"' if series.is_before else "")
    pixels = [(across.at(step_s), up.at(gap_ms)) for step_s, gap_ms in series.points]
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)}" fill="none" stroke-width="2" {style}/>'
    for x, y in pixels:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"/>'
    left = _WIDTH - _RIGHT + 12
    yield f'<line x1="{left}" y1="{legend_y}" x2="{left + 24}" y2="{legend_y}" stroke-width="2" {style}/>'
    yield f'<text x="{left + 30}" y="{legend_y + 4}">{series.name}</text>'
