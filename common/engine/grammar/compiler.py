"""Compiles the grammars of requests beside the step loop, and keeps those that were used last."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.engine.config import GrammarConfig
from common.engine.grammar.base import CompiledGrammar, GrammarBackend, Vocabulary
from common.engine.grammar.registry import create_backend
from common.engine.grammar.trial import NICENESS, Settings
from common.engine.grammar.trial_process import TrialProcess
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.scheduler.grammars import GrammarAnswer
from common.engine.scheduler.request import Request
from common.errors import BatonError, InvalidRequestError, OverloadedError
from common.types import Constraint

logger = logging.getLogger(__name__)

PARAM = "structured_outputs"
_MAX_PENDING = 256  # constraints that wait for a thread
_ERROR_BYTES = 1024  # of a constraint's error that is kept


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where the model's vocabulary comes from."""

    directory: Path
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class _Job:
    """A constraint under way, and who waits for it."""

    constraint: Constraint
    requests: list[Request] = field(default_factory=list)


_Result = CompiledGrammar | BatonError


class GrammarCache:
    """The grammars, and the errors, of the constraints used last."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._results: OrderedDict[Constraint, tuple[_Result, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def get(self, constraint: Constraint) -> _Result | None:
        """Returns what is known of it, if anything."""
        entry = self._results.get(constraint)
        if entry is None:
            return None
        self._results.move_to_end(constraint)
        return entry[0]

    def put(self, constraint: Constraint, result: _Result) -> None:
        """Keeps it, and drops those not used for longest. What alone exceeds the bound is not kept."""
        num_bytes = len(constraint.text) + (_ERROR_BYTES if isinstance(result, BatonError) else result.num_bytes)
        if constraint in self._results or num_bytes > self._max_bytes:
            return
        self._results[constraint] = (result, num_bytes)
        self.num_bytes += num_bytes
        while len(self._results) > self._max_entries or self.num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._results.popitem(last=False)
            self.num_bytes -= dropped_bytes


def _yield_to_steps() -> None:
    """Lowers the priority of this thread, where threads have one of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class GrammarCompiler:
    """See common.engine.scheduler.grammars.Grammars. All but `_compile` runs on the step loop's thread."""

    def __init__(self, config: GrammarConfig, source: TokenizerSource, on_notes: Callable[[], None]) -> None:
        """`on_notes` is called on any thread when `collect` has something."""
        self._config = config
        self._source = source
        self._on_notes = on_notes
        self._cache = GrammarCache(config.grammar_cache_entries, config.grammar_cache_bytes)
        self._jobs: dict[Constraint, _Job] = {}
        self._settled: deque[tuple[_Job, _Result]] = deque()
        self._threads = ThreadPoolExecutor(
            config.grammar_threads, thread_name_prefix="grammar", initializer=_yield_to_steps
        )
        self._trials: queue.SimpleQueue[TrialProcess] = queue.SimpleQueue()  # that no thread uses
        self._all_trials: list[TrialProcess] = []
        self._lock = threading.Lock()  # of the next three
        self._vocabulary: Vocabulary | None = None
        self._backend: GrammarBackend | None = None
        self._is_closed = False

    def ask(self, request: Request) -> CompiledGrammar | None:
        """See Grammars."""
        constraint = request.sampling.structured_outputs
        assert constraint is not None
        known = self._cache.get(constraint)
        if isinstance(known, BatonError):
            raise InvalidRequestError(known.message, param=PARAM)
        if known is None:
            self._await(request, constraint)
        return known

    def _await(self, request: Request, constraint: Constraint) -> None:
        job = self._jobs.get(constraint)
        if job is None:
            if len(self._jobs) >= _MAX_PENDING:
                raise OverloadedError(f"{len(self._jobs)} grammars are being compiled already")
            job = self._jobs[constraint] = _Job(constraint)
            self._threads.submit(self._run, job)
        job.requests.append(request)

    @property
    def has_notes(self) -> bool:
        """See Grammars."""
        return bool(self._settled)

    def collect(self) -> Sequence[GrammarAnswer]:
        """See Grammars."""
        answers: list[GrammarAnswer] = []
        while self._settled:
            job, result = self._settled.popleft()
            del self._jobs[job.constraint]
            if not isinstance(result, BatonError) or isinstance(result, InvalidRequestError):
                self._cache.put(job.constraint, result)
            answers += [GrammarAnswer(request, result) for request in job.requests if not request.is_finished]
        return answers

    def close(self) -> None:
        """Ends threads and processes. Idempotent."""
        with self._lock:
            self._is_closed = True
            trials = list(self._all_trials)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in trials:
            trial.stop()
        self._threads.shutdown(wait=True)
        for trial in trials:
            trial.close()

    # -- on a thread of the pool ------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        try:
            result: _Result = self._compile(job.constraint)
        except InvalidRequestError as error:
            result = InvalidRequestError(f"the answer cannot be constrained: {error.message}", param=PARAM)
        except BatonError as error:
            result = error
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            result = BatonError(f"the grammar could not be compiled: {type(error).__name__}")
        self._settled.append((job, result))
        self._on_notes()

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            trial = self._trials.get_nowait()
        except queue.Empty:
            trial = self._new_trial()
        try:
            trial.check(constraint)
        finally:
            self._trials.put(trial)
        with self._lock:
            if self._backend is None:
                self._backend = create_backend(
                    self._config.grammar_backend, self._load_vocabulary(), self._config.max_whitespace
                )
        return self._backend.compile(constraint)

    def _new_trial(self) -> TrialProcess:
        source, config = self._source, self._config
        settings = Settings(
            backend=config.grammar_backend,
            directory=str(source.directory),
            vocab_size=source.vocab_size,
            eos_token_ids=sorted(source.eos_token_ids),
            max_whitespace=config.max_whitespace,
            cpu_s=config.grammar_timeout_s,
            max_bytes=config.grammar_memory,
        )
        with self._lock:
            if self._is_closed:
                raise BatonError("the engine is closing")
            self._load_vocabulary()  # raises what the process could not say
            trial = TrialProcess(settings)
            self._all_trials.append(trial)
        return trial

    def _load_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            source = self._source
            self._vocabulary = load_vocabulary(source.directory, source.vocab_size, source.eos_token_ids)
        return self._vocabulary
