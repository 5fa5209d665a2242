"""Training: plan a job, start its ranks, follow them, and return the run."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.jobs import AnyJob, read_job
from phalanx.api.progress_line import ProgressLine
from phalanx.api.results import Overrides, Tell, teller
from phalanx.api.train_inputs import (
    PLUGIN_KEYS,
    WHERE,
    TrainCall,
    check_call,
    given_plugins,
    plan_call,
    prepare_here,
    ready_to_start,
    setting_texts,
)
from phalanx.errors import PhalanxError, Problem, TrainingFailure, mistake
from phalanx.io.codec import json_text
from phalanx.io.path_probes import is_file, resolve_path
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.elastic.launchers import RankPlace
    from phalanx.elastic.local_launch import HostSpec


def train(
    job: AnyJob | None = None,
    *,
    cluster: str | None = None,
    steps: int | None = None,
    overrides: Overrides = (),
    plan: str | Path | Plan | None = None,
    resume: str | Path | Run | None = None,
    callbacks: Sequence[object] = (),
    loss: object = None,
    optimizer: object = None,
    data: object = None,
    model: object = None,
    metrics: Sequence[object] = (),
    runs: str | Path = "runs",
    name: str | None = None,
    hosts: int = 1,
    spares: int = 0,
    join: int = 0,
    address: str | None = None,
    ranks_per_gpu: int | None = None,
    measure: bool = False,
    check: bool = True,
    allow_code: bool = False,
    progress: bool | Tell = True,
) -> Run:
    """Train a job on this machine, or continue a run with `resume`; return the Run when the ranks have ended.

    The ranks are separate processes, so this works in a notebook cell too. Ctrl-C, or interrupting the kernel, saves a
    checkpoint after the current step and returns the run; a second one ends it immediately. `train(resume=run)`
    continues from the newest checkpoint.

    `job` is a path, the result of `load`, or a Job; `plan` is a plan made before. `steps` trains that many steps
    instead of data.tokens. `callbacks`, `loss`, `optimizer`, `data`, `model` and `metrics` are your own code, as
    Python objects or "file.py:name"; with `resume`, give them again, or `allow_code=True` (docs/python.md). `progress`
    is False for silence, or a function that receives lines.

    Raises UserError for a job that cannot run, RuleError for one that breaks the training specification (`check=False`
    starts it anyway), and TrainingFailure if the run fails, with the run in `.run`.

    In a process that torchrun, srun or mpirun started, this is one rank of the run; rank 0 gets the Run back, and the
    other ranks end here (SystemExit).

    >>> run = phalanx.train("examples/first-run.toml", steps=20)  # doctest: +SKIP
    >>> print(run)  # doctest: +SKIP
    >>> run = phalanx.train(resume=run)  # doctest: +SKIP
    """
    from phalanx.elastic.launchers import find_rank
    from phalanx.train.prepare import need_torch

    call = TrainCall(
        job=job,
        plan=plan,
        resume=resume,
        cluster=cluster,
        overrides=setting_texts(overrides, ranks_per_gpu),
        steps=steps,
        runs=Path(runs),
        name=name,
        hosts=hosts,
        spares=spares,
        join=join,
        address=address,
        measure=measure,
        check=check,
        allow_code=allow_code,
        plugins=given_plugins(
            callbacks=callbacks, loss=loss, optimizer=optimizer, data=data, model=model, metrics=metrics
        ),
        tell=teller(progress),
    )
    check_call(call)
    need_torch()
    place = find_rank(os.environ)
    if place is not None:
        return _train_as_rank(call, place)
    started = time.time()
    prepared_plan, old, data_s = prepare_here(call)
    if prepared_plan.job.sync.has_peers:
        return _train_peers(prepared_plan, old, call, started=started, data_s=data_s)
    run = make_run_folder(prepared_plan, call, old, started=started, data_s=data_s)
    return _launch_run(run, prepared_plan, call, started=started)


def _train_peers(plan: Plan, old: Run | None, call: TrainCall, *, started: float, data_s: float) -> Run:
    """Train a job with peers as a trial: as many as [sync] names, each a process on this machine with its own run."""
    from phalanx.api.peer_processes import run_trial, trial_peers
    from phalanx.train.slow_links.peer_launch import make_trial, mark_trial

    sync = plan.job.sync
    other_peers = trial_peers(old) if old is not None else []
    _check_trial(plan, old)
    run = make_run_folder(plan, call, old, started=started, data_s=data_s)
    if old is None:
        stem = call.name if call.name is not None else plan.job.name
        for place in range(2, sync.peers + 1):
            peer_call = replace(call, name=f"{stem[:54]}-peer-{place}")
            other_peers.append(make_run_folder(plan, peer_call, None, started=started, data_s=data_s))
        make_trial(run, other_peers)
    else:
        for peer in other_peers:
            make_run_folder(plan, call, peer, started=started, data_s=data_s)
        mark_trial(run, other_peers)
    return run_trial(run, other_peers, plan, allow_code=call.consents, tell=call.tell)


def _check_trial(plan: Plan, old: Run | None) -> None:
    sync = plan.job.sync
    if sync.has_peers and (not sync.peers or (old is not None and "trial" not in old.launch())):
        raise mistake(
            WHERE,
            f'sync.mode = "{sync.mode}" with sync.peers = {sync.peers}' if not sync.peers else "this is a peer's run",
            why="phalanx train starts all peers of a job on this machine, as a trial",
            fix="say how many: --set sync.peers=4; phalanx peers start (or --resume) runs one peer that others join",
        )
    if sync.has_peers and plan.layout.devices > 1:
        raise mistake(
            WHERE,
            f"sync.peers = {sync.peers} with {plan.layout.devices} ranks each",
            why="a trial on one machine starts peers of one rank",
            fix="use --cluster local-cpu:1, or phalanx peers start and join, which start a mesh per peer",
        )


def dry_run(
    job: AnyJob | None = None,
    *,
    overrides: Overrides = (),
    ranks_per_gpu: int | None = None,
    progress: bool | Tell = True,
    **options: Any,
) -> Plan:
    """Plan and check everything that `train` would, start nothing, and return the Plan; options as for `train`.

    >>> dry_run("examples/first-run.toml").layout.devices  # doctest: +SKIP
    4
    """
    from phalanx.elastic.launchers import find_rank
    from phalanx.train.prepare import need_torch

    for name in options.keys() - inspect.signature(train).parameters.keys():
        raise TypeError(f"dry_run() got an unexpected keyword argument {name!r}")
    options["runs"] = Path(options.get("runs", "runs"))
    options["plugins"] = given_plugins(**{key: options.pop(key) for key in PLUGIN_KEYS if key in options})
    texts = setting_texts(overrides, ranks_per_gpu)
    call = TrainCall(job=job, overrides=texts, tell=teller(progress), **options)
    check_call(call)
    need_torch()
    if find_rank(os.environ) is not None:
        raise mistake(WHERE, "--dry-run starts nothing, so it needs no launcher", fix="run it without one")
    plan, old, _ = prepare_here(call)
    _check_trial(plan, old)
    return plan


def make_run_folder(plan: Plan, call: TrainCall, old: Run | None, *, started: float, data_s: float) -> Run:
    """Create the run folder, or update the existing one with the new plan."""
    from phalanx.io.toml import to_toml
    from phalanx.job.load import job_to_dict
    from phalanx.record.provenance import job_provenance
    from phalanx.record.run import create_run

    job, plan_json = job_to_dict(plan.job), plan.to_json()
    run, earlier = old, old.launches() if old is not None else []
    if run is None:
        name = call.name if call.name is not None else plan.job.name
        run = create_run(call.runs, name, job_toml=to_toml(job), job=job, plan_json=plan_json)
    else:
        run.replan(job_toml=to_toml(job), job=job, plan_json=plan_json)
    run.set_launch(
        v=1,
        world=plan.layout.devices,
        layout=plan.layout.name,
        started=round(started, 3),
        earlier=earlier,
        # Building or finding the dataset, before any rank starts.
        data_s=round(data_s, 3),
        # For the record only: agents accept no consent from a folder.
        allow_code=call.consents,
        provenance=job_provenance(job),
    )
    call.tell(f"  run: {run.path}")
    return run


def launch_ranks(run: Run, plan: Plan, *, allow_code: bool, tell: Tell) -> Run:
    """Start the ranks of a run on this machine and follow them, as `train` does."""
    return _launch_run(run, plan, TrainCall(allow_code=allow_code, tell=tell), started=time.time())


def _launch_run(run: Run, plan: Plan, call: TrainCall, *, started: float) -> Run:
    from phalanx.elastic.local_launch import agent_command, launch, local_hosts, rank_environ
    from phalanx.metrics.prometheus import serve_metrics

    hosts = (
        _first_host(run, call) if call.join else local_hosts(plan.layout.devices, hosts=call.hosts, spares=call.spares)
    )
    line = ProgressLine(run, steps=plan.duration.steps, world=plan.layout.devices, since_s=started, tell=call.tell)
    with serve_metrics(run, plan.job.telemetry, tell=call.tell), line as shown:

        def asked(count: int) -> None:
            shown.note("stopping after this step; Ctrl-C again ends it at once" if count == 1 else "ending it at once")

        with run.held():
            outcome = launch(
                run,
                hosts=hosts,
                environ=rank_environ(os.environ, plan),
                tick=shown.tick,
                asked=asked,
                agent=agent_command(allow_code=call.consents),
            )
    if outcome.state == "failed":
        raise TrainingFailure(Problem(where="", what=outcome.message), run=run, exit_code=outcome.exit_code)
    _add_baselines(run, plan, call.tell)
    if outcome.message:
        call.tell(outcome.message)
    return run


def _first_host(run: Run, call: TrainCall) -> tuple[HostSpec, ...]:
    """Return this host as the first of several, and print the command for the other hosts."""
    from phalanx.elastic.local_launch import HostSpec, address_of, share_of

    run.set_launch(**{**run.launch(), "join": call.join})
    other_hosts = plural(call.join - 1, "other host")
    consent = " --allow-code" if call.consents else ""
    call.tell(f"  on the {other_hosts}: phalanx agent {resolve_path(run.path)} --address THEIR_ADDRESS{consent}")
    name = platform.node() or "localhost"
    return (
        HostSpec(
            name=name, slots=share_of(run) + call.spares, spares=call.spares, address=call.address or address_of(run)
        ),
    )


def _add_baselines(run: Run, plan: Plan, tell: Tell) -> None:
    """Count the unigram and bigram baselines if there is an evaluation; called when the cores are idle."""
    from phalanx.train.prepare import counting_baselines

    evaluation = run.summary().evaluation
    if evaluation is not None and evaluation.bits_per_byte is not None and evaluation.bigram_bits_per_byte is None:
        try:
            run.set_launch(**{**run.launch(), "baselines": counting_baselines(plan.job)})
        except (PhalanxError, ValueError, IndexError) as error:
            # A report without baselines is better than none.
            tell(f"no baselines: {str(error).splitlines()[0]}; phalanx data checksum checks the dataset")


# ---- under torchrun, srun or mpirun ----------------------------------------------------------------------------------


def _train_as_rank(call: TrainCall, place: RankPlace) -> Run:
    """Run one rank of a job that another launcher started; rank 0 creates the run folder for all."""
    from phalanx.elastic.local_launch import agent_command
    from phalanx.train.joined import check_world, run_joined_rank

    launch_options = {
        "--hosts": call.hosts > 1,
        "--spares": call.spares,
        "--join": call.join,
        "--address": call.address,
    }
    for option in (name for name, value in launch_options.items() if value):
        raise mistake(
            WHERE,
            f"{option} has no effect: {place.launcher} started {plural(place.world, 'process')}, and each is one rank",
            why="every process it starts is a host with one rank",
            fix=f"leave {option} out; or start phalanx train once, and phalanx agent on the other hosts",
        )
    # The variables that torch and the trainer read; srun and mpirun set other names.
    os.environ.update(place.environ())
    if place.one_host:  # on a single machine, listen on loopback only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = time.time()

    def prepared() -> tuple[Plan, Run]:
        plan, resolved, old = plan_call(call, here=False)
        check_world(plan, place)
        plan, data_s = ready_to_start(plan, resolved, call)
        run = make_run_folder(plan, call, old, started=started, data_s=data_s)
        if plan.job.telemetry.prometheus:
            serve = f"phalanx metrics {run.path} --listen ADDRESS"
            call.tell(f"  telemetry.prometheus: under another launcher, run {serve}")
        return plan, run

    def watch(plan: Plan, run: Run) -> Callable[[], None]:
        steps, world = plan.duration.steps, plan.layout.devices
        return ProgressLine(run, steps=steps, world=world, since_s=started, tell=call.tell, terminal=False).tick

    agent = agent_command(allow_code=call.consents)
    outcome, done = run_joined_rank(place, prepared, watch, call=_asked_of_all(call), agent=agent)
    if done is None:
        raise OtherRankDone(outcome.exit_code if outcome.state == "failed" else 0)
    plan, run = done
    if outcome.state == "failed":
        raise TrainingFailure(Problem(where="", what=outcome.message), run=run, exit_code=outcome.exit_code)
    _add_baselines(run, plan, call.tell)
    if outcome.message:
        call.tell(outcome.message)
    # Also if it was stopped on request, which a scheduler must not count as a failure.
    return run


class OtherRankDone(SystemExit):
    """Ends the process of a rank other than 0: only rank 0 has a run to return."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)


