"""The registry of transfers: who waits for whom, for how long, and when a transfer is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from common.pod.admission import Admission
from common.types import SampledToken, TransferId
from prefill_service.transfers import Reservation, Transfer, TransferKey, TransferRegistry
from tests.unit.decode_service.simulation import VirtualLoop

LEASE_S = 30.0
KEY = TransferKey(TransferId("t"), 1)
TOKEN = SampledToken(7)
RESERVATION = Reservation(num_held_tokens=0, block_ids=(1, 2), address=b"there")


class Prefill:
    """A ProducingLeg that fails its transfer at once when it is cancelled."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.transfer: Transfer | None = None
        self.reservations: list[Reservation] = []

    def cancel(self, error: BatonError) -> None:
        assert self.transfer is not None
        self._pod.registry.fail(self.transfer, error)

    def take_reservation(self, reservation: Reservation) -> None:
        self.reservations.append(reservation)


class Pod:
    """A registry on a loop whose clock the test moves."""

    def __init__(self, *, is_direct: bool = False, max_transfers: int = 8) -> None:
        self.loop = VirtualLoop()
        self.admission = Admission(100)
        self.registry = TransferRegistry(
            self.admission, max_transfers=max_transfers, lease_s=LEASE_S, is_direct=is_direct
        )

    def consumer(self, key: TransferKey = KEY) -> Transfer:
        return self.loop.do(lambda: self.registry.attach_consumer(key))

    def producer(self, key: TransferKey = KEY) -> Transfer:
        prefill = Prefill(self)
        prefill.transfer = self.loop.do(lambda: self.registry.attach_producer(key, prefill))
        return prefill.transfer

    def do(self, name: str, *args: object) -> None:
        self.loop.do(lambda: getattr(self.registry, name)(*args))


@pytest.fixture
def pod() -> Iterator[Pod]:
    pod = Pod()
    yield pod
    assert pod.registry.violations() == []
    pod.loop.close()


@pytest.fixture
def direct() -> Iterator[Pod]:
    pod = Pod(is_direct=True)
    yield pod
    pod.loop.close()


def outlives(pod: Pod, seconds: float) -> bool:
    """Whether the transfer is still undecided one second before `seconds` have passed, and decided then."""
    pod.loop.advance(seconds - 1)
    assert pod.registry.num_open == 1
    pod.loop.advance(1)
    return pod.registry.num_open == 0


def test_a_consumer_waits_for_the_prefill_as_long_as_the_lease(pod):
    transfer = pod.consumer()
    pod.loop.advance(LEASE_S / 2)
    pod.do("renew", transfer)  # renews nothing: it is the consumer that waits
    assert outlives(pod, LEASE_S / 2)
    assert isinstance(transfer.error, DeadlineExceededError)
    assert transfer.error.message == "no prefill request came within 30 s"
    assert pod.admission.num_open == 0
    with pytest.raises(DeadlineExceededError):
        pod.producer()
    pod.do("detach_consumer", transfer)
    assert len(pod.registry) == 1  # to refuse the prefill
    pod.loop.advance(LEASE_S)
    assert len(pod.registry) == 0


def test_a_prefill_may_take_its_time_until_the_first_token(pod):
    pod.consumer()
    transfer = pod.producer()
    pod.loop.advance(100 * LEASE_S)
    assert not transfer.is_settled
    pod.do("note_first_token", transfer)
    assert outlives(pod, LEASE_S)
    assert transfer.error is not None
    assert transfer.error.message == "no KV was saved for 30 s"


def test_each_save_after_the_first_token_renews_the_lease(pod):
    pod.consumer()
    transfer = pod.producer()
    pod.do("note_ready", transfer, 4)
    assert transfer.lease is None  # before the first token there is none
    pod.do("note_first_token", transfer)
    pod.loop.advance(LEASE_S / 2)
    pod.do("note_ready", transfer, 8)
    pod.loop.advance(LEASE_S / 2)
    pod.do("note_ready", transfer, 8)  # no news
    assert outlives(pod, LEASE_S / 2)
    assert transfer.num_ready_tokens == 8


