"""`phalanx drill`: break a real run on purpose, and prove from its record that nothing was lost."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.options import add_json, add_ranks_per_gpu, add_set, take_ranks_per_gpu
from phalanx.cli.output import note, plain, print_json, say, warn
from phalanx.errors import SystemFailure, mistake
from phalanx.units import MINUTE_S, plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.drill.faults import Fault
    from phalanx.train.drill.perform import DrillResult, DrillSettings

USUAL = "kill:rank=1,step=5,point=collective"
RATE_PER_MIN = 6.0  # of chaos
SHRINK_FACTOR = 2.0  # a failing chaos run is made smaller for this many times its own length
LEAST_SHRINK_S = 120.0
CHAOS_RESTARTS = 10
AFTER_S = 15.0  # a run goes on so long after its last fault when a schedule is made smaller


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx drill`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as examples/drill.toml")
    add_set(parser)
    parser.add_argument(
        "--fault",
        dest="faults",
        metavar="KIND:KEY=VALUE,…",
        action="append",
        default=[],
        help=f"inject this, as {USUAL}; may be repeated; docs/drills.md lists the kinds",
    )
    parser.add_argument(
        "--suite", action="store_true", help="run the standard drills, which answer rules of phalanx check"
    )
    parser.add_argument("--chaos", action="store_true", help="draw faults at random moments instead")
    parser.add_argument("--rate", metavar="R", type=float, help="faults per minute of --chaos (6)")
    parser.add_argument("--seed", metavar="N", type=int, help="of --chaos; the same seed, the same faults (0)")
    parser.add_argument("--minutes", metavar="M", type=float, default=0.0, help="stop the run after M minutes")
    parser.add_argument(
        "--agents", "--hosts", metavar="H", type=int, default=1, help="pretend that this machine is H hosts (1)"
    )
    parser.add_argument("--spares", metavar="S", type=int, default=0, help="idle places kept ready for lost ranks (0)")
    parser.add_argument("--steps", metavar="N", type=int, default=0, help="train N steps instead of data.tokens")
    parser.add_argument("--cluster", metavar="SPEC", help="run on this instead of the job's cluster, as local:4")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where run folders are made (runs)")
    parser.add_argument("--no-replay", action="store_true", help="do not repeat the run without faults to compare bits")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the smallest schedule that fails")
    add_ranks_per_gpu(parser)
    parser.add_argument("--allow-code", action="store_true", help="let the job import a model of your own")
    parser.add_argument("--out", metavar="FILE", help="write a copy of the record to this file")
    parser.add_argument(
        "--check", metavar="RECORD", help="verify signature and evidence of a record, and do nothing else"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0 when every verdict holds, 1 when one does not or could not be judged."""
    take_ranks_per_gpu(args)
    _check_call(args)
    if args.check:
        return _check(Path(args.check), as_json=args.json)
    from phalanx.elastic.launchers import refuse_several

    refuse_several(os.environ, "phalanx drill")
    if args.suite:
        from phalanx.cli.drill_suite import run_suite

        return run_suite(args)
    from phalanx.train.drill.faults import parse_faults
    from phalanx.train.prepare import need_torch

    faults = parse_faults(args.faults)  # before anything is planned: a typing error costs nothing
    need_torch()
    plan = make_plan(args)
    if args.chaos:
        faults = _draw(args, plan)
    elif not faults:
        faults = parse_faults([USUAL])
    _check_hosts(args, faults)
    scene = make_scene(args, plan)
    on = f"{plural(plan.layout.devices, 'rank')}, {plan.layout.name}"
    note(f"drill of {plan.job.name} on {on}: {plural(len(faults), 'fault')}")
    from phalanx.train.drill.perform import perform_drill

    result = perform_drill(scene, faults)
    path = keep_record(args, faults, result, plan)
    _print(args, result, path)
    if result.broken and args.chaos and not args.no_shrink:
        _shrink(args, scene, faults, result)
    return 0 if result.ok else 1


