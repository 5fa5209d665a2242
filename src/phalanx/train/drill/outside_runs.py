"""Drills of the suite `outside` that inject faults into a run while it trains."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.record.account.stragglers import straggler_scores
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import read_events
from phalanx.record.run import Run
from phalanx.train.drill.machine_faults import SmallDisk
from phalanx.train.drill.outside import OutsideDrill, OutsideFinding
from phalanx.train.drill.outside_stage import STEPS, OutsideStage
from phalanx.train.drill.perform import DrillResult
from phalanx.train.drill.step_history import DrillHistory
from phalanx.train.state.reader import verify_checkpoint

# Far longer than the lease (5 s), dead_after_s (5 s) and the start of a coordinator on a busy machine together.
FROZEN_S = 45.0
LONG_S = 3600  # seconds: longer than any of these runs
LEAST_DISK_BYTES = 1 << 20
# The name of the judge's verdict that expects a completed run.
ENDING = "the run ended well"
# Returns what is wrong beyond the judge's verdicts; empty when nothing is.
Expect = Callable[[DrillResult, DrillHistory], str]
# Enough for the replica to rejoin well before the end.
LEFT_OUT_STEPS = 120


def _judge_drill(found: tuple[DrillResult, DrillHistory], *expects: Expect, state: str = "done") -> OutsideFinding:
    """Require that all verdicts hold, that the run ended in `state`, and that every check in `expects` passes."""
    result, history = found
    verdicts = [verdict for verdict in result.verdicts if verdict.name != ENDING or state == "done"]
    wrong = [f"{verdict.name}: {verdict.evidence}" for verdict in verdicts if not verdict.ok]
    if result.state != state:
        message = f": {result.message.splitlines()[0]}" if result.message else ""
        wrong.insert(0, f"the run is {result.state}, not {state}{message}")
    wrong += [text for expect in expects if (text := expect(result, history))]
    lost = sum(outcome.steps_lost or 0 for outcome in result.outcomes)
    if lost:
        wrong.append(f"{lost} steps that memory held were lost")
    good = f"{state} after {len(history.chain)} steps"
    if any(verdict.name == "equal to a fault-free replay" for verdict in result.verdicts):
        good += ", every bit as without a fault"
    recovered = [outcome.recovered_s for outcome in result.outcomes if outcome.recovered_s is not None]
    if recovered:
        good += f", at work again after {max(recovered):.1f} s"
    return OutsideFinding(ok=not wrong, reason="; ".join(wrong) if wrong else good, steps_lost=lost)


# ---- control plane ---------------------------------------------------------------------------------------------------


def _frozen_coordinator(stage: OutsideStage) -> OutsideFinding:
    def went_on(result: DrillResult, history: DrillHistory) -> str:
        back_s = max((outcome.recovered_s or 0.0 for outcome in result.outcomes), default=0.0)
        return "" if 0.0 < back_s < FROZEN_S else "the others waited until the frozen host woke up"

    faults = [f"freeze:how=coordinator,for_s={FROZEN_S:g},step=6"]
    return _judge_drill(stage.drill(faults, hosts=2, steps=60), went_on)


def _lost_coordinator(stage: OutsideStage) -> OutsideFinding:
    def undisturbed(result: DrillResult, history: DrillHistory) -> str:
        return "" if len(history.generations) == 1 else f"{len(history.generations)} memberships where one was enough"

    return _judge_drill(stage.drill(["coordinator:step=8"], hosts=2), undisturbed)


def _lost_first_host(stage: OutsideStage) -> OutsideFinding:
    return _judge_drill(stage.drill(["host:host=0,step=8"], hosts=2))


# ---- state that memory holds -----------------------------------------------------------------------------------------


def _small_disk(stage: OutsideStage, stack: ExitStack, name: str, *, checkpoints: float) -> Path:
    """Mount a disk with room for so many checkpoints of the job; raises SystemFailure where mounting is not allowed."""
    run = stage.ended_run()
    newest = run.path / "checkpoints" / f"step-{max(run.saved_steps()):08d}"
    checkpoint_bytes = sum(path.stat().st_size for path in newest.iterdir())
    folder = stage.folder / f"disk-{name}"
    stack.enter_context(SmallDisk(folder, max(LEAST_DISK_BYTES, ceil(checkpoint_bytes * checkpoints))))
    return folder


def _written_elsewhere(result: DrillResult, history: DrillHistory) -> str:
    """Require that all steps were done, and that the last one is intact in the folder that the message names."""
    if len(history.chain) < STEPS:
        return f"{len(history.chain)} of {STEPS} steps were done"
    named = re.search(rf"step {STEPS}, which is now saved: (.+)", result.message)
    if named is None:
        return "where the last step is saved is not said"
    saved = Path(named[1].strip())
    try:
        verify_checkpoint(saved)
    except PhalanxError as error:
        return f"the last step is damaged where it was saved: {error}"
    # It lies outside the folder of these drills.
    shutil.rmtree(saved.parent)
    return ""


def _full_disk_and_kill(stage: OutsideStage) -> OutsideFinding:
    def missing_warning(result: DrillResult, history: DrillHistory) -> str:
        is_warned = any("space" in str(event).lower() for event in history.ranks if event["event"] == "checkpoint")
        return "" if is_warned or _mentions_word(result.run, "space") else "nobody said that the disk is full"

    with ExitStack() as stack:
        folder = _small_disk(stage, stack, "full", checkpoints=20)
        faults = [f"fill-disk:step=6,for_s={LONG_S}", "kill:rank=2,step=12"]
        drilled = stage.drill(faults, overrides=[f'checkpoint.path="{folder}"'])
        # Older checkpoints were deleted to make room for the last.
        if drilled[0].state == "done":
            return _judge_drill(drilled, missing_warning)
        # There was only one when the disk filled up, and the only checkpoint is never deleted.
        return _judge_drill(drilled, missing_warning, _written_elsewhere, state="failed")


def _read_only_and_kill(stage: OutsideStage) -> OutsideFinding:
    """Make the checkpoint folder read-only and kill a rank.

    The run must train from memory to its last step, which is then written to another folder.
    """
    with ExitStack() as stack:
        folder = _small_disk(stage, stack, "read-only", checkpoints=20)
        faults = [f"read-only:step=6,for_s={LONG_S}", "kill:rank=2,step=12"]
        drilled = stage.drill(faults, overrides=[f'checkpoint.path="{folder}"'])
        return _judge_drill(drilled, _written_elsewhere, state="failed")


def _little_disk_space(stage: OutsideStage) -> OutsideFinding:
    """Give room for 3.5 checkpoints, where `checkpoint.keep` = 3 needs room for four at the moment of a save."""

    def refused(result: DrillResult, history: DrillHistory) -> str:
        text = "\n".join([result.message, *map(str, history.incidents), _supervisor_text(result.run)])
        return "" if "checkpoint.keep" in text else f"the refusal does not name checkpoint.keep: {text[:200]}"

    with ExitStack() as stack:
        folder = _small_disk(stage, stack, "room", checkpoints=3.5)
        overrides = [f'checkpoint.path="{folder}"', "checkpoint.keep=3"]
        result, history = stage.drill([], overrides=overrides, compared=False)
        # It fits after all: then every save must have succeeded.
        if result.state == "done":
            newest = max(result.run.saved_steps(), default=0)
            wrong = "" if newest == len(history.chain) else f"the newest checkpoint is step {newest}"
        else:
            wrong = refused(result, history)
        refusal = f"{result.state} before the first step: the preflight asks for room for checkpoint.keep + 1"
        return OutsideFinding(ok=not wrong, reason=wrong or refusal, steps_lost=0)


def _newest_is_written(result: DrillResult, history: DrillHistory) -> str:
    """Require that the newest step that memory held when the run gave up is on the disk."""
    held_step = max((execution.held for execution in history.executions), default=0)
    newest = max(result.run.saved_steps(), default=0)
    return "" if newest >= held_step else f"memory held step {held_step}, and the newest checkpoint is step {newest}"


def _four_kills(stage: OutsideStage) -> OutsideFinding:
    """Kill four different ranks, so that no slot is to blame, with no step in between; the run gives up."""
    faults = ["kill:rank=1,step=12"]
    faults += [f"kill:rank={rank},point=restore,epoch={generation}" for generation, rank in ((2, 2), (3, 3), (4, 0))]
    overrides = [f"checkpoint.interval_s={LONG_S}", "fault.restarts=3"]
    return _judge_drill(stage.drill(faults, overrides=overrides), _newest_is_written, state="failed")


def _crash_loop(stage: OutsideStage) -> OutsideFinding:
    def shrunk(result: DrillResult, history: DrillHistory) -> str:
        worlds = [generation.world for generation in history.trained]
        return "" if worlds and worlds[-1] < worlds[0] else f"the memberships that trained had {worlds} ranks"

    faults = ["kill:rank=1,step=8", "crash-loop:slot=1,point=restore"]
    return _judge_drill(stage.drill(faults, overrides=["fault.restarts=3"]), shrunk)


def _stop_on_full_disk(stage: OutsideStage) -> OutsideFinding:
    """Press Ctrl-C in `phalanx train` while nothing can be saved."""
    with ExitStack() as stack:
        folder = _small_disk(stage, stack, "stop", checkpoints=20)
        runs = stage.folder / "runs-stop"
        words = ["train", str(stage.job), "--steps", "100000", "--runs", str(runs), "--no-probe", "--no-check"]
        words += ["--cluster", "local-cpu:2", "--set", "parallel.shard=2", "--set", "checkpoint.keep=3"]
        words += ["--set", f'checkpoint.path="{folder}"', "--set", "checkpoint.interval_s=0.1"]
        from phalanx.train.drill.machine_faults import fill_disk

        def filled() -> bool:
            run = next((Run(path=path) for path in runs.glob("outside-*")), None)
            if run is None or len(stage.losses(run) if run.events(0).exists() else ()) < 4:
                return False
            fill_disk(folder)
            return True

        done = stage.command(*words, until=filled, signals=[signal.SIGINT])
    # Not the message of an earlier save that failed.
    if not re.search(r"NOT saved: [\d,]+ steps?, up to", done.err):
        # Old checkpoints were deleted to make room: 130 is the exit code of Ctrl-C where all is saved.
        is_saved = done.code == 130 and "saved step" in done.err
        return OutsideFinding(ok=is_saved, reason=f"exit code {done.code}: {done.last}", steps_lost=0)
    wrong = "" if done.code == 3 else f"exit code {done.code}, though steps were not saved"
    return OutsideFinding(ok=not wrong, reason=wrong or f"exit code 3: {done.last}", steps_lost=0)


def _left_out_replica(stage: OutsideStage) -> OutsideFinding:
    """Kill a rank of the second of two model replicas; the other one must train on without a new generation."""

    def is_back(result: DrillResult, history: DrillHistory) -> str:
        states = [(event["replica"], event["state"]) for event in history.replicas]
        if states != [(1, "left out"), (1, "rejoined")]:
            return f"of replicas was told: {states}"
        return "" if len(history.generations) == 1 else f"{len(history.generations) - 1} times everything was rebuilt"

    words = ["parallel.shard=2", 'fault.on_loss="leave-out"', "comm.init_timeout_s=300"]
    return _judge_drill(stage.drill(["kill:rank=3,step=8"], overrides=words, steps=LEFT_OUT_STEPS), is_back)


# ---- damage to live state --------------------------------------------------------------------------------------------


def _flip_drill(how: str, seeds: Sequence[int]) -> Callable[[OutsideStage], OutsideFinding]:
    """Make the drill that flips bits of live state, with digests as often as in a plain run, not in every step."""

    def play(stage: OutsideStage) -> OutsideFinding:
        faults = [
            f"flip:how={how},rank={number % 4},step={8 + 8 * number},seed={seed}" for number, seed in enumerate(seeds)
        ]
        return _judge_drill(stage.drill(faults, overrides=["fault.digest_every=auto"], spares=len(seeds)))

    return play


def _zero_gradient(stage: OutsideStage) -> OutsideFinding:
    def warned(result: DrillResult, history: DrillHistory) -> str:
        remarks = [str(event.get("text")) for event in history.ranks if event["event"] == "remark"]
        return "" if any("gradient norm is exactly 0" in text for text in remarks) else "nobody said that the norm is 0"

    drilled = stage.drill(["zero:rank=0+1+2+3,step=8,times=3"], compared=False)
    return _judge_drill(drilled, warned)


# ---- doors and stragglers --------------------------------------------------------------------------------------------


def _strangers_connect(stage: OutsideStage) -> OutsideFinding:
    def same_processes(result: DrillResult, history: DrillHistory) -> str:
        return "" if len(history.generations) == 1 else f"{len(history.generations) - 1} recoveries"

    return _judge_drill(stage.drill(["strangers:step=6"], hosts=2), same_processes)


def _busy_core(stage: OutsideStage) -> OutsideFinding:
    def named(result: DrillResult, history: DrillHistory) -> str:
        named_ranks = straggler_scores(RunHistory.open(result.run)).named
        if not named_ranks or named_ranks[0].rank != 2:
            return f"rank 2 was held up; named: {', '.join(f'rank {rank.rank}' for rank in named_ranks) or 'nobody'}"
        return "" if named_ranks[0].reason else "rank 2 is named, but not why"

    # Enough steps for the rank to stand out from the noise of a machine on which ranks share cores anyway.
    drilled = stage.drill([f"busy-core:rank=2,share=0.75,for_s={LONG_S},step=3"], steps=120, compared=False)
    return _judge_drill(drilled, named)


def _mentions_word(run: Run, word: str) -> bool:
    """True when an event of the supervisor or a log of the run contains a word."""
    texts = [_supervisor_text(run), *(path.read_text(errors="replace") for path in (run.path / "logs").iterdir())]
    return any(word in text.lower() for text in texts)


def _supervisor_text(run: Run) -> str:
    return str(read_events(run.path / "supervisor.jsonl")[0])


RUN_DRILLS = (
    OutsideDrill(
        name="frozen-coordinator",
        subject="control plane",
        tries="SIGSTOP of the host that has the coordinator, for 45 s",
        must="the other host takes over and trains on; the frozen one is fenced when it wakes up",
        play=_frozen_coordinator,
    ),
    OutsideDrill(
        name="lost-coordinator",
        subject="control plane",
        tries="SIGKILL of the coordinator",
        must="another takes over, and no rank is disturbed",
        play=_lost_coordinator,
    ),
    OutsideDrill(
        name="lost-first-host",
        subject="control plane",
        tries="SIGKILL of the first host with its ranks and the coordinator",
        must="the run goes on, and no step that was held is lost",
        play=_lost_first_host,
    ),
    OutsideDrill(
        name="left-out-replica",
        subject="control plane",
        tries='SIGKILL of a rank of one of two model replicas, with fault.on_loss = "leave-out"',
        must="the other replica keeps its processes and groups and trains on; the lost one comes back",
        play=_left_out_replica,
    ),
    OutsideDrill(
        name="full-disk-and-kill",
        subject="state",
        tries="the disk of the checkpoints is full, then a rank is killed",
        must="a warning; the run goes on from memory and loses nothing",
        play=_full_disk_and_kill,
    ),
    OutsideDrill(
        name="read-only-and-kill",
        subject="state",
        tries="the checkpoint folder is read-only to the end, and a rank is killed",
        must="the run goes on from memory; the last step is written elsewhere, and where is said",
        play=_read_only_and_kill,
    ),
    OutsideDrill(
        name="little-room",
        subject="state",
        tries="a disk with room for 3.5 checkpoints and checkpoint.keep = 3",
        must="refused before the first step, naming checkpoint.keep: a save takes room for four",
        play=_little_disk_space,
    ),
    OutsideDrill(
        name="four-kills",
        subject="state",
        tries="four kills in a row, with no checkpoint on the disk",
        must="the run gives up, and first writes the newest step that memory holds",
        play=_four_kills,
    ),
    OutsideDrill(
        name="crash-loop",
        subject="state",
        tries="a slot whose rank is killed at every start",
        must="the run goes on without the slot, on fewer ranks",
        play=_crash_loop,
    ),
    OutsideDrill(
        name="stop-on-full-disk",
        subject="state",
        tries="Ctrl-C of phalanx train while the disk is full",
        must="room is made and the step saved, or exit code 3 and the last line counts the steps that are not saved",
        play=_stop_on_full_disk,
    ),
    OutsideDrill(
        name="weight-bits",
        subject="damage",
        tries="bits of sharded weights flip at rest, between digests",
        must="each is found before it is used, and its rank named",
        play=_flip_drill("weight", (1, 2)),
    ),
    OutsideDrill(
        name="moment-bits",
        subject="damage",
        tries="bits of the optimizer's moments flip at rest, between digests",
        must="each is found before it is used, and its rank named",
        play=_flip_drill("moment", (3, 4)),
    ),
    OutsideDrill(
        name="zero-gradient",
        subject="damage",
        tries="all gradients are 0 for three steps",
        must="a warning that the gradient norm is exactly 0",
        play=_zero_gradient,
    ),
    OutsideDrill(
        name="strangers",
        subject="doors",
        tries="20,000 connections to the ports of ranks, agents and coordinator",
        must="no process is lost, and no bit differs",
        play=_strangers_connect,
    ),
    OutsideDrill(
        name="busy-core",
        subject="stragglers",
        tries="a rank is stopped for 75 % of the time",
        must="the report names the rank, and why it is slow",
        play=_busy_core,
    ),
)