def test_blocks_of_a_direct_consumer_are_waited_for_while_it_renews(direct):
    direct.consumer()
    transfer = direct.producer()
    direct.do("note_first_token", transfer)
    for _ in range(3):
        direct.loop.advance(LEASE_S / 2)
        direct.do("renew", transfer)
    assert outlives(direct, LEASE_S)
    assert transfer.error is not None
    assert transfer.error.message == "the decode pod reserved no blocks for 30 s"


def test_with_its_blocks_a_direct_consumer_waits_for_saves_only(direct):
    direct.consumer()
    transfer = direct.producer()
    direct.do("note_first_token", transfer)
    direct.loop.advance(LEASE_S / 2)
    direct.do("reserve", transfer, RESERVATION)  # the writes begin now
    direct.loop.advance(LEASE_S / 2)
    direct.do("renew", transfer)
    assert outlives(direct, LEASE_S / 2)
    assert transfer.error is not None
    assert transfer.error.message == "no KV was saved for 30 s"


def test_a_reservation_before_the_first_token_begins_no_lease(direct):
    transfer = direct.producer()
    direct.consumer()
    prefill = transfer.producer
    direct.do("reserve", transfer, RESERVATION)
    direct.do("renew", transfer)
    assert transfer.lease is None
    assert prefill.reservations == [RESERVATION]
    with pytest.raises(InvalidRequestError):
        direct.do("reserve", transfer, RESERVATION)


def test_a_delivery_waits_for_its_consumer(pod, caplog):
    transfer = pod.producer()
    pod.do("deliver", transfer, TOKEN)
    pod.loop.advance(LEASE_S - 1)
    assert pod.consumer() is transfer
    pod.loop.advance(100 * LEASE_S)  # it is being told, however long that takes
    assert len(pod.registry) == pod.admission.num_open == 1
    pod.do("detach_consumer", transfer)
    assert len(pod.registry) == pod.admission.num_open == 0
    assert not caplog.records


def test_a_delivery_that_nobody_fetches_is_forgotten_with_a_warning(pod, caplog):
    pod.do("deliver", pod.producer(), TOKEN)
    pod.loop.advance(LEASE_S)
    assert len(pod.registry) == pod.admission.num_open == 0
    assert [record.message for record in caplog.records] == [
        "transfer t/1: no decode pod asked for it within 30 s",
    ]


def test_a_failure_that_nobody_fetches_is_forgotten_without_one(pod, caplog):
    pod.do("fail", pod.producer(), UnavailableError("no"))
    pod.loop.advance(LEASE_S)
    assert len(pod.registry) == pod.admission.num_open == 0
    assert not caplog.records


def test_the_first_verdict_counts(pod):
    pod.consumer()
    failed = pod.producer()
    pod.do("fail", failed, UnavailableError("first"))
    pod.do("fail", failed, UnavailableError("second"))
    pod.do("deliver", failed, TOKEN)
    pod.do("note_ready", failed, 4)
    pod.do("note_first_token", failed)
    assert failed.error is not None
    assert (failed.error.message, failed.first_token, failed.num_ready_tokens) == ("first", None, 0)
    assert (failed.lease, pod.admission.num_open) == (None, 0)
    pod.do("detach_consumer", failed)
    assert len(pod.registry) == 0


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_consumer_that_leaves_ends_the_prefill_of_a_direct_connector_only(is_direct):
    pod = Pod(is_direct=is_direct)
    pod.consumer()
    transfer = pod.producer()
    pod.do("detach_consumer", transfer)
    assert transfer.is_settled == is_direct
    assert len(pod.registry) == (0 if is_direct else 1)
    pod.do("deliver", transfer, TOKEN)
    assert len(pod.registry) == pod.admission.num_open == 0
    pod.loop.close()


