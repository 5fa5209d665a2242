"""The dashboard as an ASGI application: the page's files, the API, and the guard in front of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phalanx.web.endpoints import api_routes
from phalanx.web.event_stream import NewsHub
from phalanx.web.request_guard import AccessKey, RequestGuard
from phalanx.web.run_store import RunStore
from phalanx.web.scaling_views import scaling_routes

STATIC = Path(__file__).with_name("static")
# Not the system's MIME table, which may map JavaScript to plain text; with nosniff, browsers refuse to run that.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPolicy:
    """The conditions of access: the server's host names, and a key if there is one."""

    hosts: frozenset[str]
    literals: bool = False
    key: AccessKey | None = None


def create_app(store: RunStore, hub: NewsHub, *, door: AccessPolicy, complain: Callable[[str], None]) -> RequestGuard:
    """Return the application with page, API and scaling pages behind the request guard."""
    files = _static_files()

    async def page(request: Request) -> Response:
        name = request.path_params.get("path", "index.html")
        return await _serve_file(files.get(name), request) if name in files else _empty_response()

    routes = [
        Route("/", page),
        Route("/static/{path:path}", page),
        *api_routes(store, hub, complain=complain),
        *scaling_routes(store),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})
    inner.router.redirect_slashes = False  # an address has one spelling
    return RequestGuard(inner, hosts=door.hosts, literals=door.literals, key=door.key)


def _static_files() -> dict[str, Path]:
    """Return the page's files by name; only these are served, whatever path is requested."""
    if not STATIC.is_dir():
        return {}
    files = (path for path in STATIC.rglob("*") if path.suffix in TYPES and path.is_file() and not path.is_symlink())
    return {path.relative_to(STATIC).as_posix(): path for path in files}


async def _serve_file(path: Path | None, request: Request) -> Response:
    if path is None:
        return _empty_response()
    body = await to_thread.run_sync(path.read_bytes)
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    # Revalidated by the browser each time, so that an upgrade shows immediately.
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=TYPES[path.suffix])


async def _not_found(request: Request, error: Exception) -> Response:
    return _empty_response()


def _empty_response() -> Response:
    return JSONResponse({"error": "there is nothing at this address"}, 404)
