"""Names of files, keys and options that carry escape sequences: no verb lets them act on the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.api.progress_line import terminal_text
from phalanx.cli.main import main
from phalanx.hardware.cluster import render_cluster, resolve_cluster

ODD = "x\x1b[2J\x9b1m\u202ey"
FABRIC = "hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 32\n"
TOPO = "Nodes 4\nTiers 2\nPodsize 4\nTier 0\nDownlink_speed_Gbps 100\nRadix_Down 2\nRadix_Up 2\n"
TOPO += "Tier 1\nDownlink_speed_Gbps 100\nRadix_Down 2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CACHE", "DATA", "CONFIG"):  # neither plans nor drills of whoever runs the test
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    assert main(["init", f"{ODD}.toml"]) == 0
    Path(f"fabric{ODD}.toml").write_text(FABRIC)
    Path(f"{ODD}.topo").write_text(TOPO)
    Path("key.toml").write_text(f'"{ODD[:1]}\\u001b\\u009b" = 1\n')


@pytest.mark.parametrize(
    "words",
    [
        ["init", f"other{ODD}.toml"],
        ["show", f"{ODD}.toml"],
        ["show", "key.toml"],
        ["plan", f"{ODD}.toml"],
        ["plan", "--compare", f"{ODD}.toml", f"{ODD}.toml"],
        ["plan", f"{ODD}.toml", "--set", f"name={ODD}"],
        ["check", f"{ODD}.toml"],
        ["check", f"{ODD}.toml", "--format", "github"],
        ["check", f"{ODD}.toml", "--format", "sarif"],
        ["explain", "SEC003", f"{ODD}.toml"],
        ["diff", f"{ODD}.toml", f"{ODD}.toml"],
        ["cluster", ODD],
        ["fabric", "show", f"fabric{ODD}.toml"],
        ["fabric", "show", f"{ODD}.topo"],
        ["fabric", "show", f"clos2:64x400G/1p/{ODD}"],
        ["fabric", "simulate", f"{ODD}.topo"],
        ["fabric", "simulate", "clos2:64x400G/1p/32", "--traffic", f"{ODD}.csv"],
        ["data", "show", ODD],
        ["watch", ODD],
        [ODD],
    ],
    ids=lambda words: "-".join(words[:2]).encode("ascii", "backslashreplace").decode(),
)
def test_no_verb_prints_controls(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(words) in (0, 1, 2)
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert "internal error" not in err


@pytest.mark.parametrize(
    "words",
    [["show", f"{ODD}.toml"], ["plan", f"{ODD}.toml"], ["check", f"{ODD}.toml"], ["fabric", "show", f"{ODD}.topo"]],
    ids=lambda words: words[0],
)
def test_json_is_json_without_controls(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    json.loads(out)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("terminal")
def test_a_page_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = render_cluster(resolve_cluster("2xH100:1"))
    Path("c.toml").write_text(text.replace("name = ", 'name = "q\\u001b[2J\\u009b" #', 1))
    capsys.readouterr()
    assert main(["plan", f"{ODD}.toml", "--cluster", "c.toml"]) == 0
    assert "on q\\x1b[2J\\x9b (2 devices)" in capsys.readouterr().out


def test_a_line_of_training_on_a_terminal() -> None:
    assert terminal_text("host a\x1b[2J").plain == "host a\\x1b[2J"


def test_a_picture_is_xml_whatever_the_file_is_called() -> None:
    assert main(["fabric", "decisions", "--fabric", f"fabric{ODD}.toml", "--picture", "p.svg"]) == 0
    ElementTree.parse("p.svg")
    Path("bad.toml").write_text(FABRIC + 'name = "a\\u001b"\n')
    assert main(["fabric", "decisions", "--fabric", "bad.toml", "--picture", "q.svg"]) == 2
    assert not Path("q.svg").exists()
