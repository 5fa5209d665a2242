"""One task of those that torchrun, srun, mpirun or Kubernetes started; `launchers.py` finds its rank.

Every task starts an agent with one slot, as its own host of the run, and waits for it: the rank is the agent's child
process. So recovery, heartbeats, incidents, in-memory replicas and telemetry are the same as in a run of `phalanx
train`, and a lost rank is replaced without the launcher noticing. The launcher still decides whether the other tasks
live on when it loses a task, and whether it starts that task again. There are no spare hosts.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import platform
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.elastic.failure import write_error
from phalanx.elastic.gpus import agree_on_gpus
from phalanx.elastic.launchers import RankPlace
from phalanx.elastic.local_launch import (
    AGENT,
    HostSpec,
    LauncherTask,
    LaunchOutcome,
    collected_signals,
    prepare_launch,
    tend_agents,
)
from phalanx.elastic.transports import address_towards
from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.hardware.discover import discover
from phalanx.hardware.this_machine import allowed_ranks
from phalanx.io.listen import is_loopback_host
from phalanx.plan.plan import Plan
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.units import first_few, plural

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]

ONE_BY_ONE = "in a Slurm job: srun --ntasks=1 --exact phalanx train …"
# Timeout for all ranks to arrive, while the plan with comm.init_timeout_s is not known yet.
MEETING_S = 300.0
# Time for the other ranks to read that rank 0 could not prepare the run.
REFUSAL_S = 10.0


def run_joined_rank(
    place: RankPlace,
    prepare: Callable[[], tuple[Plan, Run]],
    watch: Callable[[Plan, Run], Callable[[], None]],
    *,
    call: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    agent: Sequence[str] = AGENT,
) -> tuple[LaunchOutcome, tuple[Plan, Run] | None]:
    """Train as this one rank; return how the run ended and, on rank 0, the plan and the run.

    Rank 0 calls `prepare` and sends the run folder to the other ranks. `watch` returns a function that rank 0 calls
    often to show progress. `call` is the command line: a rank whose command line differs from rank 0's is refused.
    """
    with collected_signals() as stop_requests:
        store = _meeting_store(place, environ)
        _agree_on_call(store, place, call)
        host = _introduce_host(store, place)
        plan, run = (
            _prepare_for_all(store, place, prepare) if place.rank == 0 else (None, _run_of_first(store, place.rank))
        )
        try:
            host = _complete_host(store, place, host, run)
            outcome = tend_agents(
                run,
                hosts=(host,),
                # Keeps torch from starting CUDA in the agent, before it forks the rank.
                environ={**environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                tick=watch(plan, run) if plan is not None else lambda: None,
                asked=lambda count: None,
                stop_requests=stop_requests,
                agent=agent,
                is_first=place.rank == 0,
            )
        except BaseException as error:
            _leave_reason(run, place.rank, error)
            raise
    return outcome, (plan, run) if plan is not None else None


def _leave_reason(run: Run, rank: int, error: BaseException) -> None:
    """Write an error from before the agents started into the run folder: error file, log and status."""
    write_error(run, rank, error, step=-1)
    with run.log(rank).open("a", encoding="utf-8") as log:
        log.write(redact(traceback.format_exc(), os.environ))
    if rank == 0:
        run.set_status("failed", exit_code=3, message=f"rank 0: {redact(str(error), os.environ)}", step=-1)


def _introduce_host(store: Store, place: RankPlace) -> HostSpec:
    """Return this task as a host of the run, and publish its machine and address in the store."""
    machine, address = platform.node() or "localhost", address_towards(place.address)
    last = place.world - 1
    if is_loopback_host(address) and place.rank != last and not place.one_host:
        # The first host often knows its own name as 127.0.1.1 (Debian's /etc/hosts); its address is the one that leads
        # to a rank elsewhere.
        last_host = json.loads(store.get(f"host/{last}"))
        address = address_towards(last_host["address"]) if last_host["machine"] != machine else address
    store.set(f"host/{place.rank}", json.dumps({"machine": machine, "address": address}))
    local_rank = place.local_rank if place.local_rank is not None else place.rank
    task = LauncherTask(local_rank=local_rank, local_world=place.local_world or (place.world if place.one_host else 1))
    return HostSpec(name=f"{machine}:{place.rank}", slots=1, address=address, task=task)


def _prepare_for_all(store: Store, place: RankPlace, prepare: Callable[[], tuple[Plan, Run]]) -> tuple[Plan, Run]:
    """Prepare the run on rank 0, and publish its folder in the store, or an empty text if that failed."""
    try:
        cards: list[dict[str, Any]] = [json.loads(store.get(f"host/{rank}")) for rank in range(place.world)]
        machines = {f"{card['machine']}:{rank}": str(card["machine"]) for rank, card in enumerate(cards)}
        plan, run = prepare()
        interface = plan.job.fault.interface
        addresses = [str(interface or card["address"]) for card in cards]
        if len(set(machines.values())) > 1 and any(is_loopback_host(address) for address in addresses):
            raise mistake(
                f"rank {next(rank for rank, address in enumerate(addresses) if is_loopback_host(address))}",
                f"no address of its host leads to {place.address}",
                why="ranks on other hosts could not reach it",
                fix="export MASTER_ADDR with an address that every host reaches",
            )
        hosts = [
            HostSpec(name=name, slots=1, address=address) for name, address in zip(machines, addresses, strict=True)
        ]
        prepare_launch(run, hosts, world=place.world, machines=machines, launcher=place.launcher)
    except BaseException:
        store.set("run", "")
        # The store ends with this process: let the other ranks read the refusal first.
        with suppress(Exception):
            store.wait([f"refused/{rank}" for rank in range(1, place.world)], timedelta(seconds=REFUSAL_S))
        raise
    store.set("run", str(run.path.resolve()))
    return plan, run


def _complete_host(store: Store, place: RankPlace, own: HostSpec, run: Run) -> HostSpec:
    """Return this host with the address that the job sets, and with the answer whether its tasks share GPUs.

    Raises on every rank if tasks share GPUs that the job does not allow to be shared.
    """
    plan = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    own, machine = replace(own, address=plan.job.fault.interface or own.address), discover()
    assert own.task is not None
    if plan.cluster.accelerator.family == "cpu" or not machine.gpus:
        return own
    gpu = machine.gpus[own.task.local_rank % len(machine.gpus)]
    shares = agree_on_gpus(
        store,
        f"{machine.hostname} {gpu.pci_address}",
        world=place.world,
        allowed=allowed_ranks(plan.job.train.ranks_per_gpu, os.environ),
        limit_s=plan.job.comm.init_timeout_s,
    )
    return replace(own, task=replace(own.task, shares_gpu=shares))


def _meeting_store(place: RankPlace, environ: Mapping[str, str]) -> Store:
    """Return the store in which ranks find each other; rank 0 creates it, unless the launcher already has."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]

    if place.derived:
        _require_known(place)
    launcher_has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = place.rank == 0 and not launcher_has_store
    try:
        store = TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=is_master,
            timeout=timedelta(seconds=MEETING_S),
            wait_for_workers=False,
            master_listen_fd=_loopback_socket(place) if is_master else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _no_meeting(place.address, place.port, place.rank, str(error)) from error
    # torchrun keeps its store when it starts the ranks again; keys of the earlier attempt must not be read again.
    return PrefixStore(f"phalanx/attempt-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _require_known(place: RankPlace) -> None:
    """Raise SystemFailure if the first node's name has no address; torch would try to resolve it for five minutes."""
    try:
        socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SystemFailure(
            Problem(
                where=f"rank {place.rank}",
                what=f"the first node of {place.launcher}, {place.address}, is no host that can be looked up: {error}",
                why="rank 0 is expected there, and the ranks find each other at its address",
                fix="export MASTER_ADDR with an address of that node before the start",
            )
        ) from error


def _loopback_socket(place: RankPlace) -> int | None:
    """Return a socket that only this host reaches, if the address is a loopback address, else None.

    torch itself would listen on all addresses of the host.
    """
    try:
        if not ipaddress.ip_address(place.address).is_loopback:
            return None
    except ValueError:  # a name: torch looks it up
        return None
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.address, place.port))
        listener.listen(1024)
        return listener.detach()


