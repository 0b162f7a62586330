"""The queries of the Grafana dashboard."""

from __future__ import annotations

import json
import re

from tests.compose.images import ROOT

DASHBOARD = ROOT / "deploy/dashboards/baton.json"
_METRIC = re.compile(r"\bbaton_\w+")
_KIND_SUFFIX = re.compile(r"_(bucket|count|sum)$")  # of the series of a histogram


def expressions() -> list[str]:
    """All queries, with values for Grafana's variables."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "1m").replace("$model", ".*") for each in found]


def metric_names(expression: str) -> set[str]:
    """Metrics that a query reads; of a histogram its name without the suffixes of its series."""
    return {_KIND_SUFFIX.sub("", name) for name in _METRIC.findall(expression)}
