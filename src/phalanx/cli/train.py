"""`phalanx train`: plan a job, start its ranks, show how it goes, and report what came of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.cli.options import add_json, add_no_probe, add_ranks_per_gpu, add_set, take_ranks_per_gpu
from phalanx.cli.output import note, print_json, say, warn
from phalanx.errors import PhalanxError, mistake
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.elastic.launchers import RankPlace
    from phalanx.elastic.local_launch import HostSpec
    from phalanx.job.load import ResolvedJob
    from phalanx.job.schema import Job
    from phalanx.plan.plan import Plan
    from phalanx.record.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx train`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as job.toml")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="run on this instead of the job's cluster, as local:4")
    parser.add_argument("--steps", metavar="N", type=int, help="train N steps instead of data.tokens")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where run folders are made (runs)")
    parser.add_argument("--name", metavar="NAME", help="first part of the run folder's name (the job's name)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run from its newest checkpoint")
    parser.add_argument("--report", metavar="RUN", help="print the report of a run and do nothing else")
    parser.add_argument("--plan", metavar="FILE", help="use this plan, as phalanx plan --out wrote it")
    add_no_probe(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan and check, start nothing")
    parser.add_argument("--no-check", action="store_true", help="start against the training specification's errors too")
    parser.add_argument("--hosts", metavar="N", type=int, default=1, help="pretend that this machine is N hosts (1)")
    parser.add_argument("--spares", metavar="N", type=int, default=0, help="idle places kept ready for lost ranks (0)")
    parser.add_argument(
        "--join",
        metavar="N",
        type=int,
        default=0,
        help="this is the first of N hosts; the others run phalanx agent RUN",
    )
    parser.add_argument("--address", metavar="IP", help="with --join: address of this host (fault.interface)")
    add_ranks_per_gpu(parser)
    parser.add_argument("--allow-code", action="store_true", help="let the job import a model of your own")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train, resume, or report."""
    take_ranks_per_gpu(args)
    _check_call(args)
    if args.report:
        from phalanx.record.run import open_run

        return _report(open_run(args.report), as_json=args.json)
    from phalanx.elastic.launchers import find_rank
    from phalanx.metrics.prometheus import check_served
    from phalanx.train.prepare import need_torch

    need_torch()
    place = find_rank(os.environ)
    if place is not None:
        return _join(args, place)
    started = time.time()
    plan, resolved, old = _planned(args, here=not args.join)
    _check_hosts(plan, args)
    check_served(plan.job.telemetry)
    plan = _fit_to_start(plan, resolved, args)
    if args.dry_run:
        return _dry_run(plan, as_json=args.json)
    made = _ready(plan, args, old, started=started)
    return _launch(made, plan, args, started=started)


def _check_call(args: argparse.Namespace) -> None:
    named = [name for name, value in (("JOB", args.job), ("--resume", args.resume), ("--report", args.report)) if value]
    if not named and not args.plan:
        raise mistake("phalanx train", "no job file is named", fix="phalanx train job.toml; phalanx init writes one")
    if len(named) > 1:
        raise mistake("phalanx train", f"{' and '.join(named)} exclude each other", fix="give one of them")
    if args.steps is not None and args.steps < 1:
        raise mistake("phalanx train", f"--steps {args.steps} is below 1", fix="use 1 or more")
    for name, least, value in (("hosts", 1, args.hosts), ("spares", 0, args.spares), ("join", 0, args.join)):
        if not least <= value <= 10**5:
            raise mistake(
                "phalanx train", f"--{name} {value} is not a number from {least} on", fix=f"use {least} or more"
            )
    if args.join and (args.join < 2 or args.hosts > 1):
        raise mistake("phalanx train", f"--join {args.join} with --hosts {args.hosts}", fix="--join 2 or more, alone")
    if args.name is not None:
        from phalanx.record.run import require_name

        require_name(args.name)
    args.steps = args.steps or 0
    if args.plan and (args.overrides or args.cluster or args.steps or args.resume):
        raise mistake(
            "phalanx train",
            "--plan is already settled: --set, --cluster, --steps and --resume cannot change it",
            fix="make another with phalanx plan JOB --set … --out FILE",
        )


