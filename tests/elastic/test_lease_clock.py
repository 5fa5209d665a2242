"""When a lease is renewed, and how long its holder trusts it, by a clock that is moved by hand."""

from __future__ import annotations

import pytest

from phalanx.elastic.election import LEASE_S, RENEW_S, Deposed
from phalanx.elastic.lease_clock import LeaseClock


class Clock:
    """A lease of 10 s that is renewed every 2 s."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lease = LeaseClock(lease_s=10.0, renew_s=2.0, clock=lambda: self.now_s)

    def is_trusted(self) -> bool:
        try:
            self.lease.trust_lease(7)
        except Deposed:
            return False
        return True


def test_a_lease_that_was_never_taken_is_due_and_not_trusted() -> None:
    clock = Clock()
    clock.now_s = 0.0  # of a machine that has just started
    assert not clock.is_trusted()
    assert clock.lease.begin_renewal()


def test_a_renewal_is_tried_once_in_a_while_whether_it_succeeds_or_not() -> None:
    clock = Clock()
    clock.lease.take_lease(99.0)
    due = []
    for now_s in (100.0, 100.75, 101.0, 101.0, 102.75, 103.0, 104.0, 105.5):
        clock.now_s = now_s
        due.append(clock.lease.begin_renewal())
    assert due == [False, False, True, False, False, True, False, True]


def test_a_lease_is_trusted_for_its_time_from_when_the_last_renewal_that_succeeded_was_asked_for() -> None:
    clock = Clock()
    clock.lease.take_lease(99.0)
    for now_s, is_trusted in ((100.0, True), (109.0, True), (109.125, False)):
        clock.now_s = now_s
        assert clock.is_trusted() == is_trusted
    clock.now_s = 105.0
    assert clock.lease.begin_renewal()
    clock.now_s = 106.0
    clock.lease.end_renewal()  # the answer came late: the service counts from when it was asked
    clock.now_s = 107.0
    assert clock.lease.begin_renewal()  # and fails
    for now_s, is_trusted in ((115.0, True), (115.125, False)):
        clock.now_s = now_s
        assert clock.is_trusted() == is_trusted


def test_several_renewals_fit_into_a_lease() -> None:
    assert 2 * RENEW_S < LEASE_S
    with pytest.raises(Deposed, match=f"^term 7 could not be renewed for {LEASE_S:g} s$"):
        LeaseClock(clock=lambda: 0.0).trust_lease(7)
