"""One grammar in a process of its own: compiles it, tries it on some tokens, then serves its matchers.

The kernel ends the process where it takes more CPU time or memory than it may. Compiling gives way to the engine's
steps; matching does not, since a step waits for it, until the engine lowers the process's priority because it is late.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.engine.grammar.base import CompiledGrammar, GrammarBackend, Matcher, Vocabulary
from common.engine.grammar.protocol import (
    Accept,
    Close,
    Compile,
    Compiled,
    Frames,
    LookAhead,
    Masks,
    MatcherState,
    Open,
    Ready,
    Settings,
    ToGrammar,
    frame,
)
from common.errors import InvalidRequestError
from common.types import Constraint

NICENESS = 10  # while compiling and trying out
TOO_LARGE = "it takes too much memory to compile"
TOO_SLOW = "following it takes too much time or memory"
_BAD_ALLOC = "std::bad_alloc"  # as C++ says it
_CHUNK = 65536
_TRIAL_S = 0.25  # CPU seconds for all tokens of the trial, which take some milliseconds
_NUM_TRIALS, _TRIAL_TOKENS = 3, 48
_HOLD_S = 0.0005  # that a mask waits for others, to be sent with them
_Result = TypeVar("_Result")
_EXCEEDED = (MemoryError, RuntimeError)  # of what the libraries raise where memory or bounds of their own are exceeded


def serve(engine: socket.socket, backend: GrammarBackend, vocabulary: Vocabulary, settings: Settings) -> None:
    """Serves one constraint until the engine closes the socket."""
    frames: Frames[ToGrammar] = Frames(ToGrammar)
    messages: list[ToGrammar] = []
    while not messages:
        data = engine.recv(_CHUNK)
        if not data:
            return
        messages = frames.feed(data)
    compile_ = messages.pop(0)
    assert isinstance(compile_, Compile)
    grammar = _compile(backend, compile_.constraint, settings)
    if isinstance(grammar, str):
        engine.sendall(frame(Compiled(grammar)))
        return
    engine.sendall(frame(Compiled()))
    with _limits(_TRIAL_S, settings.match_bytes):
        problem = _in_background(partial(_try_out, grammar, vocabulary, compile_.constraint.text))
    engine.sendall(frame(Ready(problem, _private_bytes())))
    if not problem:
        _Matchers(grammar, vocabulary, settings).run(engine, frames)


def _compile(backend: GrammarBackend, constraint: Constraint, settings: Settings) -> CompiledGrammar | str:
    """Returns the grammar, or what is wrong with the constraint."""

    def run() -> CompiledGrammar | str:
        try:
            return backend.compile(constraint)
        except InvalidRequestError as error:
            problem = error.message or "it is invalid"
            return TOO_LARGE if _BAD_ALLOC in problem else problem
        except MemoryError:
            return TOO_LARGE

    with _limits(settings.compile_s, settings.compile_bytes):
        return _in_background(run)


def _in_background(work: Callable[[], _Result]) -> _Result:
    """Returns what `work` returns, on a thread of lower priority: that of a process could not be raised again."""
    results: list[_Result] = []

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@contextlib.contextmanager
def _limits(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Ends the process when it takes more CPU time, and fails its allocations beyond the bytes that it may add."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):  # not Linux: the limit on time remains
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process: CPython does not handle it
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _private_bytes() -> int:
    """Memory that no other process shares; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 2**10 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


# -- the trial --------------------------------------------------------------------------------------------------------


