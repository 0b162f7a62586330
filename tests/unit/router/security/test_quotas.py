"""Rates and concurrency of one key, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.errors import InvalidRequestError, OverloadedError
from router.security.buckets import TokenBucket
from router.security.keys import Quota
from router.security.metrics import SecurityMetrics
from router.security.quotas import Account


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def account(clock):
    def make(**quota):
        return Account("a", Quota(**quota), SecurityMetrics(CollectorRegistry()), clock)

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
    assert bucket.wait_s(1, now=999) == 2  # a clock that goes back gives nothing


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
