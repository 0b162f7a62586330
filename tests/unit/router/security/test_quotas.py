"""Rates and concurrency of one key, by a clock of the test's own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.errors import InvalidRequestError, OverloadedError
from router.metrics import SecurityMetrics
from router.security.buckets import TokenBucket
from router.security.keys import Quota
from router.security.quotas import Account
from router.security.usage import LocalUsage, SharedUsage

COUNTING = tuple(f"router/security/{name}.py" for name in ("buckets", "quotas", "usage"))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def workers(clock):
    """A function that gives one tenant's accounts in two workers, and what counts for both."""
    metrics = SecurityMetrics(CollectorRegistry())
    descriptor = SharedUsage.create(2)
    usages = [SharedUsage(os.dup(descriptor), 2, own) for own in range(2)]

    def make(name="a", **quota):
        return *(Account(name, Quota(**quota), metrics, usage, clock) for usage in usages), usages[0]

    return make


@pytest.fixture
def account(clock):
    def make(**quota):
        return Account("a", Quota(**quota), SecurityMetrics(CollectorRegistry()), LocalUsage(), clock)

    return make


def refused(account, num_generations=1):
    with pytest.raises(OverloadedError) as caught, account.admit(num_generations):
        pass
    return caught.value.retry_after_s


def test_a_bucket_gains_evenly_up_to_a_minutes_amount():
    bucket = TokenBucket(60, now=0)
    assert bucket.wait_s(60, now=0) == 0
    bucket.take(60, now=0)
    assert bucket.wait_s(1, now=0) == 1
    assert bucket.wait_s(1, now=0.5) == 0.5
    assert bucket.wait_s(60, now=1000) == 0
    assert bucket.wait_s(90, now=1000) == 0  # more than it ever holds: full is enough
    bucket.take(61, now=1000)
    assert bucket.wait_s(1, now=1000) == 2
    assert bucket.wait_s(1, now=999) >= 2  # a clock that goes back gives nothing


def test_requests_per_minute(account, clock):
    account = account(requests_per_minute=2)
    for _ in range(2):
        with account.admit(1):
            pass
    assert refused(account) == 30
    clock.now += 29
    assert refused(account) == 1
    clock.now += 1  # as it was told
    with account.admit(1):
        pass
    assert refused(account) == 30  # what was refused has cost nothing


def test_less_than_one_request_per_minute(account, clock):
    account = account(requests_per_minute=0.5)
    with account.admit(1):
        pass
    assert refused(account) == 120
    clock.now += 120
    with account.admit(1):
        pass


def test_tokens_per_minute_are_counted_when_they_are_known(account, clock):
    account = account(tokens_per_minute=60)
    with account.admit(1):
        account.spend(100)
    assert refused(account) == 41
    clock.now += 41
    with account.admit(1):
        pass


def test_output_tokens_count_even_if_the_request_fails(account):
    fresh, resumed = SimpleNamespace(num_tokens=0), SimpleNamespace(num_tokens=100)
    account = account(tokens_per_minute=60)

    def fail():
        fresh.num_tokens, resumed.num_tokens = 30, 130
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), account.spending([fresh, resumed]):
        fail()
    assert refused(account) == 1


def test_concurrency_counts_each_choice(account):
    account = account(max_concurrent=3)
    with account.admit(2):
        refused(account, 2)
        with account.admit(1):
            refused(account)
    with account.admit(3):
        pass


def test_choices_are_counted_once_it_is_known_how_many(account):
    account = account(max_concurrent=4, requests_per_minute=5)
    with account.admit():
        with account.admit(), account.admit_choices(2):
            with account.admit_choices(2):  # of the first
                refused(account)
            with account.admit():
                pass
            with pytest.raises(OverloadedError), account.admit_choices(3):
                pass
        with account.admit_choices(4):
            refused(account)
        with pytest.raises(InvalidRequestError), account.admit_choices(5):
            pass
        with account.admit(3):
            pass
    with account.admit(4):
        pass
    assert refused(account) == 12  # each request was counted once


def test_more_choices_than_may_ever_run_are_no_matter_of_time(account):
    with pytest.raises(InvalidRequestError) as caught, account(max_concurrent=3).admit(4):
        pass
    assert caught.value.param == "n"


def test_retry_after_of_concurrency_follows_how_long_requests_take(account, clock):
    account = account(max_concurrent=2)
    for _ in range(50):
        with account.admit(1):
            clock.now += 20
    with account.admit(1), account.admit(1):
        assert refused(account) == 10  # two of 20 s run: one ends every 10 s
    for _ in range(50):
        with account.admit(1):
            clock.now += 1000
    with account.admit(2):
        assert refused(account) == 60


def test_a_new_quota_holds_at_once(account):
    account = account(max_concurrent=1)
    with account.admit(1):
        account.set_quota(Quota(max_concurrent=2))
        with account.admit(1):
            refused(account)


def test_workers_share_a_quota_of_requests_and_its_recovery(workers, clock):
    first, second, _ = workers(requests_per_minute=2)
    for account in (first, second):
        with account.admit(1):
            pass
    assert (refused(first), refused(second)) == (30, 30)
    clock.now += 30
    with second.admit(1):
        pass
    assert refused(first) == 30


