"""Send one bounded JSON request over HTTP with the standard library, for elections."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 1 << 20  # of an answer
# A coordinator does nothing else meanwhile.
TIMEOUT_S = 1.0


class HttpProblem(Exception):
    """Raised when no answer came, or one that is not a JSON object."""


def ask_json(
    base: str,
    path: str,
    *,
    method: str = "POST",
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON object of an answer; raises HttpProblem.

    `base` is http://HOST:PORT or https://HOST:PORT.
    """
    parts = urlsplit(base)
    where = f"{parts.scheme}://{parts.netloc}"
    try:
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpProblem(f"{base} is no http:// or https:// address")
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=timeout_s, context=context or ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
        try:
            text = json.dumps(body).encode() if body is not None else None
            all_headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
            connection.request(method, parts.path.rstrip("/") + path, body=text, headers=all_headers)
            answer = connection.getresponse()
            data = answer.read(MOST_BYTES + 1)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HttpProblem(f"{where}: {error or type(error).__name__}") from error
    if len(data) > MOST_BYTES:
        raise HttpProblem(f"{where} answered with more than {MOST_BYTES} bytes")
    try:
        body_json = json.loads(data) if data.strip() else {}
    except ValueError:
        body_json = None
    if not isinstance(body_json, dict):
        raise HttpProblem(f"{where} answered status {answer.status} without a JSON object")
    return answer.status, body_json
