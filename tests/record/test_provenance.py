"""What a run was made of, read without running git."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.record import provenance as module
from phalanx.record.provenance import code_digest, commit_of, job_provenance

ONE, OTHER = "a" * 40, "b" * 40
PACKED = f"# pack\n{OTHER} refs/heads/mainly\n{ONE} refs/heads/main\n"


def checkout(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / ".git" / name.replace("__", "/").replace("packed_refs", "packed-refs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": f"{ONE}\n"}, ONE),
        ({"HEAD": "ref: refs/heads/main\n", "refs__heads__main": f"{ONE}\n"}, ONE),
        ({"HEAD": "ref: refs/heads/main", "packed_refs": PACKED}, ONE),
        ({"HEAD": "ref: refs/heads/gone\n"}, ""),
        ({"HEAD": "what\n"}, ""),
        ({"HEAD": "\x00\x00"}, ""),
        ({"HEAD": "ref: /etc/hostname"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_commit_of_a_checkout(tmp_path: Path, files: dict[str, str], commit: str) -> None:
    assert commit_of(checkout(tmp_path, **files)) == commit


def test_of_a_worktree(tmp_path: Path) -> None:
    checkout(
        tmp_path, refs__heads__side=ONE, worktrees__w__HEAD="ref: refs/heads/side", worktrees__w__commondir="../.."
    )
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {tmp_path / '.git' / 'worktrees' / 'w'}\n")
    assert commit_of(tmp_path / "w") == ONE


def test_a_run_says_what_it_was_made_of() -> None:
    found = job_provenance({"name": "a"})
    assert found["versions"]["phalanx"]
    assert found["versions"]["python"].startswith("3.")
    assert found["job_digest"] != job_provenance({"name": "b"})["job_digest"]


def test_a_source_tree_that_was_never_installed_is_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "installed_version", lambda name: "")
    assert job_provenance({})["versions"]["phalanx"].startswith("source sha256:")
    (tmp_path / "a.py").write_text("1")
    before = code_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert code_digest(tmp_path) != before
