"""The launcher's side of a run: start the agents, pass on requests to stop, and report how the run ended. No torch."""

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
# Before a dead agent is started again, so that its death is noticed first.
RESTART_S = 1.0
# Of one host in a row, each within STABLE_S.
MOST_RESTARTS = 3
# After so long a failure of a host begins a new row.
STABLE_S = 20.0
ENDED = ("done", "stopped", "failed")
INTERRUPTED = 130  # 128 + SIGINT
# -P: a file named torch.py in the current folder must not be imported as torch.
AGENT = ("-P", "-m", "phalanx.train.agent")
# Passed to agents by the launcher, so that no run folder can set it.
ALLOW_CODE = "--allow-code"
# Followed by the value of `phalanx agent --election`.
ELECTION = "--election="


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """The end of a launch."""

    state: str  # done, stopped or failed
    exit_code: int
    message: str
    signals: tuple[int, ...] = ()  # received during the launch, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherTask:
    """A task of srun, mpirun or torchrun: it is a host of one slot, and may share its machine with other tasks."""

    local_rank: int
    local_world: int
    shares_gpu: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """A host as the launcher sees it; one machine may act as several."""

    name: str
    slots: int
    address: str = LOOPBACK
    # Command under which the agent starts, such as `ip netns exec`.
    prefix: tuple[str, ...] = ()
    task: LauncherTask | None = None  # set where another launcher started it
    # Of the slots, the last ones: they are used when the others are not enough.
    spares: int = 0


def agent_command(*, allow_code: bool, election: str = "") -> tuple[str, ...]:
    """Return the command that starts agents: with the user's consent to code that the job names, and the election.

    >>> agent_command(allow_code=True, election="file")[-2:]
    ('--allow-code', '--election=file')
    """
    options = ((allow_code, ALLOW_CODE), (election, f"{ELECTION}{election}"))
    return (*AGENT, *(word for is_set, word in options if is_set))


def local_hosts(ranks: int, *, hosts: int = 1, spares: int = 0) -> tuple[HostSpec, ...]:
    """Return this machine as several hosts.

    Spares are dealt from the last host on, so that one lost host takes few along.

    >>> [(host.slots, host.spares) for host in local_hosts(4, hosts=2, spares=3)]
    [(3, 1), (4, 2)]
    """
    share, more = divmod(ranks, hosts)
    specs = []
    for number in range(hosts):
        host_spares = (spares + number) // hosts
        specs.append(HostSpec(name=f"host-{number}", slots=share + (number < more) + host_spares, spares=host_spares))
    return tuple(specs)


