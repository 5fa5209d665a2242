"""Carry out the actions of `decide` on the run folder and on the connections to the agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from phalanx.elastic import failure as failing
from phalanx.elastic.coordinator_plan import CoordinatorPlan
from phalanx.elastic.coordinator_state import (
    Action,
    AgentMessage,
    AgentMessages,
    BeginGeneration,
    CheckpointList,
    ClockTick,
    CoordinatorSettings,
    EndRun,
    Input,
    ListCheckpoints,
    MarkRunning,
    Message,
    RecordEvent,
    RecordEvidence,
    RollBack,
    SavedState,
    SaveState,
    Send,
)
from phalanx.elastic.decide import decide, initial_state
from phalanx.elastic.decision import FAILED
from phalanx.elastic.fence import begin_generation, current_generation
from phalanx.elastic.untrusted import UNTRUSTED, set_untrusted_aside, untrusted_steps
from phalanx.errors import SystemFailure
from phalanx.record.account.flight_records import find_culprit, read_flights, recorded_generations
from phalanx.record.events import EventWriter
from phalanx.record.run import Run

# Between checks for the stop file: it is on a disk that many hosts share.
LOOK_S = 1.0
# Ranks whose flight recorders are read while the run waits; with more ranks, reports read them later.
MOST_FLIGHTS = 2048


class Coordinator:
    """Owns the state of `decide`, passes messages to it, and carries out its actions.

    `check` raises when another process coordinates by now: called before actions that cannot be undone.
    """

    def __init__(
        self,
        run: Run,
        plan: CoordinatorPlan,
        send: Callable[[Send], None],
        events: EventWriter,
        *,
        saved: SavedState,
        save: Callable[[SavedState], None],
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._send, self._events, self._save, self._clock = run, send, events, save, clock
        self._check = check
        self._looked_s, self._recorded_evidence = -1e9, 0  # newest generation whose flight recorders were read
        launch = run.launch()
        hosts = tuple(str(name) for name in launch.get("hosts", ()))
        slots, spares = [int(count) for count in launch.get("slots", ())], launch.get("spares", ())
        settings = CoordinatorSettings(
            run_path=str(run.path),
            job=plan.job,
            planned=plan.layout,
            num_slots=sum(slots),
            num_hosts=max(len(hosts), int(launch.get("join") or 0)),
            first_spare={
                host: count - int(spare) for host, count, spare in zip(hosts, slots, spares, strict=False) if spare
            },
            prescribed=tuple(launch.get("formations", ())),
            num_plans=run.plan_count(),
            newest_generation=current_generation(run),
            rack_hosts=plan.rack_hosts,
            machines={str(host): str(machine) for host, machine in launch.get("machines", {}).items()},
        )
        self.state, actions = initial_state(settings, saved, hosts=hosts, now_s=clock(), unix_s=time.time())
        self._perform(actions)

    def hear(self, host: str, message: Message) -> None:
        """Decide on a message of an agent."""
        self._decide(AgentMessage(now_s=self._clock(), unix_s=time.time(), host=host, body=message))

    def hear_all(self, messages: Sequence[tuple[str, Message]]) -> None:
        """Decide on messages of several agents."""
        if messages:
            self._decide(AgentMessages(now_s=self._clock(), unix_s=time.time(), messages=messages))

    def tick(self) -> None:
        """Decide on what is due now; looks for the stop file once a second."""
        now, stop_file = self._clock(), False
        if now - self._looked_s >= LOOK_S:
            self._looked_s, stop_file = now, self._run.stop_file.exists()
        self._decide(ClockTick(now_s=now, unix_s=time.time(), stop_file=stop_file))

    def _decide(self, message: Input) -> None:
        self.state, actions = decide(self.state, message)
        if self._perform(actions):
            steps = tuple(self._run.saved_steps())
            self._decide(CheckpointList(now_s=self._clock(), unix_s=time.time(), steps=steps))

    def _perform(self, actions: list[Action]) -> bool:
        """Carry out the actions; True when the list of checkpoints is requested."""
        # Many hosts have joined.
        if len(actions) > 1 and all(isinstance(action, RecordEvent) for action in actions):
            self._events.write_all(
                (action.event, action.fields) for action in actions if isinstance(action, RecordEvent)
            )
            return False
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case RecordEvent():
                    self._events.write(action.event, **action.fields)
                case SaveState():
                    with self._last_words():
                        self._save(action.saved)
                case BeginGeneration():
                    self._check()
                    begin_generation(self._run, action.generation)
                case RecordEvidence():
                    self._record_evidence(action)
                case RollBack():
                    set_untrusted_aside(self._run, after=action.target)
                    self._record_rollback(action)
                case MarkRunning():
                    if self._run.status().get("state") != "running":
                        self._run.set_status("running", world=action.world, started=round(time.time(), 3))
                case EndRun():
                    self._check()
                    message, fields = complete_message(self._run, action)
                    with self._last_words():
                        ended = {"exit_code": action.exit_code, "message": message, **fields}
                        self._run.set_status(action.state, **ended)
                    if action.rollback is not None:
                        self._record_rollback(action.rollback)
                    self._events.write("end", epoch=action.generation, state=action.state, message=message)
                case ListCheckpoints():
                    # `ListCheckpoints` is always the last action.
                    return True
        return False

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """Ignore write errors once the run is over: the agents must be notified of the end, or they wait for ever.

        The launcher then finds that status.json does not contain the end, and reports that.
        """
        try:
            yield
        except (SystemFailure, OSError) as error:
            if not self.state.is_over:
                raise
            # The log is on the same disk.
            with suppress(OSError):
                print(f"how the run ended could not be written: {error}", file=sys.stderr)

    def _record_rollback(self, action: RollBack) -> None:
        """Record the step to which the run rolls back, and the checkpoints that were set aside."""
        self._events.write(
            "rollback",
            epoch=action.generation,
            step=action.step,
            target=action.target,
            reason=action.reason,
            set_aside=untrusted_steps(self._run, after=action.target),
        )

    def _record_evidence(self, action: RecordEvidence) -> None:
        """Record where the surviving ranks were, after they have left the membership that failed.

        The last membership that trained need not be the one before this: some may have failed before they began.
        """
        recorded = recorded_generations(self._run)
        new = [generation for generation in recorded if self._recorded_evidence < generation < action.generation]
        self._recorded_evidence = max(new, default=self._recorded_evidence)
        culprit = find_culprit(read_flights(self._run, new[0], most=MOST_FLIGHTS)) if new else None
        if action.last_collectives or culprit is not None:
            fields = {"finding": culprit.sentence, "culprits": list(culprit.culprits)} if culprit is not None else {}
            generation = new[0] if new else action.generation - 1
            self._events.write("evidence", epoch=generation, last_collectives=action.last_collectives, **fields)


def complete_message(run: Run, end: EndRun) -> tuple[str, Mapping[str, Any]]:
    """Return the final message of a run, with the checkpoint from which it can be resumed.

    The second value holds more fields for its status.
    """
    if end.how == "plain":
        return end.message, {}
    aside = ""
    if end.at_most is not None:
        # From here on no rank commits.
        begin_generation(run, end.generation + 1)
        aside = set_aside_text(run, after=end.at_most)
    more = f"\n  {aside}" if aside else ""
    if end.given_up is not None:
        given_up = end.given_up
        message = failing.tell(
            run,
            given_up.cause,
            others=given_up.others,
            world=given_up.world,
            out_of_memory=given_up.out_of_memory,
            host=given_up.host,
            at_most=end.at_most,
        )
        why_text = f"\n  given up: {given_up.why}" if given_up.why else ""
        return f"{message}{more}{why_text}", {
            "rank": given_up.cause.rank,
            "step": given_up.cause.step,
            "cause": given_up.cause.kind,
        }
    saved = failing.last_checkpoint(run, at_most=end.at_most)
    resume = f"resume with: phalanx train --resume {run.path}"
    # Exit code 130 means that all went as requested: a run that was to save before it stopped, and could not, has
    # failed in that. The second Ctrl-C asks to stop without saving.
    lost = failing.unsaved_steps(run, saved) if end.how in ("killed", "killed at once", "stopped") else ""
    code = {"exit_code": FAILED} if lost and end.how != "killed at once" else {}
    if end.how in ("killed", "killed at once"):
        checkpoint_text = f"the last checkpoint is step {saved:,}" if saved is not None else "no checkpoint was written"
        return "; ".join(filter(None, (end.message, f"{checkpoint_text}{more}", lost))), {"step": saved, **code}
    if end.how == "unfit":
        checkpoint_text = f"\n  last good checkpoint: step {saved:,}; {resume}" if saved is not None else ""
        return f"{end.message}{checkpoint_text}{more}", {}
    if end.how == "stopped":
        checkpoint_text = f"saved step {saved:,}" if saved is not None else "nothing was saved"
        return "; ".join(filter(None, (f"stopped as asked: {checkpoint_text}", lost, resume))), {"step": saved, **code}
    return "", {"step": saved}


def set_aside_text(run: Run, *, after: int) -> str:
    """Set the checkpoints of more than `after` steps aside and return a text that names them.

    The text is empty when there are none.
    """
    set_untrusted_aside(run, after=after)
    steps, root = untrusted_steps(run, after=after), run.checkpoints
    if not steps:
        return ""
    named = ", ".join(f"{step:,}" for step in steps)
    if isinstance(root, str):
        return f"saved after that and not to be trusted: step {named} in {root}; delete them before --resume"
    return f"saved after that and not to be trusted: step {named}, now called {UNTRUSTED}step-… in {root}"
