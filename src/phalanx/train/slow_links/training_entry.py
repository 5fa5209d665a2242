"""Entry of a peer's training into its group: joining, waiting for the other peers, and taking the group's state."""

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

POLL_S = 0.05  # between checks of the membership
# For the whole state; a peer that stalls is given up after `state_transfer.STALL_S`.
FETCH_S = 600.0


class TrainingEntry:
    """The entry of a peer's rank 0 into its group; the arguments are those of `PeerTraining`."""

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
        """Join the group through the known addresses.

        The peer founds the group if there are no addresses, or if no peer answers and it may found one.
        """
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
        """Join through one of the addresses; raises SystemFailure at once if this peer is asked to stop meanwhile."""
        answer: Future[MemberView] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._link.join(self._addresses, timeout_s=patience_s))
            except BaseException as error:
                answer.set_exception(error)

        # A daemon thread: after a stop the group is closed, and the call may never return.
        threading.Thread(target=ask, name="peer-join", daemon=True).start()
        while not answer.done():
            if self._stop():
                tried = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                problem = f"was stopped before a peer of the run had answered at {tried}"
                raise SystemFailure(Problem(where="join", what=problem, fix="join again when one of them is up"))
            wait((answer,), POLL_S)
        return answer.result()

    def wait_for_peers(self, round_number: int) -> None:
        """Wait until the job's number of peers is present, the group has begun to train, or patience has run out."""
        until_s = time.monotonic() + self._patience_s
        while time.monotonic() < until_s and not self._stop():
            view = self._link.view()
            if len(view.members) >= self._sync.peers or view.next_round > round_number:
                return
            time.sleep(POLL_S)

    def check_majority(self, round_number: int, members: Sequence[str]) -> None:
        """Raise SystemFailure unless a majority of a restarted peer's former members is present, or training on.

        Otherwise the others may be training where this peer cannot reach them, and the same rounds would be committed
        twice.
        """
        view, earlier = self._link.view(), [peer for peer in members if self._is_allowed(peer)]
        present = [member.id for member in view.members]
        if view.next_round > round_number or not earlier or is_majority(earlier, present) or self._stop():
            return
        raise SystemFailure(
            Problem(
                where="peers",
                what=f"{len(set(earlier) & set(present))} of the {plural(len(earlier), 'peer')} of the last round came "
                f"within {self._patience_s:g} s",
                why="the others may be training on where this peer cannot reach them",
                fix="start the others, or join one of them; for those gone for good, phalanx peers revoke RUN PEER",
            )
        )

    def fetch_state(self, most_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Fetch the state of this job's tensors from the group, repeatedly until patience has run out."""
        until_s = time.monotonic() + self._patience_s
        while True:
            tensors: dict[str, bytes] = {}
            try:
                self._link.fetch_state(tensors.__setitem__, timeout_s=FETCH_S, most_bytes=most_bytes)
                return tensors
            except SystemFailure:
                if time.monotonic() > until_s or self._stop():
                    raise
                time.sleep(POLL_S)
