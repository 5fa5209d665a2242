"""`phalanx scale fit`: fit a scaling law to a table of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.api.scale_fit import check_plots
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json
from phalanx.errors import mistake


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx scale fit`."""
    parser.add_argument("source", metavar="RUNS", help="a table (CSV or JSON lines), a run folder, or a folder of runs")
    parser.add_argument(
        "--method",
        metavar="M",
        default="vpnls",
        help="vpnls (default), huber3, isoflop, kaplan, overtrain or data-constrained",
    )
    table = parser.add_argument_group("the table")
    table.add_argument(
        "--column",
        metavar="OURS=THEIRS",
        action="append",
        default=[],
        help="read a column under another name, e.g. loss=loss_c4_val, or one in millions, e.g. 'params=N (M)*1e6'; "
        "may be repeated",
    )
    table.add_argument(
        "--where",
        metavar="COLUMN=VALUE",
        action="append",
        default=[],
        help="only rows with this value; may be repeated",
    )
    table.add_argument(
        "--params-counted",
        metavar="HOW",
        default="unstated",
        help="which parameters the column params counts: total, no-embedding, no-embedding-no-head or active "
        "(default: unstated)",
    )
    table.add_argument(
        "--flops-counted",
        metavar="HOW",
        default="",
        help="how the column flops is counted: 6nd, head or head+attention (default: unstated)",
    )
    table.add_argument("--drop-highest", metavar="K", type=int, default=0, help="leave out the K highest losses")
    table.add_argument(
        "--drop", metavar="LINES", default="", help="leave out the rows on these lines of the file, such as 12,17"
    )
    table.add_argument("--mixed", action="store_true", help="allow rows with different tokenizers or datasets")
    table.add_argument(
        "--repeated", action="store_true", help="treat rows that differ only in loss as repeated measurements"
    )
    parser.add_argument(
        "--draws",
        metavar="K",
        type=int,
        default=400,
        help="resamples for intervals, at least 20, or 0 for none (default: 400)",
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the resamples (default: 0)")
    parser.add_argument("--out", metavar="FIT.json", help="write the fit, for allocate and predict")
    parser.add_argument(
        "--plots",
        metavar="PATH",
        help="write IsoFLOP curves, residuals and the frontier to a folder as SVG and PNG, or to one .svg or .png file",
    )
    add_json(parser)


def _line_numbers(text: str) -> list[int]:
    """Parse line numbers separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if bad := [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10)]:
        raise mistake("--drop", f'"{bad[0][:40]}" is not a line number', fix="give lines of the file, such as 12,17")
    return [int(word) for word in words]


def run_command(args: argparse.Namespace) -> int:
    """Fit the law, write the fit and its plots if asked to, and print it."""
    if args.plots:
        check_plots(args.plots)
    fit = phalanx.scale.fit(
        args.source,
        method=args.method,
        columns=pairs("--column", args.column),
        where=pairs("--where", args.where),
        params_counted=args.params_counted,
        flops_counted=args.flops_counted,
        drop_highest=args.drop_highest,
        drop=_line_numbers(args.drop),
        mixed=args.mixed,
        repeated=args.repeated,
        draws=args.draws,
        seed=args.seed,
    )
    if args.out:
        fit.write(args.out)
        note(f"wrote {args.out}")
    if args.plots:
        names = fit.write_plots(args.plots)
        is_file = names == (Path(args.plots).name,)
        note(f"wrote {args.plots}" if is_file else f"wrote {', '.join(names)} to {args.plots}")
        if not is_file and not any(name.endswith(".png") for name in names):
            note("no PNG: pip install 'phalanx[png]' brings Pillow, which draws them")
    return show(fit, as_json=args.json)


def pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Parse KEY=VALUE words of an option into a dict; raise UserError for a word of another form."""
    values = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise mistake(option, f'"{text[:60]}" is not of the form NAME=VALUE')
        values[key.strip()] = value.strip()
    return values
