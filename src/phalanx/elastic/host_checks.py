"""The checks that an agent makes of its own host: before it joins a run, and again before every membership."""

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

# Maps (new processes, slots that had no rank yet) to problems.
Recheck = Callable[[int, int], Sequence[str]]


class HostChecks:
    """The problems found so far, and the check that is under way."""

    def __init__(self, run: Run, *, host: str, slots: int, address: str) -> None:
        self._run, self._host, self._slots, self._address = run, host, slots, address
        self.problems: list[str] = []  # sent with every hello
        self.plan: Plan | None = None  # set by `look`
        # Bytes per second to the coordinator's host, once measured.
        self.link_bytes_per_s: float | None = None
        # Run before every membership that has a rank on this host.
        self.recheck: Recheck | None = None
        self._check: ForkedCheck | None = None  # the recheck in progress

    def look(self, plan: Plan, *, quick: bool = False) -> None:
        """Run the preflight.

        `quick` leaves out measurements that need the machine alone: another agent on it makes them.
        """
        problems = preflight(plan=plan, run=self._run.path, slots=self._slots, address=self._address, quick=quick)
        self.problems = [problem.render() for problem in problems]
        self.recheck, self.plan = partial(self._look_again, plan), plan

    def _look_again(self, plan: Plan, new_ranks: int, new_places: int) -> list[str]:
        problems = recheck(
            plan=plan,
            run=self._run.path,
            slots=self._slots,
            new_ranks=new_ranks,
            new_places=new_places,
            address=self._address,
        )
        return [problem.render() for problem in problems]

    def measure_link(self, where: Address, secret: bytes, *, is_off: Callable[[], bool]) -> None:
        """Measure the link to another host once, before this host joins: nothing waits for these seconds yet."""
        plan = self.plan
        if plan is None or self.link_bytes_per_s is not None or where[0] == self._address:
            return
        enough = LEAST_LINK_SHARE * expected_between(plan)
        self.link_bytes_per_s = measure(
            where, secret, host=self._host, bind=self._address, enough=enough, is_off=is_off
        )
        if self.link_bytes_per_s is not None:
            problems = check_between(plan, self.link_bytes_per_s, host=self._host)
            self.problems += [problem.render() for problem in problems]

    def begin(self, members: Sequence[Slot], *, forget: Callable[[], None]) -> None:
        """Begin to check this host while its ranks leave the membership before; it is not ready until that is done.

        `forget` closes, in the forked child, what belongs to the agent alone.
        """
        self.end()
        new_ranks, new_places = sum(not slot.seated for slot in members), sum(not slot.used for slot in members)
        for slot in members:
            slot.seated = slot.used = True
        if members and self.recheck is not None:
            self._check = ForkedCheck(partial(self.recheck, new_ranks, new_places), forget=forget)

    def end(self) -> None:
        """Stop the check that is under way; its result is no longer needed."""
        if self._check is not None:
            self._check.close()
            self._check = None

    def forget(self) -> None:
        """Close this forked child's copy of the check; it belongs to the parent."""
        if self._check is not None:
            self._check.forget()

    def is_done(self) -> bool:
        """True when no check is under way; the problems it found are added to `problems`."""
        new_problems = self._check.found() if self._check is not None else None
        if new_problems is not None:
            self._check, self.problems = None, [*self.problems, *new_problems]
        return self._check is None