def _agree_on_call(store: Store, place: RankPlace, call: Sequence[str]) -> None:
    """Check that every rank exists once, and that all were started by the same command with the same world size.

    Rank 0 waits for all answers before it creates anything: ranks that never come, or belong to another run, leave no
    folder behind.
    """
    rank = place.rank
    if store.add(f"claims/{rank}", 1) > 1:
        raise mistake(
            f"rank {rank}",
            "another process has the same rank",
            why="two processes would train in one place of the layout",
            fix="give every process its own RANK (a batch script that exports RANK gives all the same)",
        )
    digest = hashlib.sha256("\0".join(call).encode()).hexdigest()
    if rank == 0:
        store.set("launch", json.dumps({"world": place.world, "call": digest}))
        _hear_all(store, place)
        return
    first = json.loads(store.get("launch"))
    problem = _call_disagreement(place, theirs=int(first["world"]), same_call=first["call"] == digest)
    store.set(f"answer/{rank}", problem.render() if problem is not None else "")
    if problem is not None:
        raise UserError(problem)


def _call_disagreement(place: RankPlace, *, theirs: int, same_call: bool) -> Problem | None:
    """Return the problem if this rank's world size or command line differs from rank 0's, else None."""
    where = f"rank {place.rank}"
    if theirs != place.world:
        return Problem(
            where=where,
            what=f"was told of {place.world:,} ranks, and rank 0 of {theirs:,}",
            why="they belong to two launches that meet at one address",
            fix="give each launch its own MASTER_PORT, and every rank of it the same WORLD_SIZE",
        )
    if not same_call:
        return Problem(
            where=where,
            what="was started with another job or other settings than rank 0",
            why="the ranks of a run train one job",
            fix=f"start every rank with the same command; for runs of their own, start each by itself ({ONE_BY_ONE})",
        )
    return None


