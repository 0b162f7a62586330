"""The PromQL expressions of the chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

from tests.deploy.chart import Rendered


def queries(rendered: Rendered) -> Iterator[tuple[str, str]]:
    """Name and text of each PromQL expression in the chart."""
    for rule in rules(rendered) if rendered.of_kind("PrometheusRule") else ():
        yield rule["alert"], rule["expr"]
    for scaled in rendered.of_kind("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            yield scaled["metadata"]["name"], trigger["metadata"]["query"]


def rules(rendered: Rendered) -> list[dict[str, Any]]:
    (rule,) = rendered.of_kind("PrometheusRule")
    (group,) = rule["spec"]["groups"]
    return list(group["rules"])


def selectors_of(query: str) -> Iterator[promql_parser.VectorSelector]:
    """What an expression reads."""
    return _selectors(promql_parser.parse(query))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _selectors(child)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)
