"""The process of a one-rank peer: opens its group, trains, and leaves the group when asked to stop.

    python -m phalanx.train.slow_links.peer_worker RUN PARENT [--allow-code]

It ends when PARENT, the process that started it and waits for it, ends.

A peer that is a mesh has an agent and ranks as any run has; its rank 0 opens the group (train/worker.py).
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.elastic.rank_process import die_with
from phalanx.errors import PhalanxError
from phalanx.io.visible import visible
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, open_run
from phalanx.train.slow_links.peer_session import PeerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.record.events import EventWriter
    from phalanx.train.slow_links.peer_exchange import GroupLink
    from phalanx.train.slow_links.peer_training import PeerTraining


class PeerStop:
    """Signal handler: the first Ctrl-C or SIGTERM requests an end after the step, the second ends the process."""

    def __init__(self) -> None:
        self.stopping = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.stopping:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.stopping = True


def join_training(
    session: PeerSession | None, plan: Plan, events: EventWriter, stop: Callable[[], bool]
) -> PeerTraining:
    """Return the peer's callback for a rank whose process group exists; `session` is None on ranks other than 0."""
    from phalanx.train.slow_links.peer_training import PeerTraining

    patience_s = plan.job.comm.init_timeout_s
    if session is None:
        return PeerTraining(None, plan.job.sync, stop=stop, patience_s=patience_s)

    def tell(event: Any) -> None:
        events.write(
            "peer",
            step=max(0, training.step),
            kind=event.kind,
            text=event.text,
            peer=event.peer,
            name=event.name,
            round=event.round_number if event.round_number >= 0 else None,
        )

    training = PeerTraining(
        _drilled_group(session),
        plan.job.sync,
        addresses=session.addresses(),
        founds=not session.facts.addresses,
        is_allowed=session.is_allowed,
        stop=stop,
        patience_s=patience_s,
        is_drilled=session.run.launch().get("drill") is True,
    )
    session.tell_events(tell)
    session.more_status = training.status
    session.screen = training.score_update
    session.judge = training.judge_round
    return training


def _drilled_group(session: PeerSession) -> GroupLink:
    """Return the session's group, wrapped to inject faults if the run is a drill."""
    if session.run.launch().get("drill") is not True:
        return session.group
    from phalanx.train.drill.peer_inject import faulty_group

    return faulty_group(session.run, session.group)


def train_peer(run: Run, *, stop: Callable[[], bool], allow_code: bool = False) -> str:
    """Train in this process until the run is done or `stop` returns True; return the final state of the run."""
    plan = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    if run.launch().get("drill") is True:
        from phalanx.train.drill.peer_inject import shift_clocks

        shift_clocks(run)
    session = PeerSession(run, plan.job)
    try:
        # Imported after the group is open, because torch takes seconds to import.
        from phalanx.train.lone_rank import train_lone_rank

        return train_lone_rank(
            run,
            stop=stop,
            peers=lambda events: join_training(session, plan, events, stop),
            allow_code=allow_code,
            sharers=max(1, plan.job.sync.peers) if run.launch().get("is_trial") else 1,
        )
    finally:
        session.close()


def main(arguments: list[str]) -> int:
    """Train the peer of a run folder, and return the exit code of the process."""
    die_with(int(arguments[1]))
    requests = PeerStop()
    try:
        train_peer(
            open_run(arguments[0]), stop=partial(getattr, requests, "stopping"), allow_code="--allow-code" in arguments
        )
    except PhalanxError as error:
        print(visible(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