def _planned(args: argparse.Namespace, *, here: bool) -> tuple[Plan, ResolvedJob, Run | None]:
    """The plan to launch, its job, and the run it goes on with; `here`: all its ranks are to run on this machine."""
    from phalanx.train import prepare

    old: Run | None = None
    if args.resume:
        from phalanx.record.run import open_run

        old = open_run(args.resume)
        with old.held():
            pass  # somebody else may be training in it: say so before anything is planned or changed
        plan, warnings = prepare.resumed(old, overrides=args.overrides, cluster=args.cluster, steps=args.steps)
        warn(warnings)
        resolved = prepare.job_of(old, plan)
        _check_files(plan.job, resolved, args, old)
    else:
        plan, resolved = _fresh_plan(args)
    prepare.check_trainable(plan)
    if here:
        prepare.check_here(plan)
        from phalanx.elastic.transports import facts_here, transport_warnings

        facts = facts_here(plan, slots=plan.layout.devices)
        warn(transport_warnings(facts) if facts is not None else ())
    return plan, resolved, old


def _check_files(job: Job, resolved: ResolvedJob, args: argparse.Namespace, old: Run | None = None) -> None:
    """What the job reads is here, and what it writes can be written."""
    from phalanx.train import prepare

    prepare.check_code(job, allowed=args.allow_code)
    prepare.check_inputs(job, resolved, _base(args, resolved), fresh=old is None)
    prepare.check_writable(Path(args.runs), job.checkpoint.path, run=old.path if old is not None else None)


def _base(args: argparse.Namespace, resolved: ResolvedJob) -> Path:
    """Where relative paths of the job start; a run that goes on has absolute ones."""
    return Path() if args.resume else resolved.path.parent


def _fit_to_start(plan: Plan, resolved: ResolvedJob, args: argparse.Namespace) -> Plan:
    """The plan with its data, once the specification has nothing against it; data may take minutes to build."""
    from phalanx.cli.precheck import check_before
    from phalanx.train import prepare

    _header(plan)
    check_before(resolved, plan, refuse=not args.no_check)
    began = time.time()
    plan = prepare.with_data(plan, _base(args, resolved))
    args.data_s = time.time() - began
    found = prepare.check_inputs(plan.job, resolved, _base(args, resolved), fresh=not args.resume)
    for line in found.remarks:
        note(f"  {line}")
    warn((*found.warnings, *prepare.check_data(plan)))
    return plan


def _fresh_plan(args: argparse.Namespace) -> tuple[Plan, ResolvedJob]:
    """The plan and its job, from whose folder relative paths in it start.

    Files are looked at first: measuring the machine takes 20 s, which nobody should wait to hear of a missing one.
    """
    from phalanx.elastic.launchers import find_rank
    from phalanx.train import prepare

    resolved = None
    if args.job:
        resolved = prepare.load_job(args.job, overrides=args.overrides, cluster=args.cluster, steps=args.steps)
    if args.plan or resolved is None:
        plan = prepare.read_plan(args.plan, resolved)
        resolved = resolved or prepare.job_in(plan, Path(args.plan))
        _check_files(plan.job, resolved, args)
        return plan, resolved
    asked = resolved
    _check_files(prepare.with_absolute_files(asked).job, asked, args)
    if args.no_probe or find_rank(os.environ) is not None:
        return prepare.make(asked), asked
    from phalanx.plan.make import plan_here

    target = str(asked.job.cluster.target)
    return plan_here(lambda: prepare.make(asked), target, environ=os.environ, tell=note), asked


def _header(plan: Plan) -> None:
    """Three lines before the first step: what runs, what it should take, what to mind."""
    from phalanx.train.prepare import tell_sharing
    from phalanx.units import format_bytes, format_count, format_seconds

    p, job = plan.prediction, plan.job
    note(
        f"{job.name}: {job.model.name}, {format_count(p.parameters)} parameters, on {plan.cluster.name}: "
        f"{plan.layout.name}"
    )
    note(
        f"  predicted: {format_seconds(p.step_s)} per step ({format_seconds(p.step_s_low)} to "
        f"{format_seconds(p.step_s_high)}), {format_count(p.tokens_per_s)} tokens/s, "
        f"{format_bytes(plan.memory.total_bytes)} per rank, {format_seconds(plan.duration.training_s)} for "
        f"{plural(plan.duration.steps, 'step')}"
    )
    for text in plan.warnings:
        note(f"  warning: {text}")
    tell_sharing(plan, note)


