"""Compiles the grammars of requests beside the step loop, and keeps the processes of those that were used last."""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.engine.config import GrammarConfig
from common.engine.grammar.base import Grammar
from common.engine.grammar.cache import Kept, ProblemCache, ProcessCache
from common.engine.grammar.compile_queue import CompileQueue, Job
from common.engine.grammar.processes import ForkServer, GrammarProcess
from common.engine.grammar.protocol import Compiled, Ready, Settings
from common.engine.grammar.serving import TOO_SLOW
from common.engine.scheduler.grammars import GrammarAnswer
from common.engine.scheduler.request import Request
from common.errors import BatonError, GrammarTooSlowError, InvalidRequestError, OverloadedError

logger = logging.getLogger(__name__)

PARAM = "structured_outputs"
_MATCH_BYTES = 256 * 2**20  # memory that the matchers of one grammar may take
_WALL_S = 60.0  # in which a process must have compiled, beyond its CPU time; one that sleeps takes none
_CHECK_S = 1.0  # between looks at the processes that are kept
_PROBLEM_BYTES = 16 * 2**20  # of all refused constraints that are kept


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The source of the model's vocabulary."""

    directory: Path
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class _Compiling:
    """A job under way."""

    job: Job
    due: float  # when it is given up, in monotonic seconds
    is_compiled: bool = False


_Result = GrammarProcess | BatonError


