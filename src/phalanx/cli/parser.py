"""The parser of every verb: argparse with Phalanx's error messages, and the options that several verbs share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from phalanx.errors import UserError, mistake, nearest
from phalanx.io.limits import MAX_OPTION
from phalanx.io.visible import one_line

MAX_OPTION_CHARACTERS = 100  # of a whole number, digits and underscores
# Options that set a key of the job: with --set of the same key, one of the two would be ignored silently.
STANDS_FOR = {"cluster": ("cluster.spec", "cluster.file"), "steps": ("data.tokens",)}


class StoreOnce(argparse._StoreAction):
    """An option with one value, given at most once; argparse would silently take the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value; called by argparse for each occurrence. Positional arguments occur once anyway."""
        if option_string is not None:
            _note_value(parser, self, option_string, values)
        super().__call__(parser, namespace, values, option_string)


class OnOff(argparse.BooleanOptionalAction):
    """A pair of options --name and --no-name, of which at most one may be given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse for each occurrence."""
        _note_value(parser, self, str(option_string), None)
        super().__call__(parser, namespace, values, option_string)


class VerbAction(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Sub-commands whose `help` in the list is also the description of their own help page."""

    def add_parser(self, name: str, **settings: Any) -> Any:
        """Add a sub-command as argparse does; without `help` it is not listed and has no description."""
        return super().add_parser(name, **{"description": settings.get("help"), **settings})


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of printing usage and exiting.

    Options cannot be abbreviated. An option with a single value is refused the second time; options with
    `action="append"` (--set, lists) may be repeated.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.register("action", None, StoreOnce)
        self.register("action", "store", StoreOnce)
        self.register("type", int, read_whole)  # every option with `type=int`
        self.given: dict[str, str] = {}  # destination -> the words that set it, of the call being parsed

    def add_subparsers(self, **settings: Any) -> Any:
        """Add sub-commands whose `help` is also their description (see VerbAction)."""
        return super().add_subparsers(**{"action": VerbAction, **settings})

    def parse_known_args(  # type: ignore[override]  # the parent has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse one call; parsers of sub-commands are called here too."""
        self.given = {}
        parsed, extra = super().parse_known_args(args, namespace)
        self._refuse_hidden(parsed)
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        """Raise UserError; called by argparse for every mistake in the call."""
        raise mistake(self.prog, message, fix=f"{self._nearest_hint(message)}{self.prog} --help lists the options")

    def _nearest_hint(self, message: str) -> str:
        head, _, rest = message.partition("unrecognized arguments: ")
        if head or not rest.startswith("-"):
            return ""
        close = nearest(rest.split()[0].partition("=")[0], self._option_string_actions)
        return f"did you mean {close}? " if close else ""

    def _refuse_hidden(self, found: argparse.Namespace) -> None:
        """Raise UserError for a key set twice by --set, or by --set and by the option that sets the same key."""
        settings: dict[str, str] = {}
        for text in getattr(found, "overrides", None) or ():
            key = text.partition("=")[0].strip()
            if key in settings and settings[key] != text:
                raise self._given_twice(f"--set {settings[key]}", f"--set {text}")
            settings[key] = text
        for option, keys in STANDS_FOR.items():
            for key in keys:
                if key in settings and option in self.given:
                    raise self._given_twice(self.given[option], f"--set {settings[key]}")

    def _given_twice(self, first: str, second: str) -> UserError:
        return mistake(
            self.prog,
            f"{_short_text(first)} and {_short_text(second)} are both given",
            why="they set the same thing, and only one can hold",
            fix="leave one of them out",
        )


def read_whole(text: str) -> int:
    """Convert an option's text to an integer of at most 64 bits; raise ArgumentTypeError otherwise.

    No option needs a larger one, and arithmetic on a huge integer may never end.
    """
    try:
        value = int(text) if len(text) <= MAX_OPTION_CHARACTERS else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{_short_text(text)!r} is not a whole number") from error
    if value is None or abs(value) > MAX_OPTION:
        raise argparse.ArgumentTypeError(f"{_short_text(text)!r} is not between -{MAX_OPTION:,} and {MAX_OPTION:,}")
    return value


def _note_value(parser: argparse.ArgumentParser, action: argparse.Action, option: str, values: Any) -> None:
    """Record that the option was given; raise UserError if its destination was set before."""
    words = [str(value) for value in values] if isinstance(values, list) else [] if values is None else [str(values)]
    text = " ".join([option, *words])
    if isinstance(parser, Parser):
        if action.dest in parser.given:
            raise parser._given_twice(parser.given[action.dest], text)
        parser.given[action.dest] = text


def _short_text(text: str) -> str:
    return one_line(text if len(text) <= 80 else text[:79] + "…")


# ---- options that several verbs share --------------------------------------------------------------------------------


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add JOB and --set, for verbs that read a job file."""
    parser.add_argument("job", metavar="JOB", help="the job file, such as job.toml")
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add --set, which may be repeated."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one setting, e.g. --set parallel.tensor=8; may be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, for every verb that has a result."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_no_probe(parser: argparse.ArgumentParser) -> None:
    """Add --no-probe, for verbs that plan for this machine."""
    parser.add_argument(
        "--no-probe", action="store_true", help="do not measure this machine's cores before the first local plan"
    )


def add_ranks_per_gpu(parser: argparse.ArgumentParser) -> None:
    """Add --ranks-per-gpu, for verbs that start ranks."""
    parser.add_argument(
        "--ranks-per-gpu",
        metavar="N",
        type=int,
        help="let N ranks share a GPU, for verification and drills (default: train.ranks_per_gpu, else 1); needs "
        "NCCL 2.30",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add --hosts and --spares, for verbs that start agents; --agents is the name of --hosts until 0.7."""
    parser.add_argument(
        "--hosts",
        metavar="N",
        type=int,
        default=1,
        help="run as if this machine were N hosts, for tests and drills (default: 1)",
    )
    parser.add_argument("--agents", dest="hosts", action=FormerName, metavar="N", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--spares",
        metavar="N",
        type=int,
        default=0,
        help="spare slots, one rank each, kept warm to replace failed ranks (default: 0); launch counts spare hosts",
    )


class FormerName(StoreOnce):
    """An option under a former name: it works, and prints the new name on stderr."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse for each occurrence."""
        print(f"note: {option_string} is now called --{self.dest.replace('_', '-')}", file=sys.stderr)
        super().__call__(parser, namespace, values, option_string)