def _dry_run(plan: Plan, *, as_json: bool) -> int:
    if as_json:
        print_json(plan.to_dict())
    else:
        ranks, steps = plural(plan.layout.devices, "rank"), plural(plan.duration.steps, "step")
        say(f"{ranks} would train {steps}: {plan.layout.name}")
    return 0


def _ready(plan: Plan, args: argparse.Namespace, old: Run | None, *, started: float) -> Run:
    """The run folder: a new one, or the old one with what changed written over it."""
    from phalanx.job.load import job_to_dict
    from phalanx.record.provenance import provenance
    from phalanx.record.run import create_run

    job, plan_json = job_to_dict(plan.job), plan.to_json()
    made, earlier = old, old.launches() if old is not None else []
    if made is None:
        name = args.name if args.name is not None else plan.job.name
    from phalanx.io.toml import to_toml
        made = create_run(Path(args.runs), name, job_toml=to_toml(job), job=job, plan_json=plan_json)
    else:
        made.replan(job_toml=to_toml(job), job=job, plan_json=plan_json)
    made.set_launch(
        v=1,
        world=plan.layout.devices,
        layout=plan.layout.name,
        started=round(started, 3),
        earlier=earlier,
        data_s=round(args.data_s, 3),  # building or finding the dataset, before any rank starts
        allow_code=args.allow_code,
        provenance=provenance(job),
    )
    note(f"  run: {made.path}")
    return made


def _launch(made: Run, plan: Plan, args: argparse.Namespace, *, started: float) -> int:
    from phalanx.cli.live import Live
    from phalanx.elastic.local_launch import launch, local_hosts, rank_environ
    from phalanx.metrics.prometheus import serve_metrics

    hosts = (
        _first_of(made, args) if args.join else local_hosts(plan.layout.devices, hosts=args.hosts, spares=args.spares)
    )
    watching = Live(made, steps=plan.duration.steps, world=plan.layout.devices, since_s=started)
    with serve_metrics(made, plan.job.telemetry, tell=note), watching as live:

        def asked(count: int) -> None:
            live.note("stopping after this step; Ctrl-C again ends it at once" if count == 1 else "ending it at once")

        with made.held():
            outcome = launch(made, hosts=hosts, environ=rank_environ(os.environ, plan), tick=live.tick, asked=asked)
    if outcome.state != "failed":
        _add_baselines(made, plan)
        _report(made, as_json=args.json)
        note(f"check this run: phalanx check {made.path}")
    if outcome.message:
        note(outcome.message)
    return outcome.exit_code


def _check_hosts(plan: Plan, args: argparse.Namespace) -> None:
    """Every host has a rank, and others can reach the first."""
    if args.address and not args.join:
        raise mistake(
            "phalanx train",
            f"--address {args.address} without --join has no effect",
            fix="add --join N, or leave it out",
        )
    if args.join and not (args.address or plan.job.fault.interface):
        raise mistake(
            "phalanx train",
            f"--join {args.join} without --address",
            why="this host would listen at 127.0.0.1, where no other host reaches it",
            fix="--address with an address of this host that the others reach; --address 127.0.0.1 to try it on one "
            "machine",
        )
    count = max(args.hosts, args.join)
    if count > plan.layout.devices:
        raise mistake(
            "phalanx train",
            f"{plural(count, 'host')} for {plural(plan.layout.devices, 'rank')}",
            why="a host without a rank does nothing",
            fix=f"use at most {plan.layout.devices}; --spares adds idle places",
        )


