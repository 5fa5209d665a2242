"""`phalanx report`: a run as one HTML file and a page of Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import own_version, print_json, say
from phalanx.errors import mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.report.run_report import RunReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx report`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, as phalanx train made it")
    parser.add_argument("--html", metavar="FILE", help="write the HTML here; - for stdout (RUN/report.html)")
    parser.add_argument("--markdown", metavar="FILE", help="write the Markdown here; - for stdout (RUN/report.md)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write what was asked for, and say where; without a wish, both files into the run folder."""
    if [args.html, args.markdown].count("-") + args.json > 1:
        raise mistake("phalanx report", "two results for one stdout", fix="give one of them a file")
    from phalanx.record.report.run_report import read_run_report
    from phalanx.record.run import open_run

    found = open_run(args.run)
    story = read_run_report(found)
    if args.json:
        print_json(_as_json(story))
    files = {"html": args.html, "markdown": args.markdown}
    if not any(files.values()) and not args.json:
        files = {"html": str(found.path / "report.html"), "markdown": str(found.path / "report.md")}
    for kind, name in files.items():
        if name:
            _put(kind, name, story, quiet=args.json)
    return 0


def _as_json(story: RunReport) -> dict[str, object]:
    s = story.summary
    book = s.ledger.to_json() if s.ledger is not None else None
    scores = {str(rank): score for rank, score in story.scores.score.items()}
    return {"summary": s, "ledger": book, "effective": story.effective, "scores": scores, "curves": story.curves}


def _put(kind: str, name: str, story: RunReport, *, quiet: bool) -> None:
    text = _made(kind, story)
    if name == "-":
        sys.stdout.write(text)
        return
    from phalanx.io.files import write_text

    write_text(Path(name), text, fix=f"name another file with --{kind}, or - for stdout")
    if not quiet:
        say(name)


def _made(kind: str, story: RunReport) -> str:
    if kind == "markdown":
        from phalanx.record.report.render import render_markdown as markdown

        return markdown(story)
    import time

    from phalanx.record.report.html import render_html as html

    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return html(story, made=f"phalanx {own_version()}, report of {now}")