def test_workers_share_a_quota_of_tokens(workers):
    first, second, _ = workers(tokens_per_minute=60)
    second.spend(100)
    assert refused(first) == 41


def test_workers_share_concurrency_and_a_dead_one_holds_none(workers):
    first, second, usage = workers(max_concurrent=3)
    dying = first.admit(2)
    dying.__enter__()
    with second.admit(1):
        refused(second)
        usage.forget_worker(0)
        with second.admit(2):
            refused(first)


def test_tenants_of_workers_are_told_apart_in_whatever_order_they_come(workers):
    a, other_a, _ = workers("a", max_concurrent=1)
    _, b, _ = workers("b", max_concurrent=1)
    with a.admit(1), b.admit(1):
        refused(other_a)


def test_a_worker_that_reads_the_keys_later_does_not_fill_the_bucket_again(workers):
    first, second, _ = workers(requests_per_minute=1)
    quota = Quota(requests_per_minute=2)
    first.set_quota(quota)
    for _ in range(2):
        with first.admit(1):
            pass
    second.set_quota(quota)
    refused(second)


def test_a_rate_that_comes_back_begins_with_a_full_bucket_whoever_missed_the_change(workers, clock):
    first, second, _ = workers(requests_per_minute=2)
    for account in (first, second):
        with account.admit(1):
            pass
    first.set_quota(Quota(requests_per_minute=100))
    for _ in range(50):
        with first.admit(1):
            pass
    first.set_quota(Quota(requests_per_minute=2))
    clock.now += 60
    for account in (first, second):
        with account.admit(1):
            pass
    assert (refused(first), refused(second)) == (30, 30)


def test_a_worker_that_is_started_again_goes_on_with_what_its_predecessor_took(clock):
    descriptor = SharedUsage.create(2)
    accounts = [
        Account("a", Quota(tokens_per_minute=60), SecurityMetrics(CollectorRegistry()), usage, clock)
        for usage in (SharedUsage(os.dup(descriptor), 2, own) for own in (0, 0, 1))
    ]
    for account in accounts:
        account.spend(60)
    assert [refused(account) for account in accounts] == [121, 121, 121]


class Interruption:
    """Has `call` run once before line number `at_line` of those by which workers count; a context."""

    def __init__(self, at_line, call):
        self.num_lines = 0
        self._at_line = at_line
        self._call = call

    def __enter__(self):
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._previous)

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(COUNTING):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at_line:
                self._call()
        return self._trace


def test_the_last_place_is_never_given_to_two_workers(workers):
    """Whichever line the one has come to when the other asks."""
    first, second, _ = workers(max_concurrent=1, requests_per_minute=1_000)
    outcomes = []
    running = ExitStack()

    def admit(account, worker):
        with suppress(OverloadedError):
            running.enter_context(account.admit(1))
            outcomes[-1] += worker

    for at_line in range(1, 1000):
        outcomes.append("")
        with running, Interruption(at_line, lambda: admit(second, "second")) as interruption:
            admit(first, "first")
        if interruption.num_lines < at_line:
            break
    assert set(outcomes) == {"first", "second"}
    with first.admit(1):  # and nothing is left behind
        refused(second)


STOPPED_WHILE_COUNTING = f"""
import os, signal, sys
from prometheus_client import CollectorRegistry
from router.security.keys import Quota
from router.metrics import SecurityMetrics
from router.security.quotas import Account
from router.security.usage import SharedUsage

def trace(frame, event, _):
    if not frame.f_code.co_filename.endswith({COUNTING}):
        return None
    if event == "line":
        os.kill(os.getpid(), signal.SIGSTOP)
    return trace

usage, metrics = SharedUsage(int(sys.argv[1]), 2, 1), SecurityMetrics(CollectorRegistry())
quota = Quota(requests_per_minute=1e6, tokens_per_minute=1e6, max_concurrent=2)
sys.settrace(trace)
account = Account("a", quota, metrics, usage, lambda: 100.0)
with account.admit(1):
    account.spend(10)
"""


async def test_a_worker_that_is_stopped_while_it_counts_holds_up_no_other(clock):
    """It is stopped before each line by which it counts, as long as another serves a request."""
    descriptor = SharedUsage.create(2)
    quota = Quota(requests_per_minute=1e6, tokens_per_minute=1e6, max_concurrent=2)
    usage = SharedUsage(os.dup(descriptor), 2, 0)
    account = Account("a", quota, SecurityMetrics(CollectorRegistry()), usage, clock)

    def serve():
        account.set_quota(quota)
        with account.admit(1):
            account.spend(10)

    worker = subprocess.Popen(  # noqa: ASYNC220  (asyncio's own would take what waitpid tells)
        [sys.executable, "-c", STOPPED_WHILE_COUNTING, str(descriptor)], pass_fds=[descriptor]
    )
    num_stops = 0
    try:
        while os.WIFSTOPPED((await asyncio.to_thread(os.waitpid, worker.pid, os.WUNTRACED))[1]):
            await asyncio.wait_for(asyncio.to_thread(serve), 30)
            num_stops += 1
            worker.send_signal(signal.SIGCONT)
    finally:
        worker.kill()
        worker.wait()
    assert num_stops > 20
