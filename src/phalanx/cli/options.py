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