def _check_call(args: argparse.Namespace) -> None:
    where = "phalanx drill"
    if bool(args.job) == bool(args.check):
        what = "JOB and --check exclude each other" if args.job else "no job file is named"
        raise mistake(where, what, fix="phalanx drill examples/drill.toml, or phalanx drill --check RECORD")
    _refuse_idle(args)
    if args.suite:
        _refuse_beside_suite(args)
    if args.chaos and args.faults:
        raise mistake(where, "--chaos and --fault exclude each other", fix="give one of them")
    if args.chaos and not args.minutes:
        raise mistake(where, "--chaos has no end", why="faults are drawn for so many minutes", fix="add --minutes 2")
    args.rate = RATE_PER_MIN if args.rate is None else args.rate
    args.seed = args.seed or 0
    for name, value, least, most in (
        ("--rate", args.rate, 0.01, 600),
        ("--minutes", args.minutes, 0, 100_000),
        ("--agents", args.agents, 1, 64),
        ("--spares", args.spares, 0, 64),
        ("--steps", args.steps, 0, 10**9),
        ("--seed", args.seed, 0, 2**63),
    ):
        if not least <= value <= most:
            raise mistake(where, f"{name} {value:g} is not between {least:g} and {most:g}", fix=f"use {name} {least:g}")


def _refuse_idle(args: argparse.Namespace) -> None:
    """What would be ignored is refused: somebody meant something by it."""
    of_chaos = {"--rate": args.rate is not None, "--seed": args.seed is not None, "--no-shrink": args.no_shrink}
    of_run = {
        "--fault": args.faults,
        "--chaos": args.chaos,
        "--minutes": args.minutes,
        "--steps": args.steps,
        "--out": args.out,
        "--set": args.overrides,
    }
    idle = [name for name, given in {**of_chaos, **of_run}.items() if given] if args.check else []
    if idle:
        raise mistake(
            "phalanx drill", f"{' and '.join(idle)} with --check", why="--check runs nothing", fix="leave it out"
        )
    idle = [name for name, given in of_chaos.items() if given and not args.chaos]
    if idle:
        raise mistake(
            "phalanx drill",
            f"{' and '.join(idle)} without --chaos",
            why="they say how faults are drawn, and --fault names them one by one",
            fix="add --chaos --minutes 2, or leave it out",
        )


def _refuse_beside_suite(args: argparse.Namespace) -> None:
    """The suite is the same for everybody, or its records could not be compared."""
    given = {
        "--check": args.check,
        "--fault": args.faults,
        "--chaos": args.chaos,
        "--minutes": args.minutes,
        "--steps": args.steps,
        "--agents": args.agents != 1,
        "--spares": args.spares,
        "--no-replay": args.no_replay,
        "--out": args.out,
    }
    idle = [name for name, value in given.items() if value]
    if idle:
        raise mistake(
            "phalanx drill",
            f"{' and '.join(idle)} with --suite",
            why="the suite says itself what happens, and when",
            fix="leave it out; --cluster, --set and --runs go with it",
        )


def _check_hosts(args: argparse.Namespace, faults: Sequence[Fault]) -> None:
    needy = [fault.text for fault in faults if fault.of.host]
    if needy and args.agents < 2:
        raise mistake(
            f"--fault {needy[0]}",
            "hits a host, and there is only one",
            why="with its only host a run is gone, and so is its proof",
            fix="add --agents 2",
        )


def make_plan(args: argparse.Namespace) -> Plan:
    """As phalanx train plans it, with digests on: the proof rests on them."""
    from phalanx.train import prepare

    # By chance four faults may follow each other without a step between; a drill of its own tests the crash loop.
    patience = [f"fault.restarts={CHAOS_RESTARTS}"] if args.chaos else []
    overrides = ["fault.digest_every=1", *patience, *args.overrides]
    resolved = prepare.load_job(args.job, overrides=overrides, cluster=args.cluster, steps=args.steps)
    plan = prepare.make(resolved)
    if args.minutes and not args.steps:
        # So many steps that they last: the planned time of a step is the shortest it can be.
        steps = max(plan.duration.steps, int(60 * args.minutes / plan.prediction.step_s_low) + 1)
        resolved = prepare.load_job(args.job, overrides=overrides, cluster=args.cluster, steps=steps)
        plan = prepare.make(resolved)
    prepare.check_code(plan.job, allowed=args.allow_code)
    prepare.check_here(plan)
    prepare.tell_sharing(plan, note)
    base = resolved.path.parent
    prepare.check_inputs(plan.job, resolved, base, fresh=True)
    prepare.check_writable(Path(args.runs), plan.job.checkpoint.path)
    plan = prepare.with_data(plan, base)
    warn((*prepare.check_inputs(plan.job, resolved, base, fresh=True).warnings, *prepare.check_data(plan)))
    return plan


def _draw(args: argparse.Namespace, plan: Plan) -> tuple[Fault, ...]:
    from phalanx.train.drill.schedule import DrillTarget, draw_faults

    target = DrillTarget(world=plan.layout.devices, hosts=args.agents, spares=args.spares)
    return draw_faults(rate_per_min=args.rate, minutes=args.minutes, seed=args.seed, target=target)