class GrammarCompiler:
    """See common.engine.scheduler.grammars.Grammars and ProcessSource, which the step loop's thread calls. A thread of
    its own starts a process for each constraint, and follows it until the grammar is ready."""

    def __init__(
        self,
        config: GrammarConfig,
        source: TokenizerSource,
        on_events: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`on_events` is called on any thread when `collect` has something, `on_failure` if the thread has died."""
        self._config = config
        self._on_events = on_events
        self._on_failure = on_failure
        self._lock = threading.Lock()  # of the next seven
        self._asking: dict[Request, Grammar] = {}
        self._queue = CompileQueue(config.grammar_threads)
        self._processes = ProcessCache(
            config.grammar_cache_entries, config.grammar_cache_bytes, config.grammar_used_bytes
        )
        self._problems = ProblemCache(config.grammar_cache_entries, _PROBLEM_BYTES)
        self._settled: deque[tuple[Grammar, BatonError | None]] = deque()
        self._to_end: list[GrammarProcess] = []
        self._is_closed = False
        self._wakeup, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None  # started by the first constraint
        # Used by the thread alone.
        self._server = ForkServer(_settings(config, source))
        self._compiling: dict[GrammarProcess, _Compiling] = {}
        self._next_check = 0.0  # in monotonic seconds
        self._selector = selectors.DefaultSelector()

    # -- on the step loop's thread ----------------------------------------------------------------------------------

    def ask(self, request: Request) -> Grammar | None:
        """See Grammars."""
        constraint = request.sampling.structured_outputs
        assert constraint is not None
        grammar = Grammar(constraint, request.tenant, self)
        with self._lock:
            self._raise_problem(grammar)
            if self._processes.find(grammar.key) is not None:
                return grammar
            self._queue.add(grammar)
            self._asking[request] = grammar
        self._wake()
        return None

    def withdraw(self, request: Request) -> None:
        """See Grammars."""
        with self._lock:
            grammar = self._asking.pop(request, None)
        if grammar is not None:
            self.release(grammar)

    @property
    def has_events(self) -> bool:
        """See Grammars."""
        return bool(self._settled)

    def collect(self) -> Sequence[GrammarAnswer]:
        """See Grammars."""
        answers: list[GrammarAnswer] = []
        with self._lock:
            asking = {grammar: request for request, grammar in self._asking.items()}
            while self._settled:
                grammar, problem = self._settled.popleft()
                request = asking.get(grammar)
                if request is not None:
                    del self._asking[request]
                    answers.append(GrammarAnswer(request, problem or grammar))
        return answers

    def acquire(self, grammar: Grammar) -> GrammarProcess | None:
        """See ProcessSource. A process may have been dropped since its grammar was compiled, or have ended."""
        with self._lock:
            self._raise_problem(grammar)
            kept = self._processes.find(grammar.key)
            if kept is not None and not kept.users and not kept.process.is_alive():
                kept = None
            if kept is not None and not kept.process.is_gone:
                kept.users.add(grammar)
                return kept.process
            with contextlib.suppress(OverloadedError):  # it asks again
                self._queue.add(grammar)
        self._wake()
        return None

    def release(self, grammar: Grammar) -> None:
        """See ProcessSource."""
        with self._lock:
            self._queue.remove(grammar)
            self._to_end += self._processes.release(grammar)
        self._wake()

    def _raise_problem(self, grammar: Grammar) -> None:
        problem = self._problems.get(grammar.key)
        if problem is not None:
            raise type(problem)(problem.message, param=PARAM)

    def close(self) -> None:
        """Ends the thread and all processes. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake()
        self._server.stop()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()
        self._wakeup.close()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        with contextlib.suppress(BlockingIOError):  # then it has been woken
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        try:
            while not self._is_closed:
                self._check()
                self._start_jobs()
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._wakeup:
                        self._wakeup.recv(4096)
                    else:
                        self._follow(key.data)
                self._give_up()
        except Exception as error:
            logger.exception("the thread that compiles grammars failed")
            self._on_failure(error)
        finally:
            self._end_all()

    def _check(self) -> None:
        """Once in a while: ends processes whose matchers have outgrown the memory for all, and drops those that others
        have ended, so that they are reaped."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_S
        with self._lock:
            self._to_end += self._processes.drop_gone()
            measured = self._processes.all()
        for kept in measured:
            kept.measure()
        with self._lock:
            excess = self._processes.excess()
        for process in excess:
            self._server.kill(process)
        if excess:
            logger.warning("grammars in use took more memory than grammar_used_bytes: ended %d of them", len(excess))

    def _start_jobs(self) -> None:
        while True:
            with self._lock:
                to_end, self._to_end = self._to_end, []
                job = self._queue.next(self._processes.full_tenants()) if self._queue else None
            for process in to_end:
                self._server.reap(process)
            if job is None:
                return
            try:
                process = self._server.start(job.key.constraint)
            except InvalidRequestError as error:
                self._settle(job, _impossible(error))
                continue
            except BatonError as error:
                self._settle(job, error)
                continue
            self._selector.register(process, selectors.EVENT_READ, process)
            self._compiling[process] = _Compiling(job, time.monotonic() + _WALL_S + self._config.grammar_timeout_s)

    def _wait_s(self) -> float | None:
        """Seconds until the next process is given up, or the next check. None: there is no process."""
        dues = [each.due for each in self._compiling.values()] + [self._next_check] * bool(self._processes)
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _follow(self, process: GrammarProcess) -> None:
        for message in process.receive():
            match message:
                case Compiled(""):
                    self._compiling[process].is_compiled = True
                case Ready("", num_bytes):
                    self._selector.unregister(process)
                    self._settle(self._compiling.pop(process).job, process, num_bytes)
                case Compiled(problem):
                    self._refuse(process, InvalidRequestError(problem))
                case Ready(problem):
                    self._refuse(process, GrammarTooSlowError(problem))
        if process.is_gone and process in self._compiling:
            self._refuse(process)

    def _give_up(self) -> None:
        """Ends the processes for which no request waits, and those that take too long."""
        now = time.monotonic()
        for process, compiling in list(self._compiling.items()):
            if compiling.due <= now:
                self._end(process)
                self._settle(compiling.job, OverloadedError("its grammar could not be compiled in time"))
            elif not compiling.job.waiting:
                self._end(process)
                with self._lock:
                    self._queue.settle(compiling.job)

    def _refuse(self, process: GrammarProcess, problem: InvalidRequestError | None = None) -> None:
        """Ends a process; its constraint is impossible. None: it died, and its exit code tells of what."""
        compiling = self._compiling[process]
        exit_code = self._end(process)
        name = _exit_name(exit_code)
        if problem is None and exit_code in (None, -signal.SIGKILL):  # by somebody else, or for lack of memory
            self._settle(compiling.job, OverloadedError(f"the process that compiled its grammar ended ({name})"))
            return
        if problem is None and (compiling.is_compiled or exit_code == -signal.SIGPROF):
            problem = self._too_slow(compiling)
        elif problem is None:
            problem = InvalidRequestError(f"it takes too much memory to compile, or is nested too deep ({name})")
        self._settle(compiling.job, _impossible(problem))

    def _too_slow(self, compiling: _Compiling) -> InvalidRequestError:
        if compiling.is_compiled:
            return GrammarTooSlowError(TOO_SLOW)
        return InvalidRequestError(f"it takes more than {self._config.grammar_timeout_s:g} s to compile")

    def _end(self, process: GrammarProcess) -> int | None:
        self._selector.unregister(process)
        del self._compiling[process]
        return self._server.reap(process)

    def _settle(self, job: Job, result: _Result, num_bytes: int = 0) -> None:
        with self._lock:
            grammars = self._queue.settle(job)
            if isinstance(result, GrammarProcess):
                users = set(grammars).difference(self._asking.values())
                self._to_end += self._processes.put(job.key, Kept(result, num_bytes, users))
            elif isinstance(result, InvalidRequestError):
                self._problems.put(job.key, result)
            problem = result if isinstance(result, BatonError) else None
            self._settled.extend((grammar, problem) for grammar in grammars)
        self._on_events()

    def _end_all(self) -> None:
        with self._lock:
            processes = [*self._compiling, *self._processes.drop_all(), *self._to_end]
        self._selector.close()
        for process in processes:
            self._server.reap(process)
        self._server.close()


def _impossible(problem: InvalidRequestError) -> InvalidRequestError:
    return type(problem)(f"the answer cannot be constrained: {problem.message}", param=PARAM)


def _settings(config: GrammarConfig, source: TokenizerSource) -> Settings:
    return Settings(
        backend=config.grammar_backend,
        directory=str(source.directory),
        vocab_size=source.vocab_size,
        eos_token_ids=sorted(source.eos_token_ids),
        max_whitespace=config.max_whitespace,
        compile_s=config.grammar_timeout_s,
        compile_bytes=config.grammar_memory,
        match_s=config.grammar_timeout_s,
        match_bytes=_MATCH_BYTES,
    )


def _exit_name(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
