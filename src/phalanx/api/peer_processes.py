"""Processes of peers on this machine: one that was started or joined, or several at once as a trial of a job."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from phalanx.api.progress_line import ProgressLine
from phalanx.api.results import Tell
from phalanx.errors import Problem, TrainingFailure
from phalanx.hardware.machine_load import crowded_limit_s
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, open_run

TICK_S = 0.05
# Seconds that the first peer of a trial may take to listen, on idle cores.
START_S = 120.0


def run_peer(run: Run, plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train a peer in separate processes until it ends; raise TrainingFailure if it fails."""
    if plan.layout.devices > 1:
        from phalanx.api.training import launch_ranks

        return launch_ranks(run, plan, allow_code=allow_code, tell=tell)
    return run_processes([run], plan, allow_code=allow_code, tell=tell)


def run_processes(peers: list[Run], plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train peers of one rank each; show the progress of the first one, and return its run."""
    from phalanx.elastic.local_launch import collected_signals
    from phalanx.train.slow_links.peer_launch import set_addresses, start_process
    from phalanx.train.slow_links.peer_session import read_status

    first, started = peers[0], time.time()
    line = ProgressLine(first, steps=plan.duration.steps, world=len(peers), since_s=started, tell=tell)
    with collected_signals() as signals, line as shown:
        handled_signals, ended_paths = 0, set[Path]()
        processes = {first.path: start_process(first, allow_code=allow_code, sharers=len(peers))}
        waiting = peers[1:]
        try:
            while waiting or any(process.poll() is None for process in processes.values()):
                if waiting and _listens(first, since_s=started):
                    host, port = read_status(first)["address"]
                    for run in waiting:
                        set_addresses(run, [(str(host), int(port))])
                    new_processes = {
                        run.path: start_process(run, allow_code=allow_code, sharers=len(peers)) for run in waiting
                    }
                    processes, waiting = {**processes, **new_processes}, []
                elif waiting and (
                    processes[first.path].poll() is not None or time.time() > started + crowded_limit_s(START_S)
                ):
                    break
                if len(signals) > handled_signals:
                    handled_signals = len(signals)
                    shown.note(
                        "leaving after this step; Ctrl-C again ends it at once" if handled_signals == 1 else "ending"
                    )
                    for process in processes.values():
                        process.send_signal(signal.SIGINT if handled_signals == 1 else signal.SIGKILL)
                for path, process in processes.items():
                    # With an exit code: reported now, since the other peers may continue training.
                    if process.poll() and path not in ended_paths:
                        ended_paths.add(path)
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
        reason = f"was {_how(code)}" if code < 0 else _reason(first)
        command = "phalanx train" if len(peers) > 1 else "phalanx peers start"
        fix = f"{command} --resume {first.path}" if code < 0 else ""
        raise TrainingFailure(
            Problem(where=str(first.path), what=reason, fix=fix), run=first, exit_code=2 if code == 2 else 3
        )
    return first


def _how(code: int) -> str:
    """Describe an exit code in words.

    >>> _how(-9), _how(3)
    ('killed by SIGKILL', 'exit code 3')
    """
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _reason(run: Run) -> str:
    """Return the reason why a peer ended, from its status or log."""
    message = str(run.status().get("message") or "")
    if message and run.status().get("state") == "failed":
        return message
    try:
        lines = run.rank_log(0).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return "\n".join(lines[-3:]) or "its process ended without a word"


# ---- a trial: all peers on this machine ------------------------------------------------------------------------------


def _listens(run: Run, *, since_s: float) -> bool:
    """Return True if the process started at `since_s` listens: the status of an earlier process names a closed port."""
    from phalanx.train.slow_links.peer_session import read_status

    return float(read_status(run).get("t", 0.0)) >= since_s


def run_trial(first: Run, others: list[Run], plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Train all peers of a job on this machine; `first` is the owner, and its run is returned."""
    return run_processes([first, *others], plan, allow_code=allow_code, tell=tell)


def trial_peers(first: Run) -> list[Run]:
    """Return the other peers of a trial that is continued; their folders are next to the first one's."""
    names = first.launch().get("trial", ())
    return [open_run(first.path.parent / Path(str(name)).name) for name in names]