def make_scene(args: argparse.Namespace, plan: Plan) -> DrillSettings:
    from phalanx.elastic.local_launch import rank_environ
    from phalanx.train.drill.perform import DrillSettings

    return DrillSettings(
        plan=plan,
        runs=Path(args.runs),
        hosts=args.agents,
        spares=args.spares,
        environ=rank_environ(os.environ, plan),
        allow_code=args.allow_code,
        minutes=args.minutes,
        replay=not args.no_replay,
        drawn=args.chaos,
        tell=note,
    )


def keep_record(
    args: argparse.Namespace, faults: Sequence[Fault], result: DrillResult, plan: Plan, **more: object
) -> Path:
    """Sign and write the record; a copy of one in which every verdict holds goes to the user's store."""
    from phalanx.io.files import write_text
    from phalanx.job.load import job_to_dict
    from phalanx.record.drill import drill_subject, key_path, store_path
    from phalanx.rules.profiles import profile_of
    from phalanx.train.drill.report import drill_key, store_record, write_record

    body = {
        "run": result.run.name,
        "job": str(args.job),
        "seed": args.seed if args.chaos else None,
        "agents": args.agents,
        "spares": args.spares,
        "faults": [fault.text for fault in faults],
        "state": result.state,
        "ok": result.ok,
        "outcomes": plain(result.outcomes),
        "verdicts": plain(result.verdicts),
        "numbers": plain(result.numbers),
        "profile": profile_of(plan.cluster).name,  # the record counts for this alone, and for this job
        "subject": drill_subject(job_to_dict(plan.job), asdict(plan.layout), base=Path(args.job).parent),
        **more,
    }
    path = write_record(result.run, body, drill_key(key_path(os.environ)))
    if result.ok:
        try:
            store_record(path, store_path(os.environ))
        except SystemFailure as error:  # the record itself is written: its result is worth more than the copy
            warn(error.problems)
    if args.out:
        write_text(Path(args.out), path.read_text(encoding="utf-8"))
    return path


def _print(args: argparse.Namespace, result: DrillResult, path: Path) -> None:
    from phalanx.train.drill.report import render_drill

    if args.json:
        print_json({"ok": result.ok, "record": path, "result": result})
        return
    say(render_drill(result))
    say(f"record: {path}")
    if result.message:
        note(result.message)


def _shrink(args: argparse.Namespace, scene: DrillSettings, faults: Sequence[Fault], result: DrillResult) -> None:
    from phalanx.train.drill.perform import perform_drill
    from phalanx.train.drill.schedule import shrink_schedule

    budget_s = max(LEAST_SHRINK_S, SHRINK_FACTOR * result.numbers.wall_s)
    note(f"looking for the smallest schedule that fails, for up to {budget_s:.0f} s")

    def fails(some: Sequence[Fault]) -> bool:
        quiet = replace(scene, minutes=_length_min(some), tell=lambda text: None)
        return perform_drill(quiet, some).broken

    smallest = shrink_schedule(faults, fails, budget_s=budget_s)
    words = " ".join(f"--fault {fault.text}" for fault in smallest)
    note(f"{len(smallest)} of {len(faults)} faults are enough:")
    note(
        f"  phalanx drill {args.job} --agents {args.agents} --spares {args.spares} "
        f"--minutes {_length_min(smallest):g} {words}"
    )


def _length_min(faults: Sequence[Fault]) -> float:
    """Minutes until the last of the faults is over."""
    return round((max((fault.at_s or 0.0 for fault in faults), default=0.0) + AFTER_S) / MINUTE_S, 2)


def _check(path: Path, *, as_json: bool) -> int:
    from phalanx.record.drill import check_record, key_path
    from phalanx.train.drill.report import drill_key

    record, wrong = check_record(path, drill_key(key_path(os.environ)))
    failed = [str(verdict["name"]) for verdict in record["verdicts"] if not verdict["ok"]]
    if as_json:
        print_json({"ok": not wrong and not failed, "wrong": wrong, "failed": failed, "record": record})
    else:
        say(f"{path}: {plural(len(record['faults']), 'fault')}, {plural(len(record['files']), 'file')}")
        for text in wrong or ["signature and evidence are as they were written"]:
            say(f"  {text}")
        say(f"  verdicts that failed: {', '.join(failed) or 'none'}")
    return 1 if wrong or failed else 0