def _asked_of_all(call: TrainCall) -> list[str]:
    """Return what must be equal in every rank of a run: its job and the changes to it, not the location of its file."""
    resume = call.resume.path if isinstance(call.resume, Run) else call.resume
    settings = (list(call.overrides), call.cluster, call.steps or 0, str(resume or "").rstrip("/"), call.consents)
    shared_facts = [repr(settings)]
    for name in (call.job, call.plan):
        if isinstance(name, str | Path) or name is None:
            with contextlib.suppress(OSError):  # rank 0 reports the error
                shared_facts.append(Path(name).read_text(encoding="utf-8", errors="replace") if name else "")
        else:
            # Not the complete plan: the seconds of its search differ between ranks.
            shared = (name.job, name.cluster.name, name.layout) if isinstance(name, Plan) else read_job(name).job
            shared_facts.append(json_text(shared))
    return shared_facts


# ---- agent -----------------------------------------------------------------------------------------------------------


def join_run(
    run: str | Path | Run,
    *,
    slots: int | None = None,
    address: str | None = None,
    host: str | None = None,
    election: str | None = None,
    allow_code: bool = False,
    progress: bool | Tell = True,
) -> None:
    """Join a run as one of its hosts. This process becomes the host's agent, and the function does not return.

    `run` is the folder that `phalanx train --join N` created, on a disk that all hosts share; `slots` is the number of
    ranks this host can hold (default: its share of the plan), `address` is where the other hosts reach it. `election`
    replaces, for this host, the launcher's choice from the job's `fault.election`, for example by another address of
    the same etcd. Code that the run's job names is run only with `allow_code`: consent recorded in the folder is
    ignored, since someone else wrote it.

    >>> join_run("/shared/runs/first-run", slots=8, address="10.0.0.2")  # doctest: +SKIP
    """
    from phalanx.elastic.election import check_election
    from phalanx.elastic.local_launch import ENDED, STOPPING, agent_command, share_of
    from phalanx.record.run import open_run
    from phalanx.train.prepare import check_code, need_torch

    need_torch()
    joined_run = run if isinstance(run, Run) else open_run(run)
    where = str(joined_run.path if isinstance(run, Run) else run)
    if not is_file(joined_run.path / "secret"):
        raise mistake(
            where,
            "has no secret: nobody has launched it yet",
            why="agents prove with it that they belong to the run",
            fix="phalanx train JOB --join N on the first host, then this on the others",
        )
    state = joined_run.status().get("state")
    if state == "done":
        fix = f"phalanx train --report {joined_run.path} shows what came of it"
        raise mistake(where, "is complete: all steps are done", fix=fix)
    if state in ENDED:
        fix = f"phalanx train --resume {joined_run.path} --join N continues it, on the first host"
        raise mistake(where, f"is over: {state}", fix=fix)
    check_code(Plan.from_dict(joined_run.plan(), where=str(joined_run.plan_json)).job, allowed=allow_code)
    slots = slots if slots is not None else share_of(joined_run)
    if slots < 1:
        raise mistake("phalanx agent", f"--slots {slots} is below 1", fix="use 1 or more")
    name = host or platform.node() or "localhost"
    if election is not None:
        check_election(election)
    words = [str(joined_run.path), name, str(slots), address or _own_address(joined_run), "0"]
    teller(progress)(f"host {name} joins {joined_run.path} with {plural(slots, 'slot')}")
    # Signals are blocked until the agent handles them: in its first half second Python would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        command = agent_command(allow_code=allow_code, election=election or "")
        os.execv(sys.executable, [sys.executable, *command, *words])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _own_address(run: Run) -> str:
    """Return the address for other hosts if none is given: the job's interface, or loopback on a single machine."""
    from phalanx.elastic.local_launch import LOOPBACK
    from phalanx.io.listen import is_loopback_host

    interface = str(run.plan()["job"]["fault"]["interface"])
    first = [str(address) for address in run.launch().get("addresses", ())][:1]
    if not interface and first and not is_loopback_host(first[0]):
        raise mistake(
            "phalanx agent",
            "no --address is given",
            why=f"the first host is at {first[0]}, and would look for this one at {LOOPBACK}",
            fix="--address with an address of this host that the others reach; ip address lists them",
        )
    return interface or LOOPBACK
