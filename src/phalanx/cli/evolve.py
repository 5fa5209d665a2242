"""`phalanx evolve`: quality-diversity search for plans, pipeline schedules and kernels; a function per sub-command."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import OnOff, add_json, add_set
from phalanx.errors import mistake


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `phalanx evolve`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    about = "find the fastest plan for every device memory and every amount of traffic between hosts"
    _configure_plans(verbs.add_parser("plans", help=about, description=about))
    about = "find pipeline orders with smaller bubbles, for stages as they are"
    _configure_schedules(verbs.add_parser("schedules", help=about, description=about))
    about = "find faster kernels: templates and their numbers, by measured time"
    _configure_kernels(verbs.add_parser("kernels", help=about, description=about))
    about = "write an archive as training examples: problem, attempt, measurement"
    export = verbs.add_parser("export", help=about, description=about)
    export.add_argument("archive", metavar="ARCHIVE", help="an archive of phalanx evolve")
    export.add_argument("--out", metavar="FILE.jsonl", required=True, help="the file to write")
    add_json(export)


def _configure_search(parser: argparse.ArgumentParser, *, evaluations: int) -> None:
    """Add the options that all searches have."""
    search = parser.add_argument_group("the search")
    search.add_argument(
        "--evaluations",
        metavar="N",
        type=int,
        default=evaluations,
        help=f"evaluations that the archive holds at the end (default: {evaluations:,})",
    )
    search.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the search (default: 0)")
    search.add_argument(
        "--archive", metavar="FILE.jsonl", help="keep every evaluation there, and go on with those that it holds"
    )
    search.add_argument("--picture", metavar="FILE.svg", help="draw the filled grid, while the search goes on")
    search.add_argument(
        "--proposer", metavar="CMD", default="", help="a command that reads a prompt and writes a change as JSON"
    )
    add_json(parser)


def _configure_plans(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx evolve plans`."""
    parser.add_argument("job", metavar="JOB", help="the job file, such as job.toml")
    parser.add_argument("--cluster", metavar="SPEC", help="another cluster than the job's, such as 8xH100:4")
    add_set(parser)
    parser.add_argument(
        "--memory", metavar="GB", default="40,48,80", help="device memories to answer for (default: 40,48,80)"
    )
    parser.add_argument(
        "--links", metavar="GBITS", default="1,10,100", help="links of a host to answer for (default: 1,10,100 Gbit/s)"
    )
    parser.add_argument(
        "--most-inner-steps",
        metavar="H",
        type=int,
        default=500,
        help="steps that peers may take between exchanges (default: 500); 1 leaves plans with peers out",
    )
    _configure_search(parser, evaluations=2000)


def _configure_schedules(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx evolve schedules`."""
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="a job whose plan has a pipeline; without one, see --stages"
    )
    parser.add_argument("--cluster", metavar="SPEC", help="another cluster than the job's")
    add_set(parser)
    stages = parser.add_argument_group("the pipeline, without a job")
    stages.add_argument("--stages", metavar="P", type=int, default=4, help="pipeline ranks (default: 4)")
    stages.add_argument("--micro-batches", metavar="M", type=int, default=8, help="per step (default: 8)")
    stages.add_argument("--forward", metavar="T,T,…", default="", help="time of a forward on each stage (default: 1)")
    stages.add_argument("--backward", metavar="T,T,…", default="", help="of a backward (default: twice the forward)")
    parser.add_argument(
        "--weight-share",
        metavar="X",
        type=float,
        default=0.5,
        help="share of a backward in its second half, the weights' gradients (default: 0.5)",
    )
    parser.add_argument(
        "--send", metavar="T", type=float, default=0.0, help="time of a message between neighbours (default: 0)"
    )
    parser.add_argument("--split", action=OnOff, default=True, help="allow backward in two halves (default: yes)")
    parser.add_argument("--out", metavar="FILE.toml", help="write the best order as a [parallel] section")
    _configure_search(parser, evaluations=1000)


def _configure_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx evolve kernels`."""
    parser.add_argument("op", metavar="OP", nargs="?", default="rms-norm", help="the operation (default: rms-norm)")
    parser.add_argument("--device", metavar="D", default="auto", help="cuda, cpu or auto (default)")
    parser.add_argument("--tokens", metavar="T", type=int, default=0, help="rows of the input")
    parser.add_argument("--width", metavar="D", type=int, default=0, help="elements of a row")
    parser.add_argument("--out", metavar="FILE.py", help="write the fastest kernel")
    _configure_search(parser, evaluations=120)


def run_command(args: argparse.Namespace) -> int:
    """Run the search and print its archive's best entries, or export an archive."""
    if args.what == "export":
        return show(phalanx.evolve.export(args.archive, args.out), as_json=args.json)
    shared = {
        "evaluations": args.evaluations,
        "seed": args.seed,
        "archive": args.archive,
        "picture": args.picture,
        "proposer": args.proposer,
        "progress": note,
    }
    if args.what == "plans":
        plans = phalanx.evolve.plans(
            args.job,
            args.cluster,
            memory_gb=_numbers("--memory", args.memory),
            links_gbits=_numbers("--links", args.links),
            most_inner_steps=args.most_inner_steps,
            overrides=args.overrides,
            **shared,
        )
        return show(plans, as_json=args.json)
    if args.what == "schedules":
        schedules = phalanx.evolve.schedules(
            args.job,
            args.cluster,
            stages=args.stages,
            micro_batches=args.micro_batches,
            forward=_numbers("--forward", args.forward),
            backward=_numbers("--backward", args.backward),
            weight_share=args.weight_share,
            send=args.send,
            split=args.split,
            overrides=args.overrides,
            **shared,
        )
        if args.out:
            schedules.write(args.out)
            note(f"wrote {args.out}: its [parallel] section is for a job of {schedules.micro_batches} micro-batches")
        return show(schedules, as_json=args.json)
    kernel = phalanx.evolve.kernels(args.op, device=args.device, tokens=args.tokens, width=args.width, **shared)
    if args.out:
        kernel.write(args.out)
        note(f"wrote {args.out}")
    return show(kernel, as_json=args.json)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",") if number.strip()]
    except ValueError as error:
        raise mistake(option, f'"{text[:60]}" is not a list of numbers', fix=f"such as {option} 1,2,4") from error
