"""How a peer's training enters its group: whom it joins, who must be there before it trains, whose state it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from phalanx.errors import Problem, SystemFailure
from phalanx.job.sync_section import SyncSettings
from phalanx.peers.facts import Address, MemberView
from phalanx.peers.view_agreement import is_majority
from phalanx.train.slow_links.peer_exchange import GroupLink
from phalanx.units import plural

POLL_S = 0.05  # between looks at who has joined
FETCH_S = 600.0  # for the whole state; a peer that stalls is given up much earlier


class TrainingEntry:
    """Of rank 0 of a peer; the arguments are those of `PeerTraining`."""

    def __init__(
        self,
        link: GroupLink,
        sync: SyncSettings,
        *,
        addresses: Sequence[Address],
        founds: bool,
        is_allowed: Callable[[str], bool],
        stop: Callable[[], bool],
        patience_s: float,
    ) -> None:
        self._link, self._sync, self._addresses = link, sync, tuple(addresses)
        self._founds, self._is_allowed = founds or not addresses, is_allowed
        self._stop, self._patience_s = stop, patience_s

    def join_group(self, round_number: int) -> MemberView:
        """Join where others may be; found the group where there are none, or nobody answers and this peer may."""
        link = self._link
        if self._addresses:
            try:
                patience_s = 2 * self._sync.dead_after_s if self._founds else self._patience_s
                return self._join_until_stopped(patience_s)
            except SystemFailure:
                if not self._founds or self._stop():
                    raise
        return link.join((), first_round=round_number)

    def _join_until_stopped(self, patience_s: float) -> MemberView:
        """Join through one of the addresses; whoever is asked to stop meanwhile does not wait for an answer."""
        answer: Future[MemberView] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._link.join(self._addresses, timeout_s=patience_s))
            except BaseException as error:
                answer.set_exception(error)

        # A daemon: closing the group, which follows a stop, leaves the call without an answer.
        threading.Thread(target=ask, name="peer-join", daemon=True).start()
        while not answer.done():
            if self._stop():
                tried = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                what = f"was stopped before a peer of the run had answered at {tried}"
                raise SystemFailure(Problem(where="join", what=what, fix="join again when one of them is up"))
            wait((answer,), POLL_S)
        return answer.result()

    def wait_for_peers(self, round_number: int) -> None:
        """Until as many are here as the job says, the group has begun, or patience is at its end."""
        until_s = time.monotonic() + self._patience_s
        while time.monotonic() < until_s and not self._stop():
            view = self._link.view()
            if len(view.members) >= self._sync.peers or view.next_round > round_number:
                return
            time.sleep(POLL_S)

    def check_majority(self, round_number: int, members: Sequence[str]) -> None:
        """Raise SystemFailure unless most of those that a restarted peer was with are here, or already train on.

        Else the others may be training where it cannot reach them, and the same rounds would be committed twice.
        """
        view, known = self._link.view(), [one for one in members if self._is_allowed(one)]
        here = [one.id for one in view.members]
        if view.next_round > round_number or not known or is_majority(known, here) or self._stop():
            return
        raise SystemFailure(
            Problem(
                where="peers",
                what=f"{len(set(known) & set(here))} of the {plural(len(known), 'peer')} of the last round came "
                f"within {self._patience_s:g} s",
                why="the others may be training on where this peer cannot reach them",
                fix="start the others, or join one of them; for those gone for good, phalanx peers revoke RUN PEER",
            )
        )

    def fetch_state(self, most_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """From whoever has it, of this job's tensors; a group that cannot be reached is asked again for a while."""
        until_s = time.monotonic() + self._patience_s
        while True:
            found: dict[str, bytes] = {}
            try:
                self._link.fetch_state(found.__setitem__, timeout_s=FETCH_S, most_bytes=most_bytes)
                return found
            except SystemFailure:
                if time.monotonic() > until_s or self._stop():
                    raise
                time.sleep(POLL_S)
