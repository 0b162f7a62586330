"""Figures of repeated measurements whose sides take turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

_Side = TypeVar("_Side")


def in_turn(sides: Iterable[_Side], turn: int) -> list[_Side]:
    """Returns the sides in an order that is another one each turn: none of them is always the first."""
    found = list(sides)
    shift = turn % len(found)
    return [*found[shift:], *found[:shift]]


def ratio(own: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median of own / other, each of two that were measured in the same turn."""
    return statistics.median(mine / its for mine, its in zip(own, others, strict=True))


def medians(samples: Iterable[Sequence[float]]) -> list[float]:
    """Returns the median of each column of some rows."""
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def p99(samples: Sequence[float]) -> float:
    """Returns the smallest sample that 99 % of the samples do not exceed: of less than 100, the worst."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