def test_a_consumer_that_leaves_before_any_prefill_is_forgotten(pod):
    pod.do("detach_consumer", pod.consumer())
    assert len(pod.registry) == pod.admission.num_open == 0
    assert pod.producer() is pod.consumer()


def test_either_side_may_come_once(pod):
    pod.consumer()
    pod.producer()
    for attach in (pod.consumer, pod.producer):
        with pytest.raises(InvalidRequestError):
            attach()
    assert pod.producer(TransferKey(KEY.transfer_id, 2))  # another attempt


def test_a_draining_pod_takes_only_consumers_that_it_knows(pod):
    transfer = pod.producer()
    pod.admission.draining = True
    assert pod.consumer() is transfer
    with pytest.raises(UnavailableError):
        pod.consumer(TransferKey(KEY.transfer_id, 2))


def test_room_is_made_by_forgetting_the_oldest_failure_that_nobody_is_being_told(pod):
    pod.registry._max_transfers = 3
    keys = [TransferKey(TransferId(name), 1) for name in "abcde"]
    told = pod.consumer(keys[0])
    pod.do("cancel", told, RequestCancelledError("no"))
    for key in keys[1:3]:
        pod.do("fail", pod.producer(key), UnavailableError("no"))
    pod.producer(keys[3])  # in place of the second
    assert pod.consumer(keys[2]).error is not None
    with pytest.raises(OverloadedError, match="3 transfers are open"):
        pod.producer(keys[4])
    pod.do("detach_consumer", told)
    pod.producer(keys[4])
    assert pod.admission.num_open == pod.registry.num_open == 2


def test_closing_fails_what_is_open_and_tells_consumers(pod):
    fetched, unfetched, told = (TransferKey(TransferId(name), 1) for name in "abc")
    pod.consumer(fetched)
    transfer = pod.producer(fetched)
    pod.do("deliver", pod.producer(unfetched), TOKEN)
    waiting = pod.consumer(told)
    pod.do("close")
    for each in (transfer, waiting):
        assert isinstance(each.error, UnavailableError)
        assert each.is_quiescent
        assert each.changed.is_set()
    assert len(pod.registry) == pod.admission.num_open == 0


def test_a_delivery_that_is_being_told_while_the_pod_closes_counts_once(pod):
    pod.consumer()
    transfer = pod.producer()
    pod.do("deliver", transfer, TOKEN)
    pod.do("close")
    assert len(pod.registry) == pod.admission.num_open == 0
    pod.do("detach_consumer", transfer)
    assert pod.admission.num_open == 0


def test_closing_waits_for_writes_but_not_for_ever(direct):
    direct.consumer()
    transfer = direct.producer()
    transfer.producer.cancel = lambda _: None  # type: ignore[method-assign, union-attr]  # it still writes
    direct.do("close")
    assert (transfer.is_settled, len(direct.registry)) == (False, 1)
    direct.do("forget")
    assert transfer.is_settled
    assert not transfer.is_quiescent
    assert len(direct.registry) == direct.admission.num_open == 0


def test_what_settles_after_closing_is_kept_for_nobody(direct):
    transfer = direct.producer()
    transfer.producer.cancel = lambda _: None  # type: ignore[method-assign, union-attr]  # it still writes
    direct.do("close")
    direct.do("fail", transfer, UnavailableError("it no longer writes"))
    assert len(direct.registry) == direct.admission.num_open == 0


def test_a_transfer_that_is_never_removed_is_a_violation(direct):
    transfer = direct.producer()
    assert direct.registry.violations() == []
    transfer.producer = None
    assert direct.registry.violations() == [
        "transfer t/1 has neither a lease nor a producer, so it will never be removed"
    ]
    direct.consumer()
    assert direct.registry.violations() == []
    transfer.consumer_left = True
    assert direct.registry.violations() == [
        "transfer t/1 has neither a lease nor a producer, so it will never be removed"
    ]
