"""A report for a terminal of 100 columns, and as Markdown for an issue or a wiki."""

from __future__ import annotations

import textwrap
from pathlib import Path

from phalanx.errors import UserError
from phalanx.io.tables import markdown_table, markdown_text, text_bar, text_table, two_part_bar
from phalanx.io.values import printable
from phalanx.record.account.summary import Summary
from phalanx.record.report.run_report import RunReport
from phalanx.record.report.sections import (
    Bar,
    Block,
    Cell,
    ColourKey,
    Items,
    Paragraph,
    Quote,
    Stack,
    Table,
    report_headline,
    report_sections,
)
from phalanx.record.run_settings import read_launch

WIDTH = 100
BAR_WIDTH = 24
MOST_SAMPLE = 4000  # characters of a text that the model generated


# ---- a terminal ------------------------------------------------------------------------------------------------------


def render_text(summary: Summary) -> str:
    """Return the report: predictions and measurements, losses, time, ranks, incidents, cost, and the run's folder."""
    head = report_headline(summary)
    lines = [f"{summary.run}: {head.state}, {head.progress}", *(f"  {line}" for line in head.message), head.subject]
    for section in report_sections(summary):
        body = [line for block in section.blocks for line in _text_lines(block)]
        lines += ["", section.title.upper(), *(f"  {line}".rstrip() for line in body)]
    lines += ["", f"run folder: {summary.run}"]
    if summary.checkpoints and summary.state != "done":
        # Not wrapped, so that it can be copied.
        lines.append(f"resume with: {resume_command(Path(summary.run))}")
    return "\n".join(lines)


def resume_command(run: Path) -> str:
    """Return the command that resumes a run: `peers start` for one peer, else `train`."""
    try:
        launch = read_launch(run / "launch.json")
    except UserError:
        launch = {}
    is_peer = (run / "peers").is_dir() and "is_trial" not in launch
    return f"phalanx {'peers start' if is_peer else 'train'} --resume {run}"


def _text_lines(block: Block) -> list[str]:
    match block:
        case Table():
            head = [block.head] if any(block.head) else []
            return text_table([*head, *([_text_cell(cell) for cell in row] for row in block.rows)], right=block.right)
        case Paragraph():
            return textwrap.wrap(block.text, WIDTH - 4)
        case Items():
            return [
                line
                for text in block.texts
                for line in textwrap.wrap(printable(text, most=MOST_SAMPLE), WIDTH - 4, subsequent_indent="  ")
            ]
        case Quote():
            wrapped = [textwrap.wrap(printable(text, most=MOST_SAMPLE), WIDTH - 6) or [""] for text in block.texts]
            return [line for text in wrapped for line in [*(f"│ {line}" for line in text), ""]][:-1]
        case Stack():
            return []


def _text_cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        if len(cell.parts) == 1:
            return text_bar(cell.parts[0][1] / cell.whole, BAR_WIDTH)
        (_, first), (_, second) = cell.parts
        return two_part_bar(first / cell.whole, second / cell.whole, BAR_WIDTH)
    return cell.name if isinstance(cell, ColourKey) else cell


# ---- Markdown --------------------------------------------------------------------------------------------------------


def render_markdown(report: RunReport) -> str:
    """Return the numbers of the HTML page without its plots."""
    head = report_headline(report.summary)
    why = f"\n\n> {markdown_text(' '.join(head.message))}" if head.message else ""
    opening = f"**{markdown_text(head.state)}**, {markdown_text(head.progress)}. {markdown_text(head.subject)}."
    parts = [f"# {markdown_text(head.name)}\n\n{opening}{why}"]
    for section in report_sections(report.summary, report):
        body = [text for block in section.blocks if (text := _markdown_block(block))]
        parts.append("\n\n".join([f"## {section.title}", *body]))
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Table():
            bar_columns = {column for row in block.rows for column, cell in enumerate(row) if isinstance(cell, Bar)}
            text_columns = [column for column in range(len(block.head)) if column not in bar_columns]
            rows = [[_markdown_cell(row[column]) for column in text_columns] for row in block.rows]
            return markdown_table([block.head[column] for column in text_columns], rows)
        case Paragraph():
            return markdown_text(block.text, most=2000)
        case Items():
            return "\n".join(f"- {markdown_text(text)}" for text in block.texts)
        case Quote():
            return "\n\n".join(f"> {markdown_text(text, most=1000)}" for text in block.texts[:4])
        case Stack():
            return ""


def _markdown_cell(cell: Cell) -> str:
    return "" if isinstance(cell, Bar) else markdown_text(cell.name if isinstance(cell, ColourKey) else cell)
