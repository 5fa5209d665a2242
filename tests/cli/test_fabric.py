import json
from pathlib import Path

import pytest

from phalanx.cli.main import main


def test_decisions_write_a_picture_and_say_so_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "three.svg"
    assert main(["fabric", "decisions", "--gpus", "4096", "--picture", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert path.read_text().startswith("<svg")
    assert f"wrote {path}" in err
    found = json.loads(out)
    assert found["fabric"]["hosts"] == 4096
    assert {"planes", "loads", "late", "recoveries", "budget"} <= set(found)


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "decisions", "--gpus", "4096", "--picture", str(tmp_path / "no" / "x.svg")]) == 3
    assert "name another --picture" in capsys.readouterr().err


def test_decisions_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "decisions", "--gpus", "131072", "--recovery-s", "1"]) == 0
    assert "1. Planes and radix" in capsys.readouterr().out


def test_show_one_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", "mrc-131k"]) == 0
    assert "6,144: 4,096 T0 + 2,048 T1" in capsys.readouterr().out
    assert main(["fabric", "show", "clos2:64x400G/1p/32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fabric"]["t0"] == 4
    assert main(["fabric", "show"]) == 0
    assert "Spectrum-5 512x100G" in capsys.readouterr().out
    assert main(["fabric", "show", "--json"]) == 0
    assert all(one["source"] for one in json.loads(capsys.readouterr().out)["switches"])


def test_an_unknown_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", "mrc-131"]) == 2
    assert "did you mean mrc-131k?" in capsys.readouterr().err


def test_decisions_of_a_fabric_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "decisions", "--fabric", "mrc-131k", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["planes"], row["radix"]) for row in found["planes"]] == [(1, 64), (2, 128), (4, 256), (8, 512)]
    assert (found["switch_ratio"], found["optics_ratio"]) == ("3/5", "2/3")
    assert main(["fabric", "decisions", "--fabric", "mrc-131k", "--gpus", "64"]) == 2
    assert "--fabric already says --gpus" in capsys.readouterr().err
    assert main(["fabric", "decisions", "--fabric", "clos1:64x400G/1p/64"]) == 2
    assert "has one tier" in capsys.readouterr().err
    assert main(["fabric", "decisions"]) == 2
    assert "--gpus is missing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.png", "x.txt", "x", ""])
def test_a_picture_is_an_svg(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name if name else ""
    assert main(["fabric", "decisions", "--gpus", "4096", "--picture", str(path)]) == 2
    assert "does not end in .svg" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_pages_keep_to_the_columns_they_are_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = (["decisions", "--gpus", "4096"], ["show", "mrc-131k"], ["design", "--gpus", "4096", "--nic-gbps", "800"])
    for call in calls:
        monkeypatch.delenv("COLUMNS", raising=False)
        assert main(["fabric", *call]) == 0
        wide = capsys.readouterr().out
        monkeypatch.setenv("COLUMNS", "60")
        assert main(["fabric", *call]) == 0
        narrow = capsys.readouterr().out
        assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
        assert set(wide.split()) <= set(narrow.split())  # nothing is dropped


def test_one_tier_has_no_uplinks_to_tell_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", "clos1:64x400G/2p/64"]) == 0
    out = capsys.readouterr().out
    assert "2 of 200 Gb/s, each one tier of 64x200G" in out
    assert "one switch between any two hosts, in each plane" in out
    for words in ("1 tiers", "T0-T1", "different T0s", " T1 "):
        assert words not in out
