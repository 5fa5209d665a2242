"""The caller's side: starts the agent of a run, passes on the request to stop, and knows how it ended. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

from phalanx.elastic import failure
from phalanx.elastic.election import FILE, ElectionUnavailable, choose_election, elected_by, open_election
from phalanx.elastic.failure import last_checkpoint
from phalanx.elastic.handshake import make_secret
from phalanx.elastic.rank_process import SYSTEM_STOPS
from phalanx.errors import mistake
from phalanx.plan.plan import Plan
from phalanx.record.run import Run

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
RESTART_S = 1.0  # before a dead agent is started again, so that its death is noticed first
MOST_RESTARTS = 3  # of one host in a row, none of them for long
STABLE_S = 20.0  # after which a host that fails again has failed anew
ENDED = ("done", "stopped", "failed")
INTERRUPTED = 130  # 128 + SIGINT
# -P: a file of the current folder called torch.py is not torch.
AGENT = ("-P", "-m", "phalanx.train.agent")
ALLOW_CODE = "--allow-code"  # told to agents by whoever starts them, so that no run folder can say it for them
ELECTION = "--election="  # before what `phalanx agent --election` names


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """How a launch ended."""

    state: str  # done, stopped or failed
    exit_code: int
    message: str
    signals: tuple[int, ...] = ()  # that came meanwhile, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherTask:
    """A task of srun, mpirun or torchrun: it is a host of one slot, and may share its machine with other tasks."""

    local_rank: int
    local_world: int
    shares_gpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """A host as the launcher sees it; on one machine several may be pretended."""

    name: str
    slots: int
    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()  # command to start the agent under, as `ip netns exec`
    task: LauncherTask | None = None  # where another launcher started it
    spares: int = 0  # of the slots, the last: they are taken when the others are not enough


def agent_command(*, allow_code: bool, election: str = "") -> tuple[str, ...]:
    """How agents are started, with the caller's word on code that the job names, and on who elects the coordinator.

    >>> agent_command(allow_code=True, election="file")[-2:]
    ('--allow-code', '--election=file')
    """
    told = ((allow_code, ALLOW_CODE), (election, f"{ELECTION}{election}"))
    return (*AGENT, *(word for is_told, word in told if is_told))


def local_hosts(ranks: int, *, hosts: int = 1, spares: int = 0) -> tuple[HostSpec, ...]:
    """This machine as so many hosts; spares are dealt out from the last on, so that one host takes few along.

    >>> [(host.slots, host.spares) for host in local_hosts(4, hosts=2, spares=3)]
    [(3, 1), (4, 2)]
    """
    share, more = divmod(ranks, hosts)
    made = []
    for number in range(hosts):
        mine = (spares + number) // hosts
        made.append(HostSpec(name=f"host-{number}", slots=share + (number < more) + mine, spares=mine))
    return tuple(made)


def share_of(run: Run) -> int:
    """Slots of one host of a run: the ranks dealt evenly to the hosts it waits for."""
    launch = run.launch()
    return -(-int(launch["world"]) // max(1, int(launch.get("join") or 1)))


def address_of(run: Run) -> str:
    """The address that agents of a run listen on: the job's fault.interface, or the loopback."""
    return str(run.plan()["job"]["fault"]["interface"] or LOOPBACK)