def _try_out(grammar: CompiledGrammar, vocabulary: Vocabulary, text: str) -> str:
    """Follows the grammar for some tokens, each time another one that it repeats as long as it may: where a grammar is
    ambiguous, its states grow. Returns what is wrong; the kernel ends the process when that takes too long."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.token_bytes) if token}
    characters = dict.fromkeys(sorted(dict.fromkeys(text[:1024]), key=lambda character: not character.isalnum()))
    favourites = [ids[each.encode()] for each in characters if each.encode("utf-8", "replace") in ids]
    for number in range(_NUM_TRIALS):
        try:
            _follow(grammar.matcher(), vocabulary, favourites[number:] + favourites[:number])
        except _EXCEEDED as error:
            reason = str(error).partition("\n")[0]  # states follow
            return f"{TOO_SLOW}: {reason}" if reason else TOO_SLOW
    return ""


def _follow(matcher: Matcher, vocabulary: Vocabulary, favourites: list[int]) -> None:
    mask = np.zeros(vocabulary.num_words, dtype=np.int32)
    last: int | None = None
    for _ in range(_TRIAL_TOKENS):
        matcher.fill(mask)
        last = _choose(mask, vocabulary, favourites if last is None else [last, *favourites])
        if last is None or not matcher.accept(last):
            return


def _choose(mask: npt.NDArray[np.int32], vocabulary: Vocabulary, favourites: list[int]) -> int | None:
    allowed = np.unpackbits(mask.view(np.uint8), count=vocabulary.size, bitorder="little")
    allowed[[token_id for token_id in vocabulary.eos_token_ids if token_id < vocabulary.size]] = 0
    for token_id in favourites:
        if allowed[token_id]:
            return token_id
    others = np.flatnonzero(allowed)
    return int(others[0]) if len(others) else None


# -- matchers ---------------------------------------------------------------------------------------------------------


class _Account:
    """A matcher and the CPU time that it has left. Each token adds the request's share of a step; what is not used is
    kept, up to a bound."""

    def __init__(self, matcher: Matcher, most_s: float) -> None:
        self.matcher = matcher
        self.ahead_left_s = most_s  # for drafts, which are not the request's fault
        self.state: MatcherState = "following"
        self.left_s = self._most_s = most_s

    @contextlib.contextmanager
    def spending(self, share_s: float) -> Iterator[None]:
        """Charges the work within to the time that is left, to which `share_s` is added. The kernel ends the process if
        that runs out meanwhile."""
        self.left_s = min(self._most_s, self.left_s + share_s)
        try:
            with _ended_after(self.left_s) as took:
                yield
        except _EXCEEDED:
            self.state = "too_slow"
        self.left_s -= took()
        if self.left_s <= 0 and self.state == "following":
            self.state = "too_slow"

    @contextlib.contextmanager
    def looking_ahead(self, share_s: float) -> Iterator[None]:
        """The same of the time for drafts. Where it has run out, no drafts are followed any more. Where a bound of the
        library is exceeded, the process ends, as the matcher is of no more use: another follows what was sampled."""
        self.ahead_left_s = min(self._most_s, self.ahead_left_s + share_s)
        try:
            with _ended_after(self.ahead_left_s) as took:
                yield
        except _EXCEEDED:
            os._exit(1)
        self.ahead_left_s -= took()


@contextlib.contextmanager
def _ended_after(cpu_s: float) -> Iterator[Callable[[], float]]:
    """The kernel ends the process if what is done here takes more CPU time. Yields what it took."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield lambda: time.process_time() - began
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Matchers:
    """The matchers of the grammar, by the ids that the engine gives them."""

    def __init__(self, grammar: CompiledGrammar, vocabulary: Vocabulary, settings: Settings) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._settings = settings
        self._accounts: dict[int, _Account] = {}
        self._words = np.zeros(vocabulary.num_words, dtype=np.int32)

    def run(self, engine: socket.socket, frames: Frames[ToGrammar]) -> None:
        """Serves until the engine closes the socket. Nothing is sent before the engine has asked for it."""
        with _limits(0, self._settings.match_bytes):
            while data := engine.recv(_CHUNK):
                for message in frames.feed(data):
                    match message:
                        case Open(matcher_id, token_ids, share_s):
                            self._accounts[matcher_id] = _Account(self._grammar.matcher(), self._settings.match_s)
                            self._answer(engine, [(matcher_id, token_ids)], share_s)
                        case Accept(token_ids_by_matcher, share_s):
                            self._answer(engine, token_ids_by_matcher, share_s)
                        case LookAhead(matcher_id, token_ids, share_s):
                            engine.sendall(frame(self._look_ahead(matcher_id, token_ids, share_s)))
                        case Close(matcher_id):
                            self._accounts.pop(matcher_id, None)

    def _answer(self, engine: socket.socket, token_ids: list[tuple[int, list[int]]], share_s: float) -> None:
        """Follows tokens and sends masks: many at once, but none that is ready waits long for the others."""
        states: list[tuple[int, MatcherState]] = []
        words = bytearray()
        due = time.monotonic() + _HOLD_S
        for number, (matcher_id, added) in enumerate(token_ids, 1):
            account = self._accounts[matcher_id]
            if account.state == "following":
                self._follow(account, added, share_s)
            states.append((matcher_id, account.state))
            if account.state == "following":
                words += self._words.data
            if number == len(token_ids) or time.monotonic() > due:
                engine.sendall(frame(Masks(states, bytes(words))))
                states, words, due = [], bytearray(), time.monotonic() + _HOLD_S

    def _follow(self, account: _Account, token_ids: list[int], share_s: float) -> None:
        """Takes tokens and fills the mask."""
        with account.spending(share_s * max(1, len(token_ids))):
            if all(account.matcher.accept(token_id) for token_id in token_ids):
                account.matcher.fill(self._words)
            else:
                account.state = "lost"

    def _look_ahead(self, matcher_id: int, token_ids: list[int], share_s: float) -> Masks:
        """The masks after each of the tokens, which are not kept."""
        account = self._accounts[matcher_id]
        states: list[tuple[int, MatcherState]] = []
        words = bytearray()
        if account.state == "following" and account.ahead_left_s > 0:
            with account.looking_ahead(share_s * len(token_ids)):
                known = itertools.takewhile(self._vocabulary.may_be_allowed, token_ids)  # xgrammar warns of others
                for _ in itertools.takewhile(account.matcher.accept, known):
                    account.matcher.fill(self._words)
                    words += self._words.data
                    states.append((matcher_id, "following"))
                account.matcher.rollback(len(states))
        return Masks(states + [(matcher_id, "lost")] * (len(token_ids) - len(states)), bytes(words))
