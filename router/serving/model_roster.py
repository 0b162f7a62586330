"""Models that are added and removed while the router runs, as a file says.

1. The file has changed, or SIGHUP came: it is read. If it is invalid, that is logged, and nothing changes.
2. Each model that is new, or has other names or another location, is read on a thread. One that cannot be read is
   logged and counted; models that it was to replace stay.
3. Models that the file no longer names are removed, and those that were read are added. Both happen at once, so that a
   name that stays is always served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from common.errors import ConfigError
from common.watched_files import WatchedFiles
from router.serving.background_read import read_in_background
from router.serving.config import ModelsConfig
from router.serving.model_sources import ModelSpec, read_model, read_models_file
from router.serving.served_model import ModelSource, ServedModel
from router.serving.service import InferenceService

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 2.0
_READ_TIMEOUT_S = 600.0  # of one model, which may have to be downloaded


class ModelRoster:
    """Has a service serve the models of its `models_file`."""

    def __init__(self, service: InferenceService, config: ModelsConfig) -> None:
        """The service serves those that the file named when the router started."""
        self._service = service
        self._config = config
        self._wanted: list[ModelSpec] | None = None  # None: nothing to do
        self._files = WatchedFiles([config.models_file], self._read_file)
        self._reload_asked = asyncio.Event()

    def reload(self) -> None:
        """Reads the file again, and models that could not be read."""
        self._reload_asked.set()

    async def run(self) -> None:
        """Follows the file, for ever. Cancel to end."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await self._reload_asked.wait()
            force = self._reload_asked.is_set()
            self._reload_asked.clear()
            self._files.check(force=force)
            if self._wanted is not None:
                wanted, self._wanted = self._wanted, None
                await self._serve(wanted)

    def _read_file(self) -> None:
        self._wanted = read_models_file(self._config.models_file)

    async def _serve(self, wanted: Sequence[ModelSpec]) -> None:
        served = [_spec_of(model) for model in self._service.models]
        found = {spec: await self._read(spec) for spec in wanted if spec not in served}
        failed = {name for spec, source in found.items() if source is None for name in spec.names}
        for model in list(self._service.models):
            if _spec_of(model) not in wanted and failed.isdisjoint(model.names):
                self._service.remove_model(model)
        taken = {name: model for model in self._service.models for name in model.names}
        for spec, source in found.items():
            if source is None:
                continue
            if kept := [taken[name] for name in spec.names if name in taken]:
                self._fail(spec, f"its name stays with {kept[0].location}, as another model cannot be read")
            else:
                self._service.add_model(source)

    async def _read(self, spec: ModelSpec) -> ModelSource | None:
        """None: it cannot be read."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                return await read_in_background(partial(read_model, self._config, spec), "model-read")
        except ConfigError as error:
            self._fail(spec, error.message)
        except TimeoutError:
            self._fail(spec, f"it was not read within {_READ_TIMEOUT_S:g} s")
        return None

    def _fail(self, spec: ModelSpec, problem: str) -> None:
        logger.error("cannot serve the model %s: %s", ", ".join(spec.names), problem)
        self._service.metrics.model_failures.inc()


def _spec_of(model: ServedModel) -> ModelSpec:
    return ModelSpec(model.names, model.location)
