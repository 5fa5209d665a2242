"""Processes of peers on this machine: one that was started or joined, or several at once as a trial of a job."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from phalanx.api.progress_line import ProgressLine
from phalanx.api.results import Tell
from phalanx.errors import Problem, TrainingFailure
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, open_run

TICK_S = 0.05
START_S = 120.0  # that the first peer of a trial may take to listen


def run_peer(run: Run, plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train a peer in processes of its own until it ends; raises TrainingFailure where it fails."""
    if plan.layout.devices > 1:
        from phalanx.api.training import launch_ranks

        return launch_ranks(run, plan, allow_code=allow_code, tell=tell)
    return run_processes([run], plan, allow_code=allow_code, tell=tell)


def run_processes(peers: list[Run], plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train peers of one rank each; the progress shown, and the run returned, are the first one's."""
    from phalanx.elastic.local_launch import collected_signals
    from phalanx.train.slow_links.peer_launch import set_addresses, start_process
    from phalanx.train.slow_links.peer_session import read_status

    first, started = peers[0], time.time()
    line = ProgressLine(first, steps=plan.duration.steps, world=len(peers), since_s=started, tell=tell)
    with collected_signals() as asked, line as shown:
        heard, ended = 0, set[Path]()
        processes = {first.path: start_process(first, allow_code=allow_code, sharers=len(peers))}
        waiting = peers[1:]
        try:
            while waiting or any(process.poll() is None for process in processes.values()):
                if waiting and _listens(first, since_s=started):
                    host, port = read_status(first)["address"]
                    for run in waiting:
                        set_addresses(run, [(str(host), int(port))])
                    more = {run.path: start_process(run, allow_code=allow_code, sharers=len(peers)) for run in waiting}
                    processes, waiting = {**processes, **more}, []
                elif waiting and (processes[first.path].poll() is not None or time.time() > started + START_S):
                    break
                if len(asked) > heard:
                    heard = len(asked)
                    shown.note("leaving after this step; Ctrl-C again ends it at once" if heard == 1 else "ending")
                    for process in processes.values():
                        process.send_signal(signal.SIGINT if heard == 1 else signal.SIGKILL)
                for path, process in processes.items():
                    if (
                        process.poll() and path not in ended
                    ):  # with an exit code: said now, since the others may train on
                        ended.add(path)
                        shown.note(f"{path.name} has ended: {_how(process.returncode)}")
                shown.tick()
                time.sleep(TICK_S)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
    for run in peers[1:]:
        if run.path in processes and processes[run.path].returncode:
            tell(f"{run.path.name} ended with exit code {processes[run.path].returncode}: {_reason(run)}")
    code = processes[first.path].returncode
    if code:
        what = f"was {_how(code)}" if code < 0 else _reason(first)
        command = "phalanx train" if len(peers) > 1 else "phalanx peers start"
        fix = f"{command} --resume {first.path}" if code < 0 else ""
        raise TrainingFailure(
            Problem(where=str(first.path), what=what, fix=fix), run=first, exit_code=2 if code == 2 else 3
        )
    return first


def _how(code: int) -> str:
    """In words.

    >>> _how(-9), _how(3)
    ('killed by SIGKILL', 'exit code 3')
    """
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _reason(run: Run) -> str:
    """Why a peer ended, as it said itself."""
    said = str(run.status().get("message") or "")
    if said and run.status().get("state") == "failed":
        return said
    try:
        lines = run.rank_log(0).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return "\n".join(lines[-3:]) or "its process ended without a word"


# ---- a trial: all peers on this machine ------------------------------------------------------------------------------


def _listens(run: Run, *, since_s: float) -> bool:
    """Whether the process that was started at `since_s` listens: the status of an earlier one names a closed port."""
    from phalanx.train.slow_links.peer_session import read_status

    return float(read_status(run).get("t", 0.0)) >= since_s


def run_trial(first: Run, others: list[Run], plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train all peers of a job on this machine: `first` owns the run, and its run folder is returned."""
    return run_processes([first, *others], plan, allow_code=allow_code, tell=tell)


def trial_peers(first: Run) -> list[Run]:
    """The other peers of a trial that is continued; they lie beside the first one."""
    names = first.launch().get("trial", ())
    return [open_run(first.path.parent / Path(str(name)).name) for name in names]
