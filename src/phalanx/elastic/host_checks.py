"""What an agent finds out about its own host: before it joins a run, and again before every membership."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from phalanx.elastic.bandwidth import measure
from phalanx.elastic.channel import Address
from phalanx.elastic.forked_check import ForkedCheck
from phalanx.elastic.preflight import LEAST_LINK_SHARE, check_between, expected_between, preflight, recheck
from phalanx.elastic.rank_slots import Slot
from phalanx.plan.plan import Plan
from phalanx.record.run import Run

Recheck = Callable[[int, int], Sequence[str]]  # of new processes, and of slots that had no rank yet, to problems


class HostChecks:
    """The problems found so far, and the check that is under way."""

    def __init__(self, run: Run, *, host: str, slots: int, address: str) -> None:
        self._run, self._host, self._slots, self._address = run, host, slots, address
        self.problems: list[str] = []  # they go along with every hello
        self.plan: Plan | None = None  # once we have looked
        self.link_bytes_per_s: float | None = None  # to the coordinator's host, once measured
        self.recheck: Recheck | None = None  # before every membership that this host is a member of
        self._check: ForkedCheck | None = None  # while it is at that

    def look(self, plan: Plan, *, quick: bool = False) -> None:
        """The preflight; `quick` leaves out what takes the machine for itself: another agent on it measures that."""
        found = preflight(plan=plan, run=self._run.path, slots=self._slots, address=self._address, quick=quick)
        self.problems = [problem.render() for problem in found]
        self.recheck, self.plan = partial(self._look_again, plan), plan

    def _look_again(self, plan: Plan, new_ranks: int, new_places: int) -> list[str]:
        found = recheck(
            plan=plan,
            run=self._run.path,
            slots=self._slots,
            new_ranks=new_ranks,
            new_places=new_places,
            address=self._address,
        )
        return [problem.render() for problem in found]

    def measure_link(self, where: Address, secret: bytes, *, is_off: Callable[[], bool]) -> None:
        """To another host, once, before we join it: up to then nothing waits for us, and this takes up to seconds."""
        plan = self.plan
        if plan is None or self.link_bytes_per_s is not None or where[0] == self._address:
            return
        enough = LEAST_LINK_SHARE * expected_between(plan)
        self.link_bytes_per_s = measure(
            where, secret, host=self._host, bind=self._address, enough=enough, is_off=is_off
        )
        if self.link_bytes_per_s is not None:
            found = check_between(plan, self.link_bytes_per_s, host=self._host)
            self.problems += [problem.render() for problem in found]

    def begin(self, members: Sequence[Slot], *, forget: Callable[[], None]) -> None:
        """Look at this host while its ranks leave what they did before; we are not ready before that is done.

        `forget` closes in the forked child what is only the agent's.
        """
        self.end()
        new_ranks, new_places = sum(not slot.seated for slot in members), sum(not slot.used for slot in members)
        for slot in members:
            slot.seated = slot.used = True
        if members and self.recheck is not None:
            self._check = ForkedCheck(partial(self.recheck, new_ranks, new_places), forget=forget)

    def end(self) -> None:
        """Whatever is under way is of no interest any more."""
        if self._check is not None:
            self._check.close()
            self._check = None

    def forget(self) -> None:
        """In a forked child: the check is its parent's."""
        if self._check is not None:
            self._check.forget()

    def is_done(self) -> bool:
        """Whether nothing is being checked any more; what was found is kept."""
        found = self._check.found() if self._check is not None else None
        if found is not None:
            self._check, self.problems = None, [*self.problems, *found]
        return self._check is None
