"""The addresses of the API: parameters in, a view called in a thread, JSON out; errors as {"error": text}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from phalanx.errors import PhalanxError
from phalanx.web import views_check, views_mesh, views_plan, views_run, views_runs, views_spent, views_step
from phalanx.web.answer import encode
from phalanx.web.memo import NotYetError
from phalanx.web.shelf import Shelf
from phalanx.web.stream import Hub
from phalanx.web.views_mesh import NoRankError

MOST_POINTS = 4000
MOST_COLUMNS = 500
MOST_NAMES = 40  # series or runs in one question
MOST_STEP = 2**53  # whole numbers that JavaScript can count to

View = Callable[..., Any]


class WrongError(Exception):
    """The question is wrong; answered with 400."""


class Query:
    """The parameters of a question; every one is bounded, and an unknown one is a mistake."""

    def __init__(self, given: Mapping[str, str], *known: str) -> None:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise WrongError(f"there is no parameter {unknown[0][:40]!r}; there is {', '.join(known) or 'none'}")
        self._given = given

    def whole(self, name: str, default: int | None, *, least: int = 0, most: int = MOST_STEP) -> int | None:
        """A whole number from `least` to `most`; empty and absent are the default."""
        text = self._given.get(name, "")
        if not text:
            return default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 18 and least <= int(text) <= most):
            raise WrongError(f"{name} = {text[:40]!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    def listed(self, name: str) -> list[str]:
        """Names between commas, each once; at least one."""
        found = list(dict.fromkeys(part for part in self._given.get(name, "").split(",") if part))
        if not found or len(found) > MOST_NAMES:
            raise WrongError(f"{name} takes 1 to {MOST_NAMES} names between commas, not {len(found)}")
        return found

    def text(self, name: str, default: str) -> str:
        """A short text."""
        return self._given.get(name, "")[:100] or default


def routes(shelf: Shelf, hub: Hub, *, complain: Callable[[str], None]) -> list[Route]:
    """All addresses below /api."""
    base = "/api/runs/{name}"
    desk = Desk(shelf=shelf, complain=complain)
    tell = partial(_route, desk)
    return [
        tell("/api/runs", _runs),
        tell("/api/compare", _compare),
        tell(base, _plainly(views_run.run)),
        tell(f"{base}/curves", _curves),
        tell(f"{base}/marks", _plainly(views_run.marks)),
        tell(f"{base}/mesh", _mesh),
        tell(f"{base}/ranks/{{rank}}", _rank),
        tell(f"{base}/step", _step),
        tell(f"{base}/ledger", _plainly(views_spent.ledger)),
        tell(f"{base}/plan", _plainly(views_plan.plan)),
        tell(f"{base}/findings", _plainly(views_check.findings)),
        tell(f"{base}/verdicts", _plainly(views_check.counts)),
        tell("/api/rules/{rule}", _rule),
        tell(f"{base}/cost", _plainly(views_spent.cost)),
        _live(desk, hub, f"{base}/stream"),
    ]


# ---- questions -------------------------------------------------------------------------------------------------------


def _plainly(view: View) -> View:
    """A view that takes nothing but the run."""

    def ask(shelf: Shelf, request: Request) -> Any:
        Query(request.query_params)
        return view(shelf, request.path_params["name"])

    return ask


def _runs(shelf: Shelf, request: Request) -> Any:
    Query(request.query_params)
    return views_runs.runs(shelf)


def _curves(shelf: Shelf, request: Request) -> Any:
    query = Query(request.query_params, "names", "rank", "first", "last", "points")
    return views_run.curves(
        shelf,
        request.path_params["name"],
        names=query.listed("names"),
        rank=query.whole("rank", 0) or 0,
        first=query.whole("first", None),
        last=query.whole("last", None),
        points=query.whole("points", 800, least=1, most=MOST_POINTS) or 1,
    )


def _mesh(shelf: Shelf, request: Request) -> Any:
    query = Query(request.query_params, "name", "columns", "first", "last")
    return views_mesh.mesh(
        shelf,
        request.path_params["name"],
        series=query.text("name", "compute_s"),
        columns=query.whole("columns", 120, least=1, most=MOST_COLUMNS) or 1,
        first=query.whole("first", None),
        last=query.whole("last", None),
    )


def _rank(shelf: Shelf, request: Request) -> Any:
    Query(request.query_params)
    rank = Query({"rank": request.path_params["rank"]}, "rank").whole("rank", None)
    if rank is None:
        raise WrongError("which rank?")
    return views_mesh.rank(shelf, request.path_params["name"], rank)


def _step(shelf: Shelf, request: Request) -> Any:
    query = Query(request.query_params, "step", "rank")
    name, rank = request.path_params["name"], query.whole("rank", 0) or 0
    return views_step.step(shelf, name, rank=rank, step=query.whole("step", None))


def _rule(shelf: Shelf, request: Request) -> Any:
    Query(request.query_params)
    return views_check.rule(request.path_params["rule"])


def _compare(shelf: Shelf, request: Request) -> Any:
    query = Query(request.query_params, "runs", "name", "points")
    points = query.whole("points", 800, least=1, most=MOST_POINTS) or 1
    return views_run.compare(shelf, query.listed("runs"), name=query.text("name", "loss"), points=points)


# ---- answers ---------------------------------------------------------------------------------------------------------


def _route(desk: Desk, path: str, ask: View) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return _json(200, await to_thread.run_sync(lambda: desk.encode(ask(desk.shelf, request))))
        except Exception as error:
            return desk.sorry(request, error)

    return Route(path, endpoint, methods=["GET"])


def _live(desk: Desk, hub: Hub, path: str) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            Query(request.query_params)
            await to_thread.run_sync(desk.shelf.run, request.path_params["name"])
        except Exception as error:
            return desk.sorry(request, error)
        if hub.is_full:
            return _json(503, desk.encode({"error": "too many pages listen already; close some"}))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies must not hold news back
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        news = hub.stream(request.path_params["name"], request.headers.get("last-event-id", ""))
        return StreamingResponse(news, headers=headers, media_type="text/event-stream")

    return Route(path, endpoint, methods=["GET"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Where answers are made: the runs, and whom to tell of a fault of our own."""

    shelf: Shelf
    complain: Callable[[str], None]

    def encode(self, value: Any) -> bytes:
        """As JSON."""
        return encode(value, root=self.shelf.root)

    def sorry(self, request: Request, error: Exception) -> Response:
        """Why there is no answer."""
        status, text = _reason(error)
        if status == 500:
            self.complain(f"phalanx web: {request.url.path}: {type(error).__name__}: {error}")
        return _json(status, self.encode({"error": text}))


def _reason(error: Exception) -> tuple[int, str]:
    if isinstance(error, WrongError):
        return 400, str(error)
    if isinstance(error, NotYetError):
        return 503, "this run is large and still being read; ask again in a moment"
    if isinstance(error, FileNotFoundError):
        return 404, "the run is gone: its folder was deleted or moved"
    if isinstance(error, PhalanxError):
        return 404, error.problems[0].what
    if isinstance(error, NoRankError):
        return 404, str(error)
    # By its kind alone: its text may hold what should not leave the machine.
    return 500, f"this could not be worked out ({type(error).__name__}); the server's terminal says more"


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, headers={"cache-control": "no-store"}, media_type="application/json")
