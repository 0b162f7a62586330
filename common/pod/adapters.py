"""The LoRA adapters of a pod: which are loaded, and the names that routers have given them.

1. `load` reads an adapter into the engine. Requests name it by the digest of its weights.
2. `give_name` gives it a name, or takes one away; of two changes of a name the one with the higher revision holds. Pods
   keep the names, and routers learn them from their reports.
3. An adapter that has no name, or has lost its last one, stays for a while: requests that were accepted before may be
   on their way here. A router that has such requests loads it again, which keeps it for as long once more.
4. Then the engine is told to forget it, which it does once no live request has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping

from common.cancellation import end_tasks
from common.engine.client.base import EngineClient
from common.engine.contract.adapters import AdapterFacts
from common.errors import (
    BatonError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    UnknownModelError,
    quoted,
)
from common.pod.config import ADAPTER_FILES
from common.pod.tasks import TaskSet
from common.types import AdapterName

logger = logging.getLogger(__name__)

MAX_NAMES = 1024  # those that were taken away included
_FORGET_S = 24 * 3600.0  # how long a name that was taken away is told
_OF_SETTINGS = 1  # revision


class PodAdapters:
    """Belongs to one event loop. Close it."""

    def __init__(self, engine: EngineClient, grace_s: float, on_change: Callable[[], None]) -> None:
        """`grace_s`: seconds for which an adapter without a name stays. `on_change` is called when there is something
        to report."""
        self.version = 0  # counts changes of what is reported
        self._engine = engine
        self._grace_s = grace_s
        self._on_change = on_change
        self._loaded: dict[bytes, AdapterFacts] = {}  # by digest
        self._names: dict[str, AdapterName] = {}
        self._lapses: dict[bytes, asyncio.TimerHandle] = {}  # of those that were asked for or lost a name lately
        self._lock = asyncio.Lock()  # around what the engine is asked
        self._tasks = TaskSet()
        self._loading: set[asyncio.Task[AdapterFacts]] = set()

    @property
    def names(self) -> list[AdapterName]:
        """All names, those that were taken away lately included."""
        return list(self._names.values())

    @property
    def loaded(self) -> list[bytes]:
        """The digests of adapters that requests may have."""
        return list(self._loaded)

    async def load_permanent(self, modules: Mapping[str, str]) -> None:
        """Loads the adapters of the settings, path by name. Raises ConfigError."""
        for name, path in modules.items():
            try:
                facts = await self.load(path)
            except (InvalidRequestError, OverloadedError) as error:
                raise ConfigError(f"--lora-modules: {name}={path}: {error.message}", param="lora_modules") from error
            self._set(AdapterName(name, _OF_SETTINGS, facts.digest, path, is_permanent=True))

    async def load(self, path: str, digest: bytes = b"") -> AdapterFacts:
        """Loads an adapter, from a directory or the hub; with a `digest`, only if it is not here. Raises
        InvalidRequestError if it cannot be used, OverloadedError if there are too many, ConflictError if it has another
        digest."""
        if (known := self._loaded.get(digest)) is not None:
            self._keep(digest)
            return known
        # To its end, also if its caller has gone: what the engine has must be known here.
        loading = asyncio.create_task(self._load(path), name="load adapter")
        self._loading.add(loading)
        loading.add_done_callback(self._note_loaded)
        facts = await asyncio.shield(loading)
        if digest and facts.digest != digest:
            problem = f"the adapter in {quoted(path)} has the digest {_short(facts.digest)}, not {_short(digest)}"
            raise ConflictError(problem, param="lora_path")
        return facts

    def _note_loaded(self, loading: asyncio.Task[AdapterFacts]) -> None:
        self._loading.discard(loading)
        if not loading.cancelled():
            loading.exception()  # retrieved, also if its caller has gone

    async def _load(self, path: str) -> AdapterFacts:
        directory = await asyncio.to_thread(_directory_of, path)
        async with self._lock:
            facts = await self._engine.load_adapter(directory)
            self._loaded[facts.digest] = facts
            self._keep(facts.digest)
        self._report()
        return facts

    def give_name(self, wanted: AdapterName) -> None:
        """Gives a name, or takes it away. Raises ConflictError for an old revision and for a name of the settings,
        UnknownModelError if its adapter is not loaded, OverloadedError if there are too many names."""
        known = self._names.get(wanted.name)
        if known is not None and (known.digest == wanted.digest if known.is_permanent else known.order == wanted.order):
            return
        if known is not None and known.is_permanent:
            raise ConflictError(f"{quoted(wanted.name)} is in this pod's --lora-modules", param="lora_name")
        if known is not None and known.order > wanted.order:
            raise ConflictError(f"{quoted(wanted.name)} has been changed meanwhile", param="lora_name")
        if wanted.digest and wanted.digest not in self._loaded:
            raise UnknownModelError(f"adapter {_short(wanted.digest)} is not loaded", param="digest")
        self._forget_names()
        if known is None and len(self._names) >= MAX_NAMES:
            self._forget_oldest()
        if known is None and len(self._names) >= MAX_NAMES:
            raise OverloadedError(f"the pod has {len(self._names)} names of adapters, its limit")
        self._set(wanted)
        if known is not None and known.digest in self._loaded:
            self._keep(known.digest)

    async def close(self) -> None:
        """Ends what it has begun; the engine is closed by its owner."""
        for lapse in self._lapses.values():
            lapse.cancel()
        await end_tasks(list(self._loading))
        await self._tasks.close()

    def _set(self, name: AdapterName) -> None:
        self._names[name.name] = name
        what = f"is adapter {_short(name.digest)} of {name.path}" if name.digest else "is unloaded"
        logger.info("adapter %s %s", quoted(name.name), what)
        self._report()

    def _keep(self, digest: bytes) -> None:
        """Has it stay for a while, whether or not it has a name."""
        if (lapse := self._lapses.pop(digest, None)) is not None:
            lapse.cancel()
        self._lapses[digest] = asyncio.get_running_loop().call_later(self._grace_s, self._on_lapse, digest)

    def _on_lapse(self, digest: bytes) -> None:
        del self._lapses[digest]
        self._tasks.spawn(self._unload_unless_needed(digest), "unload adapter")

    async def _unload_unless_needed(self, digest: bytes) -> None:
        async with self._lock:
            if digest in self._lapses or self._has_name(digest):
                return
            del self._loaded[digest]
            self._report()
            try:
                await self._engine.unload_adapter(digest)
            except BatonError as error:
                logger.warning("adapter %s cannot be unloaded: %s", _short(digest), error.message)

    def _report(self) -> None:
        self.version += 1
        self._on_change()

    def _has_name(self, digest: bytes) -> bool:
        return any(name.digest == digest for name in self._names.values())

    def _forget_names(self) -> None:
        """Forgets those that were taken away long ago."""
        oldest = time.time_ns() - round(_FORGET_S * 1e9)
        for name in [each for each in self._names.values() if not each.digest and each.revision < oldest]:
            del self._names[name.name]

    def _forget_oldest(self) -> None:
        """Forgets the name that was taken away first, if one was."""
        if taken := [each for each in self._names.values() if not each.digest]:
            del self._names[min(taken, key=lambda each: each.revision).name]


def _directory_of(path: str) -> str:
    """A local directory with the adapter's files. Blocks; raises InvalidRequestError."""
    local = os.path.expanduser(path)  # unlike Path's, it takes a user whom there is not
    if os.path.isdir(local):  # unlike Path's, of names that are too long as well
        return local
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        problem = f"lora_path: {quoted(path)} is neither a directory that the pod sees nor a hub id"
        raise InvalidRequestError(problem, param="lora_path")
    return _download(path)


def _download(hub_id: str) -> str:
    from huggingface_hub import snapshot_download  # only now: it is not needed for a local directory
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(hub_id, allow_patterns=ADAPTER_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problem = f"lora_path: {hub_id} is no directory that the pod sees and cannot be had from the hub: {detail}"
        raise InvalidRequestError(problem, param="lora_path") from error


def _short(digest: bytes) -> str:
    return digest.hex()[:16]
