"""Pages of scaling laws: the sweeps in the folder of runs, and the fit of each with its plots.

Rendered on the server without scripts: text, and plots as separate files.
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

TABLE = "points.csv"  # written by phalanx scale sweep
MOST_SWEEPS = 200
WAIT_S = 20.0
PICTURES = {
    "isoflop.svg": "Loss over parameters, a curve per budget; dashed: the law",
    "residuals.svg": "Measured over predicted loss",
    "frontier.svg": "Loss of the best model of each budget, with its 80 % interval",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitPage:
    """A fitted sweep as the page shows it; `problem` is set if no law can be fitted to it."""

    text: str = ""
    pictures: Mapping[str, str]
    problem: str = ""


def scaling_routes(store: RunStore) -> list[Route]:
    """Return all routes below /scaling."""

    async def listing(request: Request) -> Response:
        return _html_page("Scaling laws", await to_thread.run_sync(_list_body, store), up="")

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        table = (await to_thread.run_sync(find_sweeps, store)).get(name)
        if table is None:
            return _html_page("Scaling laws", "<p>There is no sweep of this name here.</p>", status=404)
        try:
            page = await to_thread.run_sync(fit_page, store, name, table)
        except NotYetError:
            return _html_page(name, "<p>The law is still being fitted; load this page again in a moment.</p>", 503)
        return _html_page(name, _fit_body(name, page))

    async def picture(request: Request) -> Response:
        name, file = request.path_params["name"], request.path_params["picture"]
        table = (await to_thread.run_sync(find_sweeps, store)).get(name)
        try:
            page = None if table is None else await to_thread.run_sync(fit_page, store, name, table)
        except NotYetError:
            page = None
        if page is None or file not in page.pictures:
            return Response("", 404, media_type="text/plain")
        return Response(page.pictures[file], headers={"cache-control": "no-cache"}, media_type="image/svg+xml")

    return [
        Route("/scaling", listing, methods=["GET"]),
        Route("/scaling/{name}", one, methods=["GET"]),
        Route("/scaling/{name}/{picture}", picture, methods=["GET"]),
    ]


def find_sweeps(store: RunStore) -> dict[str, Path]:
    """Return the tables of sweeps in the folder, by folder name; empty if a single run is shown."""
    if store.is_one_run:
        return {}
    try:
        folders = sorted(folder for folder in store.root.iterdir() if folder.is_dir() and not folder.is_symlink())
    except OSError:
        return {}
    return {folder.name: folder / TABLE for folder in folders if (folder / TABLE).is_file()} if folders else {}


def fit_page(store: RunStore, name: str, table: Path) -> FitPage:
    """Return the fit of a table, cached until the table changes."""
    stamp = table.stat()
    page: FitPage = store.memo.get(
        ("scaling", name), (stamp.st_size, stamp.st_mtime_ns), lambda: _fit_table(table), wait_s=WAIT_S, now=True
    )
    return page


def _fit_table(table: Path) -> FitPage:
    from phalanx.scale.fit_points import fit_law
    from phalanx.scale.fit_text import fit_text
    from phalanx.scale.plots import fit_plots
    from phalanx.scale.points import TableOptions, read_points

    try:
        # The table of a sweep counts all parameters, and FLOPs as 6·N·D.
        points = read_points(table, TableOptions(params_counted="total", flops_counted="6nd"))
        fit = fit_law(points)
    except PhalanxError as error:
        return FitPage(
            pictures={}, problem="; ".join(f"{problem.what} {problem.why}".strip() for problem in error.problems[:3])
        )
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
    texts = "".join(f'<pre class="{_block_class(block)}">{escape(block)}</pre>' for block in blocks)
    return f"{pictures}{texts}"


def _block_class(block: str) -> str:
    """Return the CSS class of a block: a table keeps its lines and scrolls; sentences are wrapped."""
    is_table = sum(len(re.findall(r"\S {2,}(?=\S)", line)) >= 2 for line in block.splitlines()) >= 2
    return "table" if is_table else "sentences"


def _html_page(title: str, body: str, status: int = 200, *, up: str = "../") -> Response:
    """Return an HTML page; `up` is the relative path to the dashboard's root, which may differ from the server's."""
    styles = "".join(f'<link rel="stylesheet" href="{up}static/css/{name}.css">' for name in ("base", "parts", "pages"))
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