def share_of(run: Run) -> int:
    """Return the slots of one host of a run: the ranks divided evenly among the hosts it waits for, rounded up."""
    launch = run.launch()
    return -(-int(launch["world"]) // max(1, int(launch.get("join") or 1)))


def address_of(run: Run) -> str:
    """Return the address on which agents of a run listen: the job's fault.interface, or the loopback."""
    return str(run.plan()["job"]["fault"]["interface"] or LOOPBACK)


def rank_environ(environ: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return the environment of agents: the ranks share the cores, and the check for CUDA does not start CUDA."""
    from phalanx.hardware.discover import discover

    threads = str(max(1, discover().usable_cores // plan.layout.devices))
    thread_settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    return {**thread_settings, **environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def launch(
    run: Run,
    *,
    hosts: Sequence[HostSpec],
    environ: Mapping[str, str],
    tick: Callable[[], None],
    asked: Callable[[int], None],
    agent: Sequence[str] = AGENT,
) -> LaunchOutcome:
    """Start the agents and wait until they exit; `tick` is called often, `asked(n)` at the n-th request to stop."""
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
    """Start the agents of a prepared launch, and wait until they exit.

    `stop_requests` are the signals collected so far. Only the first of several launchers writes how the run ended when
    no coordinator did.
    """
    fleet = Fleet(run, hosts, environ, agent)
    try:
        num_passed = 0
        while fleet.tend():
            while num_passed < len(stop_requests):
                num_passed += 1
                asked(num_passed)
                fleet.terminate(stop_requests[0], num_passed)
            tick()
            # A signal does not interrupt the sleep: a request waits this long at most.
            time.sleep(POLL_S)
        tick()
        for late in range(num_passed, len(stop_requests)):
            asked(late + 1)
    finally:
        # Also after an exception: no agent stays behind.
        fleet.kill()
    outcome = _outcome(run, fleet.code, stop_requests=len(stop_requests), is_first=is_first)
    return replace(outcome, signals=tuple(stop_requests))


def prepare_launch(run: Run, hosts: Sequence[HostSpec], **more: Any) -> None:
    """Make the run ready for agents: a new secret, and in launch.json the hosts and `more`."""
    # The file stopped the earlier launch; it must not stop this one.
    run.stop_file.unlink(missing_ok=True)
    _refuse_second(run)
    failure.clear(run)
    (run.path / "secret").unlink(missing_ok=True)  # a new one for every launch
    make_secret(run.path / "secret")
    (run.path / "coordinator.json").unlink(missing_ok=True)
    names, slots = [host.name for host in hosts], [host.slots for host in hosts]
    addresses = [host.address for host in hosts]
    launch = run.launch()
    # Otherwise the writer of launch.json has listed them.
    earlier = {"earlier": run.launches()} if "launched" in launch else {}
    choices = [str(choice) for choice in run.plan().get("job", {}).get("fault", {}).get("election", ())] or [FILE]
    fields = {"hosts": names, "slots": slots, "addresses": addresses, "launched": time.time()}
    fields["spares"] = [host.spares for host in hosts]
    fields["election"] = choose_election(choices, run)
    run.set_launch(**{**launch, **earlier, **fields, **more})
    run.set_status("launching")


def _refuse_second(run: Run) -> None:
    """Refuse a second launch: agents of other hosts may train on after the launcher of an earlier launch is gone."""
    if is_coordinated(run):
        raise mistake(
            str(run.path),
            "hosts of an earlier launch still train in it",
            why="a second launch would take the run from under them",
            fix="make a file called stop in the folder, and wait until they have saved",
        )


def is_coordinated(run: Run) -> bool:
    """True when a coordinator holds its lease now."""
    try:
        return open_election(elected_by(run), run).is_held()
    except ElectionUnavailable:
        # Then no process of that launch can have a coordinator either.
        return False


class Fleet:
    """The agents of a launch on this machine. One that dies is started again, as if its host came back."""

    def __init__(self, run: Run, hosts: Sequence[HostSpec], environ: Mapping[str, str], agent: Sequence[str]) -> None:
        self._run, self._hosts, self._environ, self._agent = run, list(hosts), dict(environ), list(agent)
        # Restarts in a row: one that ran for STABLE_S resets the count.
        self._restarts = {host.name: 0 for host in hosts}
        self._started_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        # From then on no agent is started again.
        self._stop_requested = False
        self._agents = {host.name: self._start(host) for host in hosts}
        self.code = 0

    def tend(self) -> bool:
        """Start the agents that are due; True while an agent runs, or is about to start."""
        now = time.monotonic()
        # Read only when it matters: the launchers of a large run read one file on a shared disk.
        over = bool(self._due_s or any(agent.poll() is not None for agent in self._agents.values())) and self._is_over()
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
        """Pass the n-th request to stop on to the agents.

        The second is another signal, because two pending signals of a kind count as one.
        """
        numbers = (signal.SIGINT, signal.SIGTERM) if first == signal.SIGINT else (signal.SIGTERM, signal.SIGINT)
        self._stop_requested = True
        self._due_s.clear()
        for process in self._agents.values():
            process.send_signal(numbers[min(count, 2) - 1])

    def kill(self) -> None:
        """Kill the agents that still run."""
        for process in self._agents.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, host: HostSpec) -> subprocess.Popen[bytes]:
        """Start the agent in a separate session: only this process gets Ctrl-C in the terminal, and passes it on."""
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
    """A context that collects Ctrl-C and SIGTERM: the first asks to stop after the step, the second at once.

    The handler prints nothing: a second signal would find the stream in use, and Python answers that with "reentrant
    call", which ended the launch with exit code 1.
    """
    stop_requests: list[int] = []

    def note_request(number: int, frame: FrameType | None) -> None:
        stop_requests.append(number)

    # Python delivers signals only to the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield stop_requests
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    # With nohup SIGHUP is ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers_before = {number: signal.signal(number, note_request) for number in numbers}
    try:
        yield stop_requests
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _outcome(run: Run, code: int, *, stop_requests: int, is_first: bool) -> LaunchOutcome:
    status = run.status()
    if status.get("state") in ENDED:
        message = str(status.get("message", ""))
        # The coordinator knows the host, not the signal.
        if code < 0 and status.get("cause") == failure.HOST_LOST:
            message = f"{message}\n  {_end_of_agent(run, code)}"
        return LaunchOutcome(state=str(status["state"]), exit_code=int(status.get("exit_code", code)), message=message)
    state, code, message = "failed", 3, _died(run, code)
    # The request came before an agent could receive it, or killed the one that would have reported it.
    if stop_requests:
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
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the supervisor of {run.path} {ending}"


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
    """The number of requests to stop that this process got."""

    count: int = 0
    # The first signal: SIGTERM comes from a cluster manager that will not wait for long, SIGINT from a user who
    # does.
    first: int = 0

    @classmethod
    def listen(cls) -> StopSignals:
        """Count SIGTERM and SIGINT from now on, including one that the parent process had blocked."""
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
