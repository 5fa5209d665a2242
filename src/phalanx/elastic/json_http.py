"""JSON over HTTP with the standard library: one bounded request and its answer, for elections."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 1 << 20  # of an answer
TIMEOUT_S = 1.0  # a coordinator does nothing else meanwhile


class HttpProblem(Exception):
    """No answer, or one that is no JSON object."""


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
    """Status and JSON object of an answer; raises HttpProblem. `base` is http://HOST:PORT or https://HOST:PORT."""
    parts = urlsplit(base)
    where = f"{parts.scheme}://{parts.netloc}"
    try:
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpProblem(f"{base} is no http:// or https:// address")
        if parts.scheme == "https":
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=timeout_s, context=context or ssl.create_default_context()
            )
        else:
            made = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
        try:
            text = json.dumps(body).encode() if body is not None else None
            told = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
            made.request(method, parts.path.rstrip("/") + path, body=text, headers=told)
            answer = made.getresponse()
            read = answer.read(MOST_BYTES + 1)
        finally:
            made.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HttpProblem(f"{where}: {error or type(error).__name__}") from error
    if len(read) > MOST_BYTES:
        raise HttpProblem(f"{where} answered with more than {MOST_BYTES} bytes")
    try:
        found = json.loads(read) if read.strip() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HttpProblem(f"{where} answered status {answer.status} without a JSON object")
    return answer.status, found
