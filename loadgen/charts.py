"""Plots as SVG, drawn with the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 46
_MIDDLE = (_LEFT + _WIDTH - _RIGHT) / 2
_MOST_POINTS = 600  # of a series
_TICKS = 6
_COLOURS = 4

Point = tuple[float, float]


class Series(NamedTuple):
    """Points of one colour."""

    name: str
    points: Sequence[Point]
    is_line: bool = True  # False: dots


class Chart(NamedTuple):
    """The content of a plot."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def svg(chart: Chart) -> str:
    """Returns the drawing."""
    points = [point for series in chart.series for point in series.points]
    x_axis = _Axis.over([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis.over([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f'<text class="title" x="{_LEFT}" y="18">{escape(chart.title)}</text>',
        *_grid(x_axis, y_axis),
        f'<text x="{_MIDDLE}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text x="{_LEFT - 56}" y="{_TOP - 8}">{escape(chart.y_label)}</text>',
    ]
    for number, series in enumerate(chart.series):
        parts += _drawn(series, number % _COLOURS, x_axis, y_axis)
    if len(chart.series) > 1:
        parts += _legend(chart.series)
    return "\n".join([*parts, "</svg>"])


class _Axis(NamedTuple):
    """Values on a line of pixels, from 0 on."""

    most: float
    step: float  # between ticks
    start: float  # pixels
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        """An axis that has all values."""
        most = max((value for value in values if math.isfinite(value)), default=0.0)
        most = most if most > 0 else 1.0
        rough = most / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return cls(math.ceil(most / step - 1e-9) * step, step, start, end)

    def pixel(self, value: float) -> float:
        """Returns the pixel of a value."""
        return self.start + (self.end - self.start) * value / self.most

    def ticks(self) -> Iterator[float]:
        """Values with a label."""
        for number in range(round(self.most / self.step) + 1):
            yield number * self.step


def _grid(x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    for value in x_axis.ticks():
        x = x_axis.pixel(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y_axis.start}" y2="{y_axis.end}"/>'
        yield f'<text x="{x:.1f}" y="{y_axis.start + 16}" text-anchor="middle">{value:,.6g}</text>'
    for value in y_axis.ticks():
        y = y_axis.pixel(value)
        yield f'<line class="grid" x1="{x_axis.start}" x2="{x_axis.end}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{x_axis.start - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>'


def _drawn(series: Series, colour: int, x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    pixels = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in _thinned(series.points)]
    if series.is_line:
        yield f'<polyline class="line c{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)}"/>'
    else:
        yield from (f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in pixels)


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = float(_WIDTH - _RIGHT)
    for number, each in reversed(list(enumerate(series))):
        x -= 7.5 * len(each.name)
        yield f'<text x="{x:.1f}" y="18">{escape(each.name)}</text>'
        yield f'<rect class="key c{number % _COLOURS}" x="{x - 15:.1f}" y="8" width="10" height="10"/>'
        x -= 28


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= _MOST_POINTS:
        return points
    return [points[index] for index in np.linspace(0, len(points) - 1, _MOST_POINTS).astype(int).tolist()]


def shares(name: str, values: Sequence[float]) -> Series:
    """Returns the share of values, in percent, that are at most so high."""
    if not len(values):
        return Series(name, [])
    percents = np.linspace(0, 100, 201)
    return Series(name, list(zip(np.percentile(values, percents).tolist(), percents.tolist(), strict=True)))
