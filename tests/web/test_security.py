"""Strangers at the door: other sites, other names, no token, paths that lead out, slow and greedy clients."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dashboard import Dashboard, dashboard
from synthetic import write_run

from phalanx.errors import PhalanxError
from phalanx.web.request_guard import _local_path

pytest.importorskip("uvicorn")

TOKEN = "a-token-of-32-letters-and-figures"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outer = tmp_path_factory.mktemp("outer")
    write_run(outer, name="outside", ranks=1, steps=5, incidents=0, hosts=1)
    write_run(outer / "runs", name="inside", ranks=1, steps=5, incidents=0, hosts=1)
    (outer / "runs" / "link").symlink_to(outer / "outside")
    (outer / "secret.txt").write_text("do not read me")
    return outer / "runs"


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Dashboard]:
    with dashboard(runs) as found:
        yield found
        assert found.complaints == []


@pytest.fixture(scope="module")
def locked(runs: Path) -> Iterator[Dashboard]:
    with dashboard(runs, token=TOKEN) as found:
        yield found


def test_every_answer_carries_the_headers(page: Dashboard) -> None:
    for path, status in (("/", 200), ("/api/runs", 200), ("/nothing", 404), ("/api/runs/x", 404)):
        found = page.get(path)
        assert found.status == status
        assert found.headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["referrer-policy"] == "no-referrer"
        assert found.headers["cross-origin-opener-policy"] == "same-origin"
        assert found.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in found.headers
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_server_only_reads(page: Dashboard, method: str) -> None:
    found = page.get("/api/runs", method=method)
    assert found.status == 405
    assert found.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000", "[::1]:80", "LOCALHOST:1"])
def test_its_own_names_are_fine(page: Dashboard, host: str) -> None:
    assert page.get("/api/runs", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8337", "127.0.0.1.evil.example", "10.0.0.1", "", "[::1", "a@localhost@x"]
)
def test_a_rebound_name_is_refused(page: Dashboard, host: str) -> None:
    assert page.get("/api/runs", Host=host).status in (400, 421)


def test_no_host_at_all_is_refused(page: Dashboard) -> None:
    assert b" 421 " in page.raw(b"GET /api/runs HTTP/1.0\r\n\r\n")
    assert b" 400 " in page.raw(b"GET /api/runs HTTP/1.1\r\n\r\n")
    assert b" 400 " in page.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost.evil.example", "http://127.0.0.1:1"]
)
def test_another_site_may_not_ask(page: Dashboard, origin: str) -> None:
    assert page.get("/api/runs", Origin=origin).status == 403


def test_its_own_page_may_ask(page: Dashboard) -> None:
    host = f"127.0.0.1:{page.port}"
    assert page.get("/api/runs", Host=host, Origin=f"http://{host}").status == 200
    assert page.get("/api/runs", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors").status == 200


def test_a_link_from_elsewhere_may_lead_here_but_nothing_may_embed_us(page: Dashboard) -> None:
    visit = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert page.get("/", **visit, Sec_Fetch_Dest="document").status == 200
    assert page.get("/", **visit, Sec_Fetch_Dest="iframe").status == 403
    assert page.get("/api/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    assert page.get("/api/runs", Sec_Fetch_Site="same-site", Sec_Fetch_Mode="cors").status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..",
        "/api/runs/../outside",
        "/api/runs/..%2foutside",
        "/api/runs/%2e%2e%2foutside",
        "/api/runs/link",
        "/api/runs/link/curves?names=loss",
        "/api/runs/inside%00",
        "/api/runs/inside%2f..%2finside",
        "/api/runs/" + "a" * 3000,
        "/api/runs/%ff%fe",
        "/static/../endpoints.py",
        "/static/..%2fapi.py",
        "/static/%2e%2e/endpoints.py",
        "/static//etc/passwd",
        "/static/js/../../../../../secret.txt",
        "//etc/passwd",
    ],
)
def test_no_path_leads_out(page: Dashboard, path: str) -> None:
    found = page.get(path)
    assert found.status == 404
    assert b"do not read" not in found.body
    assert b"outside" not in found.body.replace(b"../outside", b"").replace(b"no run called", b"")


def test_a_link_out_of_the_root_is_not_in_the_list(page: Dashboard) -> None:
    assert [row["name"] for row in page.json("/api/runs")["runs"]] == ["inside"]


def test_long_addresses_and_headers_are_refused(page: Dashboard) -> None:
    assert page.get("/api/runs?" + "x" * 5000).status == 414
    assert page.get("/api/runs", X="y" * 20_000).status == 431


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_junk_is_no_trouble(page: Dashboard, junk: bytes) -> None:
    page.raw(junk + b"\r\n\r\n")
    assert page.get("/api/runs").status == 200


def test_an_upgrade_is_not_followed(page: Dashboard) -> None:
    answer = page.raw(
        b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b" 101 " not in answer


# ---- the token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/static/js/api.js", "/api/runs/inside/stream", "/?token=wrong", "/?token="]
)
def test_without_the_token_nothing_is_told(locked: Dashboard, path: str) -> None:
    found = locked.get(path)
    assert found.status == 401
    assert found.headers["www-authenticate"] == "Bearer"
    assert set(found.json()) == {"error"}


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe4"])
def test_a_wrong_bearer_stays_out(locked: Dashboard, header: str) -> None:
    assert locked.get("/api/runs", Authorization=header).status == 401


def test_a_bearer_comes_in(locked: Dashboard) -> None:
    assert locked.get("/api/runs", Authorization=f"Bearer {TOKEN}").status == 200
    assert locked.get("/api/runs", Authorization=f"bearer {TOKEN}").status == 200


def test_a_token_in_the_address_becomes_a_cookie(locked: Dashboard) -> None:
    first = locked.get(f"/api/runs/inside/curves?names=loss&token={TOKEN}")
    assert first.status == 303
    assert first.headers["location"] == "/api/runs/inside/curves?names=loss"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert locked.get(first.headers["location"], Cookie=f"other=1; {cookie.partition(';')[0]}").status == 200
    assert locked.get("/api/runs", Cookie=f"phalanx-{locked.port}=0").status == 401


def test_a_link_with_the_token_from_another_site_comes_in_too(locked: Dashboard) -> None:
    visit = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    found = locked.get(f"/?token={TOKEN}", **visit)
    assert found.status == 200
    assert found.headers["refresh"] == "0; url=/"
    assert "SameSite=Strict" in found.headers["set-cookie"]
    assert found.json() == {"text": "one moment"}


@pytest.mark.parametrize("begin", [b"//", b"/\\", b"/\\/", b"\\\\", b"/%5C", b"/\t/", b"/\x01\\", b"/ /"])
@pytest.mark.parametrize("site", [b"none", b"cross-site"])
def test_the_redirect_leads_nowhere_else(locked: Dashboard, begin: bytes, site: bytes) -> None:
    """Browsers read a backslash as a slash, and drop tabs."""
    visit = b"Sec-Fetch-Mode: navigate\r\nSec-Fetch-Site: " + site
    line = b"GET " + begin + b"evil.example/a?token=" + TOKEN.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
    told = locked.raw(line + visit + b"\r\nConnection: close\r\n\r\n", least=15).lower()
    led = re.findall(rb"(?:location: |refresh: 0; url=)(.*)\r\n", told)
    if led:
        assert re.fullmatch(rb"/(%5c)?evil\.example/a", led[0])
    else:  # no address at all: the server refuses it before we see it
        assert told.startswith(b"http/1.1 400")


def test_a_path_is_one_on_this_server() -> None:
    for raw in (b"/\t\\evil/\x00\xe4", b"//\r\n evil/\x00\xe4", b"evil/\x00\xe4"):
        assert _local_path(raw) == "/evil/%00%E4"
    assert _local_path(b"") == _local_path(b"/") == _local_path(b"//") == "/"


def test_the_token_does_not_excuse_a_wrong_name_or_site(locked: Dashboard) -> None:
    bearer = f"Bearer {TOKEN}"
    assert locked.get("/api/runs", Authorization=bearer, Host="evil.example").status == 421
    assert locked.get("/api/runs", Authorization=bearer, Origin="http://evil.example").status == 403


# ---- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7"])
def test_an_open_address_needs_a_token(host: str) -> None:
    from phalanx.io.listen import Address, open_socket

    with pytest.raises(PhalanxError) as caught:
        open_socket(Address(host=host, port=0), guarded=False)
    assert caught.value.exit_code == 2
    assert "there is no token" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "localhost", "1.2.3.4", "host:port", "host:70000", "::1:80", "[::1]", "[x]:1", "a:-1", "a:1²"]
)
def test_what_is_no_address(text: str) -> None:
    from phalanx.io.listen import parse_address

    with pytest.raises(PhalanxError, match="is not an address"):
        parse_address(text)


def test_a_name_counts_by_where_it_leads() -> None:
    from phalanx.io.listen import Address, bound_address, open_socket
    from phalanx.web.serve import allowed_hosts

    with open_socket(Address(host="localhost", port=0), guarded=False) as listener:
        assert "localhost" in allowed_hosts(bound_address(listener))


# ---- slow and greedy -------------------------------------------------------------------------------------------------


def test_slow_clients_are_dropped_and_block_nobody(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.web.serve.LOOK_S", 0.3)
    with dashboard(runs) as page:
        idlers = [socket.create_connection(("127.0.0.1", page.port), timeout=120) for _ in range(30)]
        for idler in idlers[:15]:
            idler.sendall(b"GET / HTTP/1.1\r\nHost: loc")  # and never the rest
        assert page.get("/api/runs").status == 200
        for idler in idlers:
            with suppress(ConnectionResetError):
                assert idler.recv(1) == b""
            idler.close()


def test_a_client_that_takes_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.web.serve.LOOK_S", 0.3)
    write_run(tmp_path, name="wide", ranks=2, steps=400, incidents=0)
    ask = b"GET /api/runs/wide/curves?names=loss,compute_s,wait_s,lr,grad_norm&points=4000"
    with dashboard(tmp_path) as page, socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect(("127.0.0.1", page.port))
        greedy.settimeout(20)
        greedy.sendall((ask + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") * 200)  # and reads no answer
        assert _is_dropped(greedy)
        assert page.get("/api/runs/wide/findings").status == 200


def _is_dropped(caller: socket.socket) -> bool:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            caller.send(b"\r\n", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            return True
        time.sleep(0.05)
    return False
