"""When the holder of a lease renewed it, by its own clock, and how long it may trust a lease that it cannot reach."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.elastic.election import LEASE_S, RENEW_S, Deposed


class LeaseClock:
    """The times of a lease that a service keeps: `lease_s` without a renewal and it is over."""

    def __init__(
        self,
        *,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.lease_s, self.renew_s, self.now, self.sleep = lease_s, renew_s, clock, sleep
        self.renewed_s, self.tried_s = -1e9, -1e9

    def take_lease(self, asked_s: float) -> None:
        """The lease is ours, and runs from when we asked for it."""
        self.renewed_s = self.tried_s = asked_s

    def begin_renewal(self) -> bool:
        """Whether a renewal is due, at most one in `renew_s`; it counts from now once it has succeeded."""
        now = self.now()
        if now - self.tried_s < self.renew_s:
            return False
        self.tried_s = now
        return True

    def end_renewal(self) -> None:
        """The renewal that began last has succeeded."""
        self.renewed_s = self.tried_s

    def trust_lease(self, term: int) -> None:
        """Out of reach: nobody else can have taken the term before our lease is over. Raises Deposed when it is."""
        if self.now() - self.renewed_s > self.lease_s:
            raise Deposed(f"term {term} could not be renewed for {self.lease_s:g} s")
