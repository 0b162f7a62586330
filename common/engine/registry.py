"""Parts of an engine by name, imported when they are needed."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from common.errors import ConfigError

_Part = TypeVar("_Part")


class Registry(Generic[_Part]):
    """The parts of one kind. A part from outside the package is named by its place, "module:name"."""

    def __init__(self, setting: str, known: Mapping[str, str]) -> None:
        """`known`: "module:name" of each part, by the names that `setting` takes."""
        self._setting = setting
        self._known = known

    def place(self, name: str) -> str:
        """Returns "module:name" of a part, which need not exist. Raises ConfigError if `name` cannot be one."""
        place = self._known.get(name, name)
        if ":" not in place:
            known = f"none of {', '.join(self._known)}, and " if self._known else ""
            raise ConfigError.of(self._setting, f"{name!r} is {known}not a module:name")
        return place

    def find(self, name: str) -> _Part:
        """Imports a part. Raises ConfigError if there is none of that name."""
        place = self.place(name)
        try:
            return cast("_Part", pkgutil.resolve_name(place))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError.of(self._setting, f"cannot import {place!r}: {error}") from error
