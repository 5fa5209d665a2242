"""Pages of scaling laws: the sweeps in the folder of runs, and the fit of each with its pictures.

Made on the server and without a script: text, and pictures that are files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.errors import PhalanxError
from phalanx.web.run_store import NotYetError, RunStore

TABLE = "points.csv"  # what phalanx scale sweep writes
MOST_SWEEPS = 200
WAIT_S = 20.0
PICTURES = {
    "isoflop.svg": "Loss over parameters, a curve per budget; dashed: the law",
    "residuals.svg": "Measured over predicted loss",
    "frontier.svg": "Loss of the best model of each budget, with its 80 % interval",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitPage:
    """A fitted sweep as the page shows it; `problem` where no law can be fitted to it."""

    text: str = ""
    pictures: Mapping[str, str]
    problem: str = ""


def scaling_routes(store: RunStore) -> list[Route]:
    """All addresses below /scaling."""

    async def listing(request: Request) -> Response:
        return _html_page("Scaling laws", await to_thread.run_sync(_list_body, store), up="")

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        table = (await to_thread.run_sync(find_sweeps, store)).get(name)
        if table is None:
            return _html_page("Scaling laws", "<p>There is no sweep of this name here.</p>", status=404)
        try:
            found = await to_thread.run_sync(fit_page, store, name, table)
        except NotYetError:
            return _html_page(name, "<p>The law is still being fitted; load this page again in a moment.</p>", 503)
        return _html_page(name, _fit_body(name, found))

    async def picture(request: Request) -> Response:
        name, file = request.path_params["name"], request.path_params["picture"]
        table = (await to_thread.run_sync(find_sweeps, store)).get(name)
        try:
            found = None if table is None else await to_thread.run_sync(fit_page, store, name, table)
        except NotYetError:
            found = None
        if found is None or file not in found.pictures:
            return Response("", 404, media_type="text/plain")
        return Response(found.pictures[file], headers={"cache-control": "no-cache"}, media_type="image/svg+xml")

    return [
        Route("/scaling", listing, methods=["GET"]),
        Route("/scaling/{name}", one, methods=["GET"]),
        Route("/scaling/{name}/{picture}", picture, methods=["GET"]),
    ]


def find_sweeps(store: RunStore) -> dict[str, Path]:
    """The tables of sweeps in the folder, by the names of their folders; none where one run alone is shown."""
    if store.is_one_run:
        return {}
    try:
        folders = sorted(one for one in store.root.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError:
        return {}
    return {one.name: one / TABLE for one in folders if (one / TABLE).is_file()} if folders else {}


def fit_page(store: RunStore, name: str, table: Path) -> FitPage:
    """The fit of a table, kept until the table changes."""
    stamp = table.stat()
    found: FitPage = store.memo.get(
        ("scaling", name), (stamp.st_size, stamp.st_mtime_ns), lambda: _fit_table(table), wait_s=WAIT_S, now=True
    )
    return found


def _fit_table(table: Path) -> FitPage:
    from phalanx.scale.fit_points import fit_law
    from phalanx.scale.fit_text import fit_text
    from phalanx.scale.plots import fit_plots
    from phalanx.scale.points import TableOptions, read_points

    try:
        # A sweep's own table counts all parameters, and 6·N·D.
        points = read_points(table, TableOptions(params_counted="total", flops_counted="6nd"))
        fit = fit_law(points)
    except PhalanxError as error:
        return FitPage(pictures={}, problem="; ".join(f"{one.what} {one.why}".strip() for one in error.problems[:3]))
    return FitPage(text=fit_text(fit), pictures=fit_plots(fit, points))


def _list_body(store: RunStore) -> str:
    names = list(find_sweeps(store))[:MOST_SWEEPS]
    if not names:
        return (
            "<p>No sweep lies in this folder. <code>phalanx scale sweep JOB --budgets 1e15..1e17</code> makes one.</p>"
        )
    items = "".join(f'<li><a href="scaling/{quote(name, safe="")}">{escape(name)}</a></li>' for name in names)
    return f"<ul>{items}</ul>"


def _fit_body(name: str, found: FitPage) -> str:
    if found.problem:
        return f"<p>No law can be fitted to this sweep yet: {escape(found.problem)}</p>"
    address = quote(name, safe="")
    pictures = "".join(
        f'<figure><img src="{address}/{file}" alt="{escape(PICTURES[file])}" width="760">'
        f'<figcaption>{escape(PICTURES[file])} (<a href="{address}/{file}" download>SVG</a>)</figcaption></figure>'
        for file in PICTURES
        if file in found.pictures
    )
    blocks = found.text.strip("\n").split("\n\n")
    texts = "".join(f'<pre class="{_block_class(one)}">{escape(one)}</pre>' for one in blocks)
    return f"{pictures}{texts}"


def _block_class(block: str) -> str:
    """A table keeps its lines and scrolls sideways on a narrow screen; sentences are wrapped."""
    is_table = sum(len(re.findall(r"\S {2,}(?=\S)", line)) >= 2 for line in block.splitlines()) >= 2
    return "table" if is_table else "sentences"


def _html_page(title: str, body: str, status: int = 200, *, up: str = "../") -> Response:
    """A page; `up` leads to the dashboard's root, which need not be the server's."""
    styles = "".join(f'<link rel="stylesheet" href="{up}static/css/{one}.css">' for one in ("base", "parts", "pages"))
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)} - Phalanx</title><link rel="icon" type="image/svg+xml" href="{up}static/icon.svg">'
        f'{styles}</head><body><header class="bar"><a class="brand" href="{up or "./"}">'
        f'<img src="{up}static/icon.svg" alt="" width="20" height="20">Phalanx</a>'
        f'<nav aria-label="Where you are"><a href="{up}scaling">Scaling laws</a></nav></header>'
        f'<main id="main"><h1>{escape(title)}</h1>{body}</main></body></html>'
    )
    return Response(text, status, headers={"cache-control": "no-store"}, media_type="text/html")
