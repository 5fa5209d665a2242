"""`phalanx watch`: a run in the terminal while it goes on, also over ssh; plain lines where there is no terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque

from phalanx.cli.output import plain, say
from phalanx.io.visible import visible_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.cli.watch_check import Checker, Known
    from phalanx.record.report.live import View, Watcher

REDRAW_S = 0.5
PLAIN_S = 5.0  # between lines of progress
JSON_S = 1.0
KEPT = 6  # remarks on the screen
FIRST = 20  # remarks of before that plain lines begin with


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx watch`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, of a run that goes on or is over")
    parser.add_argument("--plain", action="store_true", help="lines for a log instead of a screen")
    parser.add_argument("--json", action="store_true", help="a JSON object per line whenever something changed")


def run(args: argparse.Namespace) -> int:
    """Follow the run until it ends or Ctrl-C; both are a good end."""
    from phalanx.cli.watch_check import Checker
    from phalanx.record.report.live import Watcher
    from phalanx.record.run import open_run

    watcher = Watcher(open_run(args.run))
    checker = Checker(watcher.run)
    try:
        if args.json:
            _objects(watcher, checker)
        elif args.plain or not sys.stdout.isatty():
            _lines(watcher, checker)
        else:
            _screen(watcher, checker)
    except KeyboardInterrupt:
        pass
    return 0


def _lines(watcher: Watcher, checker: Checker) -> None:
    shown, due_s = "", 0.0
    broken: set[str] = set()  # rules that were told of
    first = True
    while True:
        view = watcher.look()
        remarks = watcher.remarks()
        if first and len(remarks) > FIRST:
            remarks = [f"… {len(remarks) - FIRST:,} remarks before", *remarks[-FIRST:]]
        first = False
        for line in remarks:
            say(line, flush=True)
        line = view.progress.line() if view.progress is not None else "no step yet"
        if line != shown and (view.over or time.monotonic() >= due_s):
            say(line, flush=True)
            shown, due_s = line, time.monotonic() + PLAIN_S
        if view.over:
            _judged(checker.last(), broken, last=True)
            _last_words(view)
            return
        _judged(checker.known, broken)
        time.sleep(REDRAW_S)


def _judged(known: Known, broken: set[str], *, last: bool = False) -> None:
    """Rules that are newly broken, each once; at the end how many there are of each verdict."""
    from phalanx.io.values import printable

    # What is half read may look broken and not be.
    whole = last or (known.verdicts is not None and known.verdicts.is_settled)
    for one in known.problems() if whole else ():
        if one.rule.id not in broken:
            broken.add(one.rule.id)
            say(f"check: {one.severity} {one.rule.id} {one.rule.slug}: {printable(one.outcome.what)}", flush=True)
    if last and known.line():
        say(f"check: {known.line()}", flush=True)


def _last_words(view: View) -> None:
    from phalanx.io.values import printable
    from phalanx.record.report.sections import cost_rows

    s = view.summary
    for one in view.scores.named:
        say(f"straggler: {one.text}")
    if s.ledger is not None and s.ledger.wall_s:
        say(s.ledger)
    for name, so_far, _, planned in cost_rows(s.cost) if s.cost is not None else ():
        say(f"{name}: {so_far}, planned {planned}")
    for damage in s.damage:
        say(f"damaged: {printable(damage.where)}: {printable(damage.what)} ({damage.count:,})")
    why = f": {printable(s.message)}" if s.message else ""
    say(f"{printable(view.state, most=40)}{why}", flush=True)


def _objects(watcher: Watcher, checker: Checker) -> None:
    shown = ""
    while True:
        view = watcher.look()
        known = checker.last() if view.over else checker.known
        told = _as_json(view) | {"check": known.as_json()}
        line = visible_json(json.dumps(plain(told), ensure_ascii=False, allow_nan=False))
        if line != shown:
            print(line, flush=True)
            shown = line
        if view.over:
            return
        time.sleep(JSON_S)


def _as_json(view: View) -> dict[str, object]:
    s, p = view.summary, view.progress
    cost = s.cost.so_far if s.cost is not None else None
    return {
        "state": view.state,
        "step": p.step if p is not None else 0,
        "steps": p.steps if p is not None else None,
        "loss": p.loss if p is not None else None,
        "tokens_per_s": p.tokens_per_s if p is not None else None,
        "mean_tokens_per_s": s.tokens_per_s.measured,
        "left_s": p.left_s if p is not None else None,
        "mfu": s.mfu.measured,
        "memory_bytes": s.memory_bytes.measured,
        "noise_scale": s.noise_scale,
        "effective": s.effective_time.measured,
        "accounts": s.ledger.accounts if s.ledger is not None else None,
        "so_far": cost,
        "incidents": len(s.incidents),
        "stragglers": view.scores.named,
        "saved_step": view.saved_step,
        "damage": s.damage,
    }


def _screen(watcher: Watcher, checker: Checker) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from phalanx.cli.watch_screen import frame

    console = Console(highlight=False, markup=False, emoji=False)
    kept: deque[str] = deque(maxlen=KEPT)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def draw(view: View, known: Known) -> None:
            width, height = console.size
            lines = frame(view, kept, name=watcher.run.name, width=width, height=height - 1, check=known)
            live.update(Group(*lines), refresh=True)

        while True:
            view = watcher.look()
            kept.extend(watcher.remarks())
            draw(view, checker.known)
            if view.over:
                draw(view, checker.last())
                return
            time.sleep(REDRAW_S)
