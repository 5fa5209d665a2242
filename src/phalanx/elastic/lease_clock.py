"""The time since a lease was renewed, on its holder's clock, and for how long an unreachable lease may be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.elastic.election import LEASE_S, RENEW_S, Deposed


class LeaseClock:
    """The times of a lease that a service keeps: after `lease_s` without a renewal it is over."""

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
        """Note that this process holds the lease, from the time of its request on."""
        self.renewed_s = self.tried_s = asked_s

    def begin_renewal(self) -> bool:
        """Return True when a renewal is due, at most one in `renew_s`; `end_renewal` confirms it."""
        now = self.now()
        if now - self.tried_s < self.renew_s:
            return False
        self.tried_s = now
        return True

    def end_renewal(self) -> None:
        """Note that the renewal that began last has succeeded."""
        self.renewed_s = self.tried_s

    def trust_lease(self, term: int) -> None:
        """Trust the lease while its service is out of reach: no other process can take the term before it is over.

        Raises Deposed when it is over.
        """
        if self.now() - self.renewed_s > self.lease_s:
            raise Deposed(f"term {term} could not be renewed for {self.lease_s:g} s")