def rank_environ(environ: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """What agents are started with: the ranks share the cores, and CUDA is not started before the fork."""
    from phalanx.hardware.discover import discover

    threads = str(max(1, discover().usable_cores // plan.layout.devices))
    wanted = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    return {**wanted, **environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def launch(
    run: Run,
    *,
    hosts: Sequence[HostSpec],
    environ: Mapping[str, str],
    tick: Callable[[], None],
    asked: Callable[[int], None],
    agent: Sequence[str] = AGENT,
) -> LaunchOutcome:
    """Start the agents and stay until they are gone; `tick` is called often, `asked(n)` at the n-th request to stop."""
    with collected_signals() as stop_requests:
        prepare_launch(run, hosts)
        return tend_agents(
            run, hosts=hosts, environ=environ, tick=tick, asked=asked, stop_requests=stop_requests, agent=agent
        )


def tend_agents(
    run: Run,
    *,
    hosts: Sequence[HostSpec],
    environ: Mapping[str, str],
    tick: Callable[[], None],
    asked: Callable[[int], None],
    stop_requests: Sequence[int],
    agent: Sequence[str] = AGENT,
    is_first: bool = True,
) -> LaunchOutcome:
    """Start the agents of a launch that was prepared, and stay until they are gone.

    `stop_requests` are the signals collected so far. Only the first of several launchers writes down how the run ended
    when no coordinator did.
    """
    fleet = Fleet(run, hosts, environ, agent)
    try:
        passed = 0
        while fleet.tend():
            while passed < len(stop_requests):
                passed += 1
                asked(passed)
                fleet.terminate(stop_requests[0], passed)
            tick()
            time.sleep(POLL_S)  # a signal does not cut it short: a request waits this long at most
        tick()
        for late in range(passed, len(stop_requests)):
            asked(late + 1)
    finally:
        fleet.kill()  # we may be leaving by an exception: nothing stays behind
    outcome = _outcome(run, fleet.code, stop_requests=len(stop_requests), is_first=is_first)
    return replace(outcome, signals=tuple(stop_requests))


def prepare_launch(run: Run, hosts: Sequence[HostSpec], **more: Any) -> None:
    """Make the run ready for agents: a fresh secret, and in launch.json the hosts and `more`."""
    run.stop_file.unlink(missing_ok=True)  # it stopped the run once; it does not stop it again
    _refuse_second(run)
    failure.clear(run)
    (run.path / "secret").unlink(missing_ok=True)  # a new one for every launch
    make_secret(run.path / "secret")
    (run.path / "coordinator.json").unlink(missing_ok=True)
    names, slots = [host.name for host in hosts], [host.slots for host in hosts]
    addresses = [host.address for host in hosts]
    launch = run.launch()
    earlier = {"earlier": run.launches()} if "launched" in launch else {}  # else whoever wrote it told of them
    choices = [str(choice) for choice in run.plan().get("job", {}).get("fault", {}).get("election", ())] or [FILE]
    told = {"hosts": names, "slots": slots, "addresses": addresses, "launched": time.time()}
    told["spares"] = [host.spares for host in hosts]
    told["election"] = choose_election(choices, run)
    run.set_launch(**{**launch, **earlier, **told, **more})
    run.set_status("launching")


def _refuse_second(run: Run) -> None:
    """The launcher of an earlier launch may be gone while agents of other hosts train on."""
    if is_coordinated(run):
        raise mistake(
            str(run.path),
            "hosts of an earlier launch still train in it",
            why="a second launch would take the run from under them",
            fix="make a file called stop in the folder, and wait until they have saved",
        )


def is_coordinated(run: Run) -> bool:
    """Whether a coordinator holds its lease now."""
    try:
        return open_election(elected_by(run), run).is_held()
    except ElectionUnavailable:  # then nobody of that launch can have a coordinator either
        return False


class Fleet:
    """The agents of a launch on this machine. One that dies is started again: its host came back."""

    def __init__(self, run: Run, hosts: Sequence[HostSpec], environ: Mapping[str, str], agent: Sequence[str]) -> None:
        self._run, self._hosts, self._environ, self._agent = run, list(hosts), dict(environ), list(agent)
        self._restarts = {host.name: 0 for host in hosts}  # in a row: one that lasted forgives those before it
        self._started_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._stop_requested = False  # whoever is gone now stays away
        self._agents = {host.name: self._start(host) for host in hosts}
        self.code = 0

    def tend(self) -> bool:
        """Whether an agent still runs, or is about to; starts those that are due."""
        now = time.monotonic()
        # Asked only when it matters: the launchers of a large run read one file on a shared disk.
        over = bool(self._due_s or any(one.poll() is not None for one in self._agents.values())) and self._is_over()
        for host in self._hosts:
            process = self._agents.get(host.name)
            if process is not None and process.poll() is not None:
                self._agents.pop(host.name)
                self.code = self.code or process.returncode
                if now - self._started_s[host.name] > STABLE_S:
                    self._restarts[host.name] = 0
                comes = process.returncode < 0 and self._restarts[host.name] < MOST_RESTARTS
                if comes and not over and not self._stop_requested:
                    self._due_s[host.name] = now + RESTART_S
            due_s = self._due_s.get(host.name)
            if due_s is not None and (now >= due_s or over):
                del self._due_s[host.name]
                if not over:
                    self._restarts[host.name] += 1
                    self._agents[host.name] = self._start(host)
        return bool(self._agents or self._due_s)

    def _is_over(self) -> bool:
        return self._run.status().get("state") in ENDED

    def terminate(self, first: int, count: int) -> None:
        """Pass the n-th request on; the second as another signal, because two that are pending count as one."""
        numbers = (signal.SIGINT, signal.SIGTERM) if first == signal.SIGINT else (signal.SIGTERM, signal.SIGINT)
        self._stop_requested = True
        self._due_s.clear()
        for process in self._agents.values():
            process.send_signal(numbers[min(count, 2) - 1])

    def kill(self) -> None:
        """End what is left."""
        for process in self._agents.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, host: HostSpec) -> subprocess.Popen[bytes]:
        """The agent in a session of its own: Ctrl-C in the terminal reaches only us, and we pass it on."""
        self._started_s[host.name] = time.monotonic()
        words = [str(self._run.path), host.name, str(host.slots), host.address, str(0 if host.prefix else os.getpid())]
        words += [json.dumps(asdict(host.task))] if host.task is not None else []
        command = [*host.prefix, sys.executable, *self._agent, *words]
        with open(self._run.path / "logs" / "agent.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, start_new_session=True
            )


@contextlib.contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are collected: the first asks to stop after the step, the second at once.

    Nothing is printed from a handler: a second signal would find the stream in use, and Python answers that with
    "reentrant call", which ended the launch with exit code 1.
    """
    stop_requests: list[int] = []

    def note_request(number: int, frame: FrameType | None) -> None:
        stop_requests.append(number)

    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield stop_requests
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note_request) for number in numbers}
    try:
        yield stop_requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(run: Run, code: int, *, stop_requests: int, is_first: bool) -> LaunchOutcome:
    status = run.status()
    if status.get("state") in ENDED:
        message = str(status.get("message", ""))
        if code < 0 and status.get("cause") == failure.HOST_LOST:  # the coordinator knows the host, not the signal
            message = f"{message}\n  {_end_of_agent(run, code)}"
        return LaunchOutcome(state=str(status["state"]), exit_code=int(status.get("exit_code", code)), message=message)
    state, code, message = "failed", 3, _died(run, code)
    if stop_requests:  # it came before an agent could listen, or ended the one that would have told
        state, code, message = "stopped", INTERRUPTED, _stopped(run)
        if lost := failure.unsaved_steps(run, last_checkpoint(run)):
            code, message = code if stop_requests > 1 else 3, f"{message}; {lost}"
    if is_first:
        run.set_status(state, exit_code=code, message=message)
    return LaunchOutcome(state=state, exit_code=code, message=message)


def _stopped(run: Run) -> str:
    saved = last_checkpoint(run)
    if saved is None and not run.event_files():
        return "stopped before the first rank was started"
    return f"ended at once, as asked; the last checkpoint is step {saved:,}" if saved is not None else "ended at once"


def _end_of_agent(run: Run, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the supervisor of {run.path} {how}"


def _died(run: Run, code: int) -> str:
    log = run.path / "logs" / "agent.log"
    lines = [_end_of_agent(run, code), "  its ranks were ended with it"]
    try:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    except OSError:
        last = []
    return "\n".join([*lines, *(f"  its last words: {line[:300]}" for line in last), f"  log: {log}"])


# Signals from outside, counted: the first asks the ranks to stop after their step, the second ends them at once.


STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class StopSignals:
    """How often somebody asked us to stop."""

    count: int = 0
    first: int = 0  # the signal: SIGTERM is a cluster manager that will not wait for long, SIGINT a person who does

    @classmethod
    def listen(cls) -> StopSignals:
        """Count SIGTERM and SIGINT from now on, and one that whoever started us held back."""
        stop_requests = cls()
        for number in STOPPING:
            signal.signal(number, stop_requests._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return stop_requests

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.count and os.environ.get(SYSTEM_STOPS):
            return
        self.first = self.first or number
        self.count += 1
