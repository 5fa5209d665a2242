"""The endpoints of the API: parse the parameters, call a view in a thread, return JSON; errors as {"error": text}."""

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
from phalanx.web import check_views, detail_views, peer_views, run_views
from phalanx.web.answer import encode_answer
from phalanx.web.detail_views import NoRankError
from phalanx.web.event_stream import NewsHub
from phalanx.web.run_store import NotYetError, RunStore

MOST_POINTS = 4000
MOST_COLUMNS = 500
MOST_NAMES = 40  # series or runs per request
# The largest range of integers that JavaScript represents exactly.
MOST_STEP = 2**53

View = Callable[..., Any]


class BadRequestError(Exception):
    """The request is invalid; answered with status 400."""


class QueryParameters:
    """The query parameters of a request; each has bounds, and unknown parameters are an error."""

    def __init__(self, given: Mapping[str, str], *known: str) -> None:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise BadRequestError(f"there is no parameter {unknown[0][:40]!r}; there is {', '.join(known) or 'none'}")
        self._given = given

    def whole(self, name: str, default: int | None, *, least: int = 0, most: int = MOST_STEP) -> int | None:
        """Return an integer from `least` to `most`; the default if it is empty or absent."""
        text = self._given.get(name, "")
        if not text:
            return default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 18 and least <= int(text) <= most):
            raise BadRequestError(f"{name} = {text[:40]!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    def listed(self, name: str) -> list[str]:
        """Return a comma-separated list of distinct names, at least one."""
        names = list(dict.fromkeys(entry for entry in self._given.get(name, "").split(",") if entry))
        if not names or len(names) > MOST_NAMES:
            raise BadRequestError(f"{name} takes 1 to {MOST_NAMES} names between commas, not {len(names)}")
        return names

    def text(self, name: str, default: str) -> str:
        """Return a short text, cut to 100 characters; the default if it is empty or absent."""
        return self._given.get(name, "")[:100] or default


def api_routes(store: RunStore, hub: NewsHub, *, complain: Callable[[str], None]) -> list[Route]:
    """Return all routes below /api."""
    base = "/api/runs/{name}"
    context = ApiContext(store=store, complain=complain)
    tell = partial(_json_route, context)
    return [
        tell("/api/runs", _runs_answer),
        tell("/api/compare", _compare_answer),
        tell(base, _run_only_view(run_views.run_view)),
        tell(f"{base}/curves", _curves_answer),
        tell(f"{base}/marks", _run_only_view(run_views.marks_view)),
        tell(f"{base}/mesh", _mesh_answer),
        tell(f"{base}/ranks/{{rank}}", _rank_answer),
        tell(f"{base}/step", _step_answer),
        tell(f"{base}/ledger", _run_only_view(run_views.ledger_view)),
        tell(f"{base}/plan", _run_only_view(detail_views.plan_view)),
        tell(f"{base}/findings", _run_only_view(check_views.findings_view)),
        tell(f"{base}/verdicts", _run_only_view(check_views.counts_view)),
        tell("/api/rules/{rule}", _rule_answer),
        tell(f"{base}/cost", _run_only_view(run_views.cost_view)),
        tell(f"{base}/peers", _run_only_view(peer_views.peers_view)),
        _stream_route(context, hub, f"{base}/stream"),
    ]


# ---- requests --------------------------------------------------------------------------------------------------------


def _run_only_view(view: View) -> View:
    """Wrap a view whose only parameter is the run."""

    def ask(store: RunStore, request: Request) -> Any:
        QueryParameters(request.query_params)
        return view(store, request.path_params["name"])

    return ask


def _runs_answer(store: RunStore, request: Request) -> Any:
    QueryParameters(request.query_params)
    return run_views.runs_view(store)


def _curves_answer(store: RunStore, request: Request) -> Any:
    query = QueryParameters(request.query_params, "names", "rank", "first", "last", "points")
    return run_views.curves_view(
        store,
        request.path_params["name"],
        names=query.listed("names"),
        rank=query.whole("rank", 0) or 0,
        first=query.whole("first", None),
        last=query.whole("last", None),
        points=query.whole("points", 800, least=1, most=MOST_POINTS) or 1,
    )


def _mesh_answer(store: RunStore, request: Request) -> Any:
    query = QueryParameters(request.query_params, "name", "columns", "first", "last")
    return detail_views.mesh_view(
        store,
        request.path_params["name"],
        series=query.text("name", "compute_s"),
        columns=query.whole("columns", 120, least=1, most=MOST_COLUMNS) or 1,
        first=query.whole("first", None),
        last=query.whole("last", None),
    )


def _rank_answer(store: RunStore, request: Request) -> Any:
    QueryParameters(request.query_params)
    rank = QueryParameters({"rank": request.path_params["rank"]}, "rank").whole("rank", None)
    if rank is None:
        raise BadRequestError("which rank?")
    return detail_views.rank_view(store, request.path_params["name"], rank)


def _step_answer(store: RunStore, request: Request) -> Any:
    query = QueryParameters(request.query_params, "step", "rank")
    name, rank = request.path_params["name"], query.whole("rank", 0) or 0
    return detail_views.step_view(store, name, rank=rank, step=query.whole("step", None))


def _rule_answer(store: RunStore, request: Request) -> Any:
    QueryParameters(request.query_params)
    return check_views.rule_view(request.path_params["rule"])


def _compare_answer(store: RunStore, request: Request) -> Any:
    query = QueryParameters(request.query_params, "runs", "name", "points")
    points = query.whole("points", 800, least=1, most=MOST_POINTS) or 1
    return run_views.compare_view(store, query.listed("runs"), name=query.text("name", "loss"), points=points)


# ---- answers ---------------------------------------------------------------------------------------------------------


def _json_route(context: ApiContext, path: str, ask: View) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return _json_response(200, await to_thread.run_sync(lambda: context.encode(ask(context.store, request))))
        except Exception as error:
            return context.sorry(request, error)

    return Route(path, endpoint, methods=["GET"])


def _stream_route(context: ApiContext, hub: NewsHub, path: str) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            QueryParameters(request.query_params)
            await to_thread.run_sync(context.store.run, request.path_params["name"])
        except Exception as error:
            return context.sorry(request, error)
        if hub.is_full:
            return _json_response(503, context.encode({"error": "too many pages listen already; close some"}))
        # Proxies must not buffer the stream.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        news = hub.stream(request.path_params["name"], request.headers.get("last-event-id", ""))
        return StreamingResponse(news, headers=headers, media_type="text/event-stream")

    return Route(path, endpoint, methods=["GET"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    """The objects that endpoints need: the runs, and the function that reports internal errors."""

    store: RunStore
    complain: Callable[[str], None]

    def encode(self, value: Any) -> bytes:
        """Return a value as JSON bytes."""
        return encode_answer(value, root=self.store.root)

    def sorry(self, request: Request, error: Exception) -> Response:
        """Return the error answer; internal errors are also reported in the server's terminal."""
        status, text = _error_reason(error)
        if status == 500:
            self.complain(f"phalanx web: {request.url.path}: {type(error).__name__}: {error}")
        return _json_response(status, self.encode({"error": text}))


def _error_reason(error: Exception) -> tuple[int, str]:
    if isinstance(error, BadRequestError):
        return 400, str(error)
    if isinstance(error, NotYetError):
        return 503, "this run is large and still being read; ask again in a moment"
    if isinstance(error, FileNotFoundError):
        return 404, "the run is gone: its folder was deleted or moved"
    if isinstance(error, PhalanxError):
        return 404, error.problems[0].what
    if isinstance(error, NoRankError):
        return 404, str(error)
    # Only the type: the message may contain data that must not leave the machine.
    return 500, f"this could not be worked out ({type(error).__name__}); the server's terminal says more"


def _json_response(status: int, body: bytes) -> Response:
    return Response(body, status, headers={"cache-control": "no-store"}, media_type="application/json")
