"""Paths that no file can have are probed without an exception, and every module probes paths in this way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from phalanx.io import path_probes
from phalanx.io.path_probes import is_file, is_folder, path_exists, resolve_path, shown_path, unreachable

SOURCE = Path(__file__).parents[2] / "src" / "phalanx"
IMPOSSIBLE = ["9" * 400, "a\0b", "\ud800", "x/" * 3000, "circle", "circle/below"]
PLACES = ("cli", "api", "job", "rules", "plan", "scale", "validate")  # that receive paths from persons and their files


@pytest.mark.parametrize("name", IMPOSSIBLE, ids=lambda name: repr(name[:8]))
def test_nothing_is_found_at_an_impossible_path(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert not path_exists(name)
    assert not is_file(name)
    assert not is_folder(name)
    assert resolve_path(name).is_absolute()
    assert unreachable(name).startswith("is not a possible path: ")
    assert len(shown_path(name)) <= path_probes.MAX_SHOWN


def test_a_folder_without_rights_hides_what_it_holds(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "secret/a")

    monkeypatch.setattr(path_probes.os, "stat", refuse)  # root may enter every folder
    assert unreachable("secret/a") == "cannot be looked up: Permission denied"
    assert not path_exists("secret/a")


def test_what_is_there_is_found(tmp_path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")
    assert (is_file(tmp_path / "link"), is_folder(tmp_path), path_exists(tmp_path / "a")) == (True, True, True)
    assert resolve_path(tmp_path / "link") == (tmp_path / "a").resolve()
    assert unreachable(tmp_path / "a") == unreachable(tmp_path / "absent") == ""


def raising_probes(source: str) -> list[int]:
    """Lines with a probe of pathlib, which raises for some paths."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"exists", "is_file", "is_dir", "resolve"}
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in {"entry", "plugin"})
        and not (node.args or node.keywords)
    ]


def test_modules_that_receive_paths_probe_them_safely() -> None:
    assert raising_probes("path.is_file()\nentry.is_file()\nis_file(path)\n") == [1]
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for place in PLACES
        for path in sorted((SOURCE / place).rglob("*.py"))
        for line in raising_probes(path.read_text(encoding="utf-8"))
    }
    assert {name for name in found if not name.startswith("api/sweep_pool.py")} == set()
