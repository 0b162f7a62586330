"""The label that names the model."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

MODEL_LABEL = "model_name"  # as vLLM calls it; the first name of a served model

_Family = TypeVar("_Family", bound=MetricWrapperBase)


class OfModel(Generic[_Family]):
    """A family of which one label, the first, is the model's name."""

    def __init__(self, family: _Family, model_name: str) -> None:
        self._family = family
        self._model_name = model_name
        self._metrics: dict[tuple[str, ...], _Family] = {}  # as many as the family has series

    def labels(self, *values: str) -> _Family:
        """The metric with these values of the other labels."""
        metric = self._metrics.get(values)
        if metric is None:
            metric = self._metrics[values] = self._family.labels(self._model_name, *values)
        return metric
