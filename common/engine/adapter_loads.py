"""The loading of LoRA adapters beside the step loop: files are read on a thread of their own, one after the other, and
what was read becomes known between two steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.engine.contract.adapters import NO_ADAPTERS, AdapterFacts, ReadAdapter
from common.engine.executor.base import Executor
from common.engine.messages import CallResult
from common.engine.scheduler.adapters import AdapterPlaces
from common.errors import BatonError, InvalidRequestError, OverloadedError

logger = logging.getLogger(__name__)


class AdapterLoads:
    """Owned by the core; all but the reading is on its thread."""

    def __init__(
        self, executor: Executor, places: AdapterPlaces, max_loaded: int, on_wakeup: Callable[[], None]
    ) -> None:
        self._executor = executor
        self._places = places
        self._max_loaded = max_loaded
        self._on_wakeup = on_wakeup
        self._installed: dict[bytes, AdapterFacts] = {}  # what the executor has, unloaded ones in use included
        self._unloaded: set[bytes] = set()  # of these
        self._read: queue.SimpleQueue[tuple[int, ReadAdapter | BatonError]] = queue.SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None  # from the first load on

    def begin(self, call_id: int, directory: str) -> None:
        """Begins to read an adapter; `settle` answers the call."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._thread.submit(self._read_one, call_id, directory)

    def load(self, directory: str) -> AdapterFacts:
        """Reads and installs an adapter at once. Raises InvalidRequestError if it cannot be used, OverloadedError if
        there are too many."""
        return self._install(self._read_adapter(directory))

    def settle(self) -> list[CallResult]:
        """Installs what was read, and answers."""
        results = []
        while not self._read.empty():
            call_id, found = self._read.get()
            try:
                if isinstance(found, BatonError):
                    raise found
                results.append(CallResult(call_id=call_id, result=self._install(found)))
            except BatonError as error:
                results.append(failed_call(call_id, error))
        return results

    def unload(self, digest: bytes) -> None:
        """No new request gets it; `remove_unused` frees its memory. Raises UnknownModelError if it is not loaded."""
        self._places.note_unloaded(digest)
        self._unloaded.add(digest)
        self.remove_unused()

    def remove_unused(self) -> None:
        """Frees adapters that are unloaded and of which no request is left."""
        for digest in [each for each in self._unloaded if not self._places.is_used(each)]:
            adapters = self._executor.adapters
            assert adapters is not None
            adapters.remove(digest)
            self._unloaded.remove(digest)
            del self._installed[digest]
            logger.info("adapter %s is unloaded", digest.hex()[:16])

    def close(self) -> None:
        """Ends the thread after what it reads now. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_one(self, call_id: int, directory: str) -> None:
        try:
            self._read.put((call_id, self._read_adapter(directory)))
        except BatonError as error:
            self._read.put((call_id, error))
        except Exception as error:  # third-party code over user files: any exception means unusable
            logger.exception("an adapter cannot be read")
            self._read.put((call_id, InvalidRequestError(f"it cannot be read: {error}", param="lora_path")))
        self._on_wakeup()

    def _read_adapter(self, directory: str) -> ReadAdapter:
        adapters = self._executor.adapters
        if adapters is None:
            raise InvalidRequestError(NO_ADAPTERS, param="lora_path")
        return adapters.read(directory)

    def _install(self, read: ReadAdapter) -> AdapterFacts:
        facts = read.facts
        if facts.digest not in self._installed:
            if len(self._installed) >= self._max_loaded:
                raise OverloadedError(f"{len(self._installed)} adapters are loaded already (max_cpu_loras)")
            adapters = self._executor.adapters
            assert adapters is not None
            adapters.install(read)
            self._installed[facts.digest] = facts
            size_mb = facts.num_bytes / 1e6
            logger.info("adapter %s is loaded: rank %d, %.1f MB", facts.digest.hex()[:16], facts.rank, size_mb)
        self._unloaded.discard(facts.digest)
        self._places.note_loaded(facts.digest)
        return self._installed[facts.digest]


def failed_call(call_id: int, error: BatonError) -> CallResult:
    """Answers a call that has failed."""
    return CallResult(
        call_id=call_id, error=error.message, error_param=error.param or "", error_code=error.code.value.number
    )
