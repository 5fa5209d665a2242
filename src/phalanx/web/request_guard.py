"""The checks that every request must pass before it reaches the dashboard, and the headers of every answer.

A web page open in a user's browser can make it send requests to this server. Four things prevent such a page from
reading anything: the host name of the request (Host), its declared origin (Origin, Sec-Fetch-Site), a token if one is
set, and headers that forbid other sites to embed an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote_from_bytes, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_TARGET_BYTES = 4096  # of a path with its query
MOST_HEADER_BYTES = 16 * 2**10
METHODS = ("GET", "HEAD")
COOKIE_AGE_S = 30 * 86400
PATH_CHARACTERS = "/%:@!$&'()*+,;=~"  # left unquoted, with letters, digits and -._

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refused request: status, text and headers of the answer."""

    status: int
    text: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class AccessKey:
    """A token that grants access. A browser stores a digest of it as a cookie, never the token."""

    def __init__(self, token: str, *, port: int) -> None:
        self._token = token.encode()
        self._digest = hmac.new(self._token, b"phalanx dashboard cookie", hashlib.sha256).hexdigest().encode()
        # Cookies ignore ports: two dashboards on one machine need two names.
        self._name = f"phalanx-{port}".encode()

    def is_token(self, shown: bytes) -> bool:
        """Compare with the token in constant time."""
        return hmac.compare_digest(shown, self._token)

    def is_held(self, headers: MutableMapping[bytes, bytes]) -> bool:
        """Return True if a request carries the token or the cookie."""
        kind, _, credential = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and self.is_token(credential.strip()):
            return True
        pairs = (pair.strip().partition(b"=") for pair in headers.get(b"cookie", b"").split(b";"))
        return any(name == self._name and hmac.compare_digest(value, self._digest) for name, _, value in pairs)

    def cookie(self) -> bytes:
        """Return the cookie header with which a browser regains access."""
        return b"%s=%s; Path=/; Max-Age=%d; HttpOnly; SameSite=Strict" % (self._name, self._digest, COOKIE_AGE_S)


class RequestGuard:
    """Wraps the application. `hosts` are the server's names; with `literals`, any numeric address is accepted too."""

    def __init__(self, app: App, *, hosts: frozenset[str], literals: bool, key: AccessKey | None) -> None:
        self._app = app
        self._hosts = hosts
        self._literals = literals
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # WebSocket is not supported
        headers = dict(reversed(scope["headers"]))
        refusal = self._refusal_of(scope, headers) or self._lock_refusal(scope, headers)
        if refusal is not None:
            return await _send_refusal(scope, seal_answer(send), refusal)
        return await self._app(scope, receive, seal_answer(send))

    def _refusal_of(self, scope: Scope, headers: MutableMapping[bytes, bytes]) -> Refusal | None:
        if scope["method"] not in METHODS:
            return Refusal(
                status=405, text="the dashboard only reads: GET and HEAD", headers=((b"allow", b"GET, HEAD"),)
            )
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_TARGET_BYTES:
            return Refusal(status=414, text=f"the address is longer than {MOST_TARGET_BYTES:,} bytes")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            return Refusal(status=431, text=f"the headers are longer than {MOST_HEADER_BYTES:,} bytes")
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            return Refusal(status=421, text="this server does not go by that name; use the address it printed")
        if not _same_origin(headers, host):
            return Refusal(status=403, text="another site asked; the dashboard answers its own pages only")
        return None

    def _is_ours(self, host: str) -> bool:
        # On any port: an ssh tunnel may end on another one, and a rebound name is wrong on every port.
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or (self._literals and _is_literal(name))

    def _lock_refusal(self, scope: Scope, headers: MutableMapping[bytes, bytes]) -> Refusal | None:
        if self._key is None:
            return None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in pairs if name == "token"]
        if tokens and self._key.is_token(tokens[0].encode()):
            # Redirect to remove the token from the address bar: addresses end up in histories and screenshots.
            rest = urlencode([pair for pair in pairs if pair[0] != "token"])
            where = (_local_path(scope.get("raw_path") or b"/") + (f"?{rest}" if rest else "")).encode("ascii")
            cookie = (b"set-cookie", self._key.cookie())
            if headers.get(b"sec-fetch-site") == b"cross-site":
                # A link in a chat: browsers do not send a strict cookie on a redirect that another site began.
                return Refusal(status=200, text="one moment", headers=((b"refresh", b"0; url=" + where), cookie))
            return Refusal(status=303, text="", headers=((b"location", where), cookie))
        if self._key.is_held(headers):
            return None
        text = "this dashboard asks for its token: open the address that phalanx web printed"
        return Refusal(status=401, text=text, headers=((b"www-authenticate", b"Bearer"),))


def seal_answer(send: Send) -> Send:
    """Wrap `send` so that every answer has the security headers."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return with_headers


def _local_path(raw: bytes) -> str:
    r"""Return a path on this server for any requested path: browsers read

    x, /\x and a tab in between as a host.

    >>> _local_path(rb"/\evil.example/a"), _local_path(b"/a%20b")
    ('/evil.example/a', '/a%20b')
    """
    return "/" + quote_from_bytes(raw.lstrip(bytes(range(33)) + b"/\\"), safe=PATH_CHARACTERS)


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same_origin(headers: MutableMapping[bytes, bytes], host: str) -> bool:
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (
        f"http://{host.lower()}",
        f"https://{host.lower()}",
    ):
        return False
    # A link on another page may lead here (navigate); its scripts, images and frames may not send requests.
    site, mode = headers.get(b"sec-fetch-site", b"none"), headers.get(b"sec-fetch-mode", b"")
    is_visit = mode == b"navigate" and headers.get(b"sec-fetch-dest", b"document") == b"document"
    return site in (b"none", b"same-origin") or is_visit


async def _send_refusal(scope: Scope, send: Send, refusal: Refusal) -> None:
    key = "error" if refusal.status >= 400 else "text"
    body = json.dumps({key: refusal.text}).encode() + b"\n" if refusal.text else b""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *refusal.headers]
    headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
