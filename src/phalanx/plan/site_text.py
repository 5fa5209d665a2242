"""The sites of a plan as tables: each site, the modes and codecs, and utilisation by H."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape

from phalanx.hardware.sites import MBIT
from phalanx.io.tables import html_table, text_table
from phalanx.plan.site_forecast import ModeRow, SiteForecast
from phalanx.plan.slow_modes import hiding_delay
from phalanx.units import format_bytes, format_count, format_money, format_seconds

Table = list[tuple[str, ...]]
WIDTH = 96  # of a note, as in the rest of the page


def site_table(forecast: SiteForecast) -> Table:
    """Return the sites in the job's own mode as a table with a header."""
    rows: Table = [("site", "devices", "layout", "step", "up / down", "trip", "loss", "share", "busy")]
    for site, use in zip(forecast.sites, forecast.row.prediction.sites, strict=True):
        rows.append(
            (site.name, f"{site.devices:,} x {_device_name(site.cluster)}", site.layout, format_seconds(site.step_s),
             f"{site.up_bytes_per_s / MBIT:,.4g} / {site.down_bytes_per_s / MBIT:,.4g} Mbit/s",
             format_seconds(site.latency_s), f"{site.loss:.2%}" if site.loss else "none",
             "none" if site.client_only else f"{use.share:.0%}",
             f"{use.utilisation:.1%}" if use.counted else "late")
        )  # fmt: skip
    return rows


def mode_table(forecast: SiteForecast) -> tuple[Table, list[str]]:
    """Return modes and codecs as a table with a header, the job's own marked, and the sources it cites."""
    head = ("  mode", "codec", "H", "exchange", "busy", "run", "tok/s", "sent", "time", "cost", "loss %")
    rows: Table = [head]
    sources: list[str] = []
    for index, row in enumerate(forecast.rows):
        p, mark = row.prediction, ">" if index == forecast.chosen else " "
        rows.append(
            (f"{mark} {p.mode}", p.codec, f"{p.inner_steps:,}", format_seconds(p.exchange_s),
             f"{p.utilisation:.1%}", f"{row.run_utilisation:.0%}", format_count(p.tokens_per_s),
             format_bytes(p.bytes_per_step), format_seconds(row.training_s),
             format_money(row.usd) if row.usd is not None else "-", _penalty_text(row, sources))
        )  # fmt: skip
    return rows, [f"[{number}] {source}" for number, source in enumerate(sources, start=1)]


def _penalty_text(row: ModeRow, sources: list[str]) -> str:
    penalty = row.penalty
    source_text = "; ".join(part for part in (penalty.source, penalty.note) if part)
    if source_text not in sources:
        sources.append(source_text)
    number = sources.index(source_text) + 1
    if penalty.percent is None:
        return f"? [{number}]"
    return f"{round(penalty.percent, 1) + 0.0:+.1f} [{number}]"  # + 0.0 turns -0.0 into 0.0


def grid_table(forecast: SiteForecast) -> Table:
    """Return the utilisation of each codec at each H, and the smallest H that reaches the target, as a table."""
    head = ("codec", *(f"H = {steps:,}" for steps in forecast.inner_steps))
    rows: Table = [(*head, f"smallest H for {forecast.target_utilisation:.0%}")]
    for codec_row in forecast.grid:
        min_steps = f"{codec_row.smallest_inner_steps:,}" if codec_row.smallest_inner_steps else "none"
        rows.append((codec_row.codec, *(f"{share:.1%}" for share in codec_row.utilisation), min_steps))
    return rows


def site_sections(forecast: SiteForecast) -> list[tuple[str, list[str]]]:
    """Return blocks of lines with titles for the page of a plan."""
    modes, sources = mode_table(forecast)
    notes = [
        line
        for note in (*mode_notes(forecast), *sources)
        for line in textwrap.wrap(note, WIDTH, break_on_hyphens=False)
    ]
    delay = [line for note in delay_notes(forecast) for line in textwrap.wrap(note, WIDTH, break_on_hyphens=False)]
    return [
        ("SITES", text_table(site_table(forecast), right=(3, 4, 5, 6, 7, 8))),
        ("MODES AND CODECS ON THE SLOW LINKS", [*text_table(modes, right=range(2, 10)), *notes]),
        ("UTILISATION BY CODEC AND INNER STEPS (H)", [*text_table(grid_table(forecast), right=range(1, 99)), *delay]),
    ]


def delay_notes(forecast: SiteForecast) -> list[str]:
    """Return advice on a delay that spares the job's own mode the wait for its exchanges, if there is one."""
    prediction = forecast.row.prediction
    delay = hiding_delay(prediction, forecast.row.sync)
    if delay is None:
        return []
    return [
        f"> with sync.delay_steps = {delay:,} sites compute while an update travels "
        f"({format_seconds(prediction.exchange_s)}), and wait for none; what that costs in loss was not measured by us"
    ]


def mode_notes(forecast: SiteForecast) -> list[str]:
    """Return explanations of the columns, and the time of the warm-up in the job's own mode."""
    row = forecast.row
    notes = [
        f"> is the job's own [sync]; {format_count(forecast.values)} values are exchanged",
        "busy: utilisation after the synchronous steps at the start; run, time and cost: with them, without failures; "
        "sent: bytes per optimizer step of the busiest site, which receives as many",
        "loss %: expected rise of the validation loss over every-step with fp32; ?: not measured by us",
    ]
    if row.warm_up_steps:
        notes.append(
            f"the first {row.warm_up_steps:,} of {row.steps:,} steps exchange gradients every time and take "
            f"{format_seconds(row.warm_up_s)} of the {format_seconds(row.training_s)}"
        )
    return notes


def site_html(forecast: SiteForecast) -> list[str]:
    """Return the same tables as HTML for notebooks and pages."""
    modes, sources = mode_table(forecast)
    blocks: Sequence[tuple[str, Table]] = (
        ("Sites", site_table(forecast)),
        ("Modes and codecs on the slow links", modes),
        ("Utilisation by codec and inner steps (H)", grid_table(forecast)),
    )
    tables = [f"<h5>{title}</h5>{html_table(rows[1:], head=rows[0])}" for title, rows in blocks]
    return [*tables, *(f"<p>{escape(note)}</p>" for note in (*mode_notes(forecast), *sources, *delay_notes(forecast)))]


def _device_name(cluster: str) -> str:
    """Return `8xH100-80GB-SXM:1` as `H100-80GB-SXM`, and other names unchanged."""
    spec = re.fullmatch(r"\d+x(.+):\d+", cluster)
    return spec.group(1) if spec else cluster
