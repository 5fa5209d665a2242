"""`phalanx watch`: follow a run in the terminal, also over ssh; without a terminal it prints plain lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque

import phalanx
from phalanx.cli.output import say
from phalanx.io.visible import visible_json
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.api.watching import KnownVerdicts, RunLook
    from phalanx.record.report.live import View

REDRAW_S = 0.5
PLAIN_S = 5.0  # between lines of progress
JSON_S = 1.0
SHOWN = 6  # newest remarks on the screen
FIRST = 20  # earlier remarks that plain lines begin with


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx watch`."""
    parser.add_argument("run", metavar="RUN", help="a run folder; the run may be finished")
    parser.add_argument("--plain", action="store_true", help="print lines for a log instead of a full screen")
    parser.add_argument("--json", action="store_true", help="print a JSON object per line whenever something changes")


def run_command(args: argparse.Namespace) -> int:
    """Follow the run until it ends or Ctrl-C; the exit code is 0 in either case."""
    looks = phalanx.watch(args.run, every_s=JSON_S if args.json else REDRAW_S)
    try:
        if args.json:
            _follow_objects(looks)
        elif args.plain or not sys.stdout.isatty():
            _follow_lines(looks)
        else:
            _follow_screen(looks, name=phalanx.run(args.run).name)
    except KeyboardInterrupt:
        pass
    return 0


def _follow_lines(looks: Iterator[RunLook]) -> None:
    """Print remarks as they come, a line of progress every few seconds, and a summary at the end."""
    last_line, due_s = "", 0.0
    broken: set[str] = set()  # ids of failed rules that were printed already
    first, over = True, False
    for look in looks:
        view, remarks = look.view, list(look.remarks)
        if first and len(remarks) > FIRST:
            remarks = [f"… {plural(len(remarks) - FIRST, 'earlier remark')}", *remarks[-FIRST:]]
        first = False
        for line in remarks:
            say(line, flush=True)
        line = str(look)
        if line != last_line and (view.is_finished or time.monotonic() >= due_s):
            say(line, flush=True)
            last_line, due_s = line, time.monotonic() + PLAIN_S
        if over:  # the second look after the end has the verdicts on the whole run
            _tell_verdicts(look.check, broken, last=True)
            _last_words(view)
            return
        over = view.is_finished
        if not over:
            _tell_verdicts(look.check, broken)


def _tell_verdicts(known: KnownVerdicts, broken: set[str], *, last: bool = False) -> None:
    """Print rules that newly fail, each once; at the end also the number of rules per verdict."""
    from phalanx.io.values import printable

    # A record that is read in part only may look as if a rule failed.
    is_complete = last or (known.verdicts is not None and known.verdicts.is_settled)
    for problem in known.problems() if is_complete else ():
        if problem.rule.id not in broken:
            broken.add(problem.rule.id)
            say(
                f"check: {problem.severity} {problem.rule.id} {problem.rule.slug}: {printable(problem.outcome.what)}",
                flush=True,
            )
    if last and known.line():
        say(f"check: {known.line()}", flush=True)


def _last_words(view: View) -> None:
    """Print the summary after the end: stragglers, where the time went, costs, damaged files, final state."""
    from phalanx.io.values import printable
    from phalanx.record.report.sections import cost_rows

    s = view.summary
    for straggler in view.scores.named:
        say(f"straggler: {straggler.text}")
    if s.ledger is not None and s.ledger.wall_s:
        say(s.ledger)
    for name, so_far, _, planned in cost_rows(s.cost) if s.cost is not None else ():
        say(f"{name}: {so_far}, planned {planned}")
    for damage in s.damage:
        say(f"damaged: {printable(damage.where)}: {printable(damage.what)} ({damage.count:,})")
    why = f": {printable(s.message)}" if s.message else ""
    say(f"{printable(view.state, most=40)}{why}", flush=True)


def _follow_objects(looks: Iterator[RunLook]) -> None:
    """Print a JSON object per line whenever the run's state changed."""
    last_line, over = "", False
    for look in looks:
        if look.view.is_finished and not over:
            over = True
            continue  # the next look has the verdicts on the whole run
        line = visible_json(json.dumps(look.to_dict(), ensure_ascii=False, allow_nan=False))
        if line != last_line:
            print(line, flush=True)
            last_line = line


def _follow_screen(looks: Iterator[RunLook], *, name: str) -> None:
    """Redraw the screen until the run ends."""
    from rich.console import Console, Group
    from rich.live import Live

    from phalanx.cli.watch_screen import frame

    console = Console(highlight=False, markup=False, emoji=False)
    remarks: deque[str] = deque(maxlen=SHOWN)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for look in looks:
            remarks.extend(look.remarks)
            width, height = console.size
            lines = frame(look.view, remarks, name=name, width=width, height=height - 1, check=look.check)
            live.update(Group(*lines), refresh=True)
