"""Addresses and tokens of our servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import SystemFailure, UserError
from phalanx.io.listen import (
    Address,
    bound_address,
    is_loopback,
    is_own_name,
    kept_token,
    open_socket,
    parse_address,
    read_token,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:65535", "::1", 65535),
        ("8337", "127.0.0.1", 8337),
        (":1", "127.0.0.1", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host=host, port=port)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:65536", "host:-1", "::1:80", "[host]:80", "host:٣"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_address(text)
    assert str(caught.value).startswith(f"--listen: {text!r} is not an address")


def test_loopback() -> None:
    assert is_loopback(Address(host="127.8.8.8", port=0))
    assert is_loopback(Address(host="localhost", port=0))
    assert not is_loopback(Address(host="0.0.0.0", port=0))


def test_a_port_is_taken_once() -> None:
    with open_socket(Address(host="127.0.0.1", port=0), guarded=False) as first:
        with pytest.raises(SystemFailure) as caught:
            open_socket(bound_address(first), guarded=False, where="telemetry.listen")
        assert str(caught.value).startswith(f"telemetry.listen {bound_address(first)}: cannot listen there")


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(SystemFailure) as caught:
        open_socket(Address(host="203.0.113.9", port=29400), guarded=True, where="peers listen")
    assert "no network interface of this machine has this address\n  listen on 0.0.0.0:29400" in str(caught.value)


@pytest.mark.parametrize("header", ["localhost", "127.0.0.1:9400", "[::1]:9400", "LOCALHOST:1", "127.1.2.3"])
def test_our_names(header: str) -> None:
    assert is_own_name(header)


@pytest.mark.parametrize("header", ["", "evil.example", "localhost.evil.example", "[::1", "10.0.0.1:9400", "0.0.0.0"])
def test_foreign_names(header: str) -> None:
    assert not is_own_name(header)


def test_tokens(tmp_path: Path) -> None:
    assert len(read_token("auto")) >= 32
    assert read_token("auto") != read_token("auto")
    good = tmp_path / "good"
    good.write_text("  a-token-of-some-length \nsecond line\n")
    assert read_token(str(good)) == "a-token-of-some-length"
    for name, data in (
        ("short", b"abc\n"),
        ("long", b"x" * 2000),
        ("binary", b"\xff" * 40),
        ("umlaut", "ä".encode() * 20),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError):
            read_token(str(tmp_path / name))


def test_a_kept_token_is_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        token = kept_token(tmp_path / "token")
    finally:
        os.umask(before)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert kept_token(tmp_path / "token") == token
    with pytest.raises(SystemFailure):
        kept_token(tmp_path / "none" / "token")


def test_a_launch_that_was_killed_leaves_no_half_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("fdopen", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, killed)
            with pytest.raises(KeyboardInterrupt):
                kept_token(path)
        assert not path.exists()
    assert kept_token(path) == kept_token(path)
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_a_token_is_kept_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert kept_token(tmp_path / "token") == (tmp_path / "token").read_text().strip()
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_of_two_launches_at_once_the_first_token_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        (tmp_path / "token").write_text("the-token-of-the-other\n")
        raise FileExistsError

    monkeypatch.setattr(os, "link", late)
    assert kept_token(tmp_path / "token") == "the-token-of-the-other"
