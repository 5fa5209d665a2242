"""`phalanx rules`: the list, the JSON, and the pages it writes."""

from __future__ import annotations

import json

from phalanx.cli.main import main
from phalanx.rules.rule_page import WROTE


def test_the_list_is_by_group(capsys) -> None:
    assert main(["rules", "--select", "CKP"]) == 0
    out = capsys.readouterr().out
    assert "edition 2026.1" in out.splitlines()[0]
    assert "CKP  checkpoints" in out
    assert "  CKP001 E JP  interval-daly" in out
    assert "TOP001" not in out


def test_at_least_forty_rules(capsys) -> None:
    assert main(["rules", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rules"]) >= 40
    assert {one["group"] for one in found["rules"]} >= {
        "TOP", "COM", "PRC", "BAT", "MEM", "CKP", "FLT", "TEL", "EFF", "SEC"
    }  # fmt: skip
    first = next(one for one in found["rules"] if one["id"] == "CKP001")
    assert first["limits"]["warn_ratio"]["value"] == 2.0
    assert first["sections"]["When to waive"]


def test_limits_of_a_profile(capsys) -> None:
    assert main(["rules", "--profile", "cpu-gloo", "--select", "CKP001"]) == 0
    assert "warn_ratio 2 x; error_ratio 4 x" in capsys.readouterr().out


def test_pages_are_written_and_old_ones_go(tmp_path, capsys) -> None:
    (tmp_path / "gon001-gone.md").write_text(f"# GON001\n\n{WROTE}\n")
    (tmp_path / "own.md").write_text("# my notes\n")
    assert main(["rules", "--write", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"README.md", "ckp001-interval-daly.md", "own.md"} <= names
    assert "gon001-gone.md" not in names
    assert main(["rules", "--format", "md"]) == 0
    assert capsys.readouterr().out == (tmp_path / "README.md").read_text()


def test_wrong_calls(tmp_path, capsys) -> None:
    assert main(["rules", "--select", "ZZZ"]) == 2
    assert main(["rules", "--write", str(tmp_path), "--select", "CKP"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["rules", "--write", str(tmp_path / "file")]) == 3
    assert "cannot be written" in capsys.readouterr().err