def _hear_all(store: Store, place: RankPlace) -> None:
    """Wait for the answer of every other rank; raise the first refusal, or an error that names the missing ranks."""
    names = [f"answer/{rank}" for rank in range(1, place.world)]
    try:
        if names:
            store.wait(names, timedelta(seconds=MEETING_S))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [name.rpartition("/")[2] for name in names if not store.check([name])]
        shown = first_few(missing, 8)
        raise SystemFailure(
            Problem(
                where="rank 0",
                what=f"{len(missing):,} of {place.world:,} ranks did not come within {MEETING_S:g} s: {shown}",
                why=f"all meet at {place.address}:{place.port}",
                fix="look at their logs; check that every host reaches that address",
            )
        ) from error
    for name in names:
        if refusal := store.get(name).decode("utf-8"):
            raise mistake("rank 0", "nothing was started, because not all ranks belong together", why=refusal)


def _no_meeting(host: str, port: int, rank: int, text: str) -> SystemFailure:
    """Return the error for a store that cannot be created or reached."""
    lines = text.strip().splitlines() or ["no reason given"]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return SystemFailure(
            Problem(
                where=f"rank {rank}",
                what=f"port {port} of {host} is in use",
                why="rank 0 listens there for the others",
                fix="set MASTER_PORT to a free port on every rank, or end the job that holds it",
            )
        )
    return SystemFailure(
        Problem(
            where=f"rank {rank}",
            what=f"cannot reach {host}:{port}: {lines[0][:200]}",
            why="ranks find each other there",
            fix="check MASTER_ADDR and MASTER_PORT, and that rank 0 is running",
        )
    )


def _run_of_first(store: Store, rank: int) -> Run:
    """Wait for the run folder that rank 0 made; raise SystemFailure if it could not prepare the run."""
    try:
        answer = store.get("run").decode("utf-8")
        if not answer:
            store.set(f"refused/{rank}", "")
    except RuntimeError:  # torch's errors of a connection: rank 0 is gone, and the store with it
        answer = ""
    if not answer:
        raise SystemFailure(
            Problem(where=f"rank {rank}", what="rank 0 could not prepare the run", fix="see its message")
        )
    return Run(path=_visible_folder(Path(answer), rank))


def _visible_folder(path: Path, rank: int) -> Path:
    """Wait up to 30 s until the run folder is visible here; raise SystemFailure if it is not."""
    # A network file system shows a new folder late.
    until = time.monotonic() + 30.0
    while not (path / "plan.json").is_file():
        if time.monotonic() > until:
            raise SystemFailure(
                Problem(
                    where=f"rank {rank}",
                    what=f"does not see the run folder {path} that rank 0 made",
                    why="all ranks write their events and checkpoints there",
                    fix="put --runs on a disk that all hosts share",
                )
            )
        time.sleep(0.2)
    return path


def check_world(plan: Plan, place: RankPlace) -> None:
    """Raise UserError unless the launcher started as many ranks as the plan needs."""
    needed, world = plan.layout.devices, place.world
    bound, cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0, os.cpu_count() or 1
    if needed < world and plan.cluster.accelerator.family == "cpu" and 0 < bound < cores:
        raise mistake(
            plan.cluster.name,
            f"the plan needs {plural(needed, 'rank')}, and {place.launcher} started {world:,}",
            why=f"{place.launcher} bound this process to {bound} of {plural(cores, 'core')}, and the plan counts those",
            fix="leave the cores to all ranks: mpirun --bind-to none, srun --cpu-bind=none",
        )
    if needed != world:
        raise mistake(
            plan.cluster.name,
            f"the plan needs {plural(needed, 'rank')}, and {place.launcher} started {world:,}",
            why="every process it starts is one rank of one run",
            fix=f"start {needed:,} (srun --ntasks={needed}, mpirun -n {needed}), or name the cluster you have with "
            f"--cluster. Runs of their own are started one by one; {ONE_BY_ONE}",
        )
