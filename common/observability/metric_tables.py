"""Metrics as tables: a class names each of its metrics once, and instances have them as attributes.

    class Errors(MetricTable):
        refused = metric(Counter, "baton_router_request_errors", "Requests that failed.", "code")

A ModelTable has what is counted of one model, in families that all models share:

    class OfOne(ModelTable):
        tokens = per_model(Counter, "baton_router_prompt_tokens", "Prompt tokens.")                   # a Counter
        ended = per_model(Counter, "baton_router_request_success", "Generations.", "finished_reason")  # an OfModel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from common.observability.model_label import MODEL_LABEL, OfModel

T = TypeVar("T")
_Family = TypeVar("_Family", bound=MetricWrapperBase)
_Table = TypeVar("_Table", bound="ModelTable")


class Column(Generic[T]):
    """One metric of a table."""

    def __init__(
        self, family: Callable[[CollectorRegistry], Any], of_model: Callable[[Any, str], T] = lambda family, _: family
    ) -> None:
        """`family` makes and registers it; `of_model` gives what a model has of it: without it, all."""
        self.family = family
        self.of_model = of_model

    def __get__(self, table: object, owner: type) -> T:
        """Says what type the attribute of an instance has, which is found before this."""
        raise AttributeError(f"{owner.__name__} has metrics only in its instances")


def metric(
    kind: type[_Family], name: str, text: str, *labels: str, starts: Iterable[tuple[str, ...]] = (), **options: Any
) -> Column[_Family]:
    """A family of a MetricTable. `starts`: label values that are there at once, so that each rate starts at 0 and not
    at nothing. `options`: of the kind."""
    values = tuple(starts)

    def family(registry: CollectorRegistry) -> _Family:
        made = kind(name, text, labels, registry=registry, **options)
        for each in values:
            made.labels(*each)
        return made

    return Column(family)


@overload
def per_model(kind: type[_Family], name: str, text: str, **options: Any) -> Column[_Family]: ...
@overload
def per_model(
    kind: type[_Family], name: str, text: str, label: str, *labels: str, starts: Iterable[str] = (), **options: Any
) -> Column[OfModel[_Family]]: ...
def per_model(
    kind: type[MetricWrapperBase], name: str, text: str, *labels: str, starts: Iterable[str] = (), **options: Any
) -> Column[Any]:
    """A family of a ModelTable. `starts`: values of the label beside the model's that are there at once."""
    values = tuple(starts)

    def of_model(family: MetricWrapperBase, model_name: str) -> object:
        if not labels:
            return family.labels(model_name)
        series = OfModel(family, model_name)
        for value in values:
            series.labels(value)
        return series

    return Column(metric(kind, name, text, MODEL_LABEL, *labels, **options).family, of_model)


class MetricTable:
    """Registers its metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        vars(self).update({name: column.family(registry) for name, column in _columns(type(self))})

    def forget(self, **labels: str) -> None:
        """Removes the series with these label values, as of a pod that is gone."""
        _forget((vars(self)[name] for name, _ in _columns(type(self))), labels)


class ModelTable:
    """One model's metrics."""

    def __init__(self, families: Mapping[str, Any], model_name: str) -> None:
        for name, column in _columns(type(self)):
            vars(self)[name] = column.of_model(families[name], model_name)

    @classmethod
    def families(cls, registry: CollectorRegistry) -> dict[str, Any]:
        """Registers the families of this table. Returns them by attribute."""
        return {name: column.family(registry) for name, column in _columns(cls)}


class ModelFamilies(Generic[_Table]):
    """The families of a ModelTable. Registers them."""

    def __init__(self, table: type[_Table], registry: CollectorRegistry) -> None:
        self._table = table
        self._families = table.families(registry)

    def of(self, model_name: str) -> _Table:
        """Returns the metrics of this model."""
        return self._table(self._families, model_name)

    def forget(self, model_name: str) -> None:
        """Removes the series of a model that is gone."""
        _forget(self._families.values(), {MODEL_LABEL: model_name})


def _columns(table: type) -> Iterator[tuple[str, Column[Any]]]:
    return ((name, value) for name, value in vars(table).items() if isinstance(value, Column))


def _forget(families: Iterable[Any], labels: Mapping[str, str]) -> None:
    for family in families:
        for values in _series_of(family, labels):
            family.remove(*values)


def _series_of(family: Collector, labels: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Label values of the series that have these among theirs."""
    series = [sample.labels for metric in family.collect() for sample in metric.samples]
    return {
        tuple(value for name, value in each.items() if name != "le")  # of a bucket
        for each in series
        if labels.items() <= each.items()
    }
