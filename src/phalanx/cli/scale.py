"""`phalanx scale`: scaling laws, from small runs to the large one; each sub-command is a module `scale_….py`."""

from __future__ import annotations

import argparse
from importlib import import_module

# sub-command -> (module with `configure_parser(parser)` and `run_command(args) -> exit code`, help)
SUBCOMMANDS = {
    "sweep": ("phalanx.cli.scale_sweep", "train a grid of small models on this machine, for a scaling law"),
    "fit": ("phalanx.cli.scale_fit", "fit a scaling law to a table of runs, with intervals and diagnostics"),
    "allocate": ("phalanx.cli.scale_allocate", "choose model size, tokens and layout for a compute budget"),
    "predict": (
        "phalanx.cli.scale_predict",
        "compare a run's loss with the scaling law's prediction, during or after training",
    ),
}


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `phalanx scale`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (module, help_line) in SUBCOMMANDS.items():
        import_module(module).configure_parser(verbs.add_parser(name, help=help_line, description=help_line))


def run_command(args: argparse.Namespace) -> int:
    """Run the sub-command."""
    return int(import_module(SUBCOMMANDS[args.what][0]).run_command(args))