def _first_of(made: Run, args: argparse.Namespace) -> tuple[HostSpec, ...]:
    """This host as the first of several; tells what to start on the others."""
    import platform

    from phalanx.elastic.local_launch import HostSpec, address_of, share_of

    made.set_launch(**{**made.launch(), "join": args.join})
    note(f"  on the other {plural(args.join - 1, 'host')}: phalanx agent {made.path.resolve()} --address THEIR_ADDRESS")
    name = platform.node() or "localhost"
    return (HostSpec(name=name, slots=share_of(made) + args.spares, address=args.address or address_of(made)),)


def _add_baselines(made: Run, plan: Plan) -> None:
    """Counted when the ranks are gone and the cores are free; only where there is something to compare."""
    from phalanx.record.account.summary import summarize
    from phalanx.train.prepare import baselines

    found = summarize(made).evaluation
    if found is not None and found.bits_per_byte is not None and found.bigram_bits_per_byte is None:
        try:
            made.set_launch(**{**made.launch(), "baselines": baselines(plan.job)})
        except (PhalanxError, ValueError, IndexError) as error:  # a report without them is better than none
            note(f"no baselines: {str(error).splitlines()[0]}; phalanx data verify checks the dataset")


def _report(made: Run, *, as_json: bool) -> int:
    from phalanx.record.account.summary import summarize
    from phalanx.record.report.render import render_text

    summary = summarize(made)
    if summary.state in ("running", "launching") and not made.is_held:
        from dataclasses import replace

        summary = replace(summary, state="gone", message="its processes ended without a word; --resume goes on")
    if as_json:
        print_json(summary)
    else:
        say(render_text(summary))
    return 0


def _join(args: argparse.Namespace, place: RankPlace) -> int:
    """Be one rank of a job that another launcher started; rank 0 makes the run folder for all, and reports."""
    from phalanx.cli.live import Live
    from phalanx.train.joined import check_world, join

    _refuse_under_launcher(args, place)
    os.environ.update(place.environ())  # what torch and the trainer read, also where srun or mpirun set other names
    if place.one_host:  # nothing of one machine listens beyond it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = time.time()

    def prepared() -> tuple[Plan, Run]:
        plan, resolved, old = _planned(args, here=False)
        check_world(plan, place)
        plan = _fit_to_start(plan, resolved, args)
        made = _ready(plan, args, old, started=started)
        if plan.job.telemetry.prometheus:
            note(f"  telemetry.prometheus: under another launcher, run phalanx metrics {made.path} --listen ADDRESS")
        return plan, made

    def watch(plan: Plan, made: Run) -> Callable[[], None]:
        return Live(made, steps=plan.duration.steps, world=plan.layout.devices, since_s=started, terminal=False).tick

    outcome, done = join(place, prepared, watch, call=_asked_of_all(args))
    if done is not None:
        plan, made = done
        if outcome.state != "failed":
            _add_baselines(made, plan)
            _report(made, as_json=args.json)
            note(f"check this run: phalanx check {made.path}")
        if outcome.message:
            note(outcome.message)
    return outcome.exit_code if outcome.state == "failed" else 0  # stopped as asked is no failure to a scheduler


def _refuse_under_launcher(args: argparse.Namespace, place: RankPlace) -> None:
    """Options that start or place ranks, which is the launcher's work here."""
    if args.dry_run:
        raise mistake("phalanx train", "--dry-run starts nothing, so it needs no launcher", fix="run it without one")
    given = {"--hosts": args.hosts > 1, "--spares": args.spares, "--join": args.join, "--address": args.address}
    for option in (name for name, value in given.items() if value):
        raise mistake(
            "phalanx train",
            f"{option} has no effect: {place.launcher} started {plural(place.world, 'process')}, and each is one rank",
            why="every process it starts is a host with one rank",
            fix=f"leave {option} out; or start phalanx train once, and phalanx agent on the other hosts",
        )


def _asked_of_all(args: argparse.Namespace) -> list[str]:
    """What must be the same in every rank of a run: its job and what is changed in it, not where the file lies."""
    asked = [repr((args.overrides, args.cluster, args.steps, (args.resume or "").rstrip("/")))]
    for name in (args.job, args.plan):
        with contextlib.suppress(OSError):  # rank 0 says what is wrong with it
            asked.append(Path(name).read_text(encoding="utf-8", errors="replace") if name else "")
    return asked
