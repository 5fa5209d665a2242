"""Arguments that several verbs share, so that they read and behave the same everywhere."""

from __future__ import annotations

import argparse


def add_job(parser: argparse.ArgumentParser) -> None:
    """JOB and --set, for verbs that read a job file."""
    parser.add_argument("job", metavar="JOB", help="the job file, such as job.toml")
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """--set, which may be given several times."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one setting, as --set parallel.tensor=8; may be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, for every verb that has a result."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_no_probe(parser: argparse.ArgumentParser) -> None:
    """--no-probe, for verbs that plan for this machine."""
    parser.add_argument(
        "--no-probe", action="store_true", help="do not measure this machine's cores before the first local plan"
    )


def add_ranks_per_gpu(parser: argparse.ArgumentParser) -> None:
    """--ranks-per-gpu, for verbs that start ranks."""
    parser.add_argument(
        "--ranks-per-gpu",
        metavar="N",
        type=int,
        help="let N ranks share a GPU, for proofs and drills (train.ranks_per_gpu, 1); above 1 needs NCCL 2.30",
    )


def take_ranks_per_gpu(args: argparse.Namespace) -> None:
    """The option as the setting of the job that it stands for, so that it is recorded and reaches every agent."""
    if args.ranks_per_gpu is not None:
        args.overrides = [*args.overrides, f"train.ranks_per_gpu={args.ranks_per_gpu}"]
