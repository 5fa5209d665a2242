"""`phalanx backtest` on a table of network claims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.main import main

TABLE = """\
source,quantity,value,unit,conditions
paper,hosts at full bisection,131072,NICs,"2 tiers, 8 planes x 100G, 512-port switches"
paper,NVLS efficiency,0.85,ratio,Hopper
elsewhere,shoe size,43,EU,
elsewhere,tail FCT,176.2,us,./htsim_uec -tm connection_matrices/one.cm -sender_cc_only
"""


@pytest.fixture
def claims(tmp_path: Path) -> str:
    path = tmp_path / "claims.csv"
    path.write_text(TABLE)
    return str(path)


def test_the_page(claims: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", claims]) == 0
    out, err = capsys.readouterr()
    assert err == "1 simulation, about 0 s of CPU; Ctrl-C keeps what is finished\n"
    assert out.startswith("paper\n  hosts at full bisection | 2 tiers, 8 planes x 100G, 512-p…  131,072 NICs  131,072")
    assert "not attempted: no reader for 'shoe size': not understood: shoe" in out
    assert "\n4 rows: 2 reproduced (2 within their tolerance), 0 by range (0 covered" in out
    assert "; an input is not published), 1 calibrated" in out


def test_json_holds_every_row(claims: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", claims, "--json", "--simulate"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in found["outcomes"]] == ["reproduced", "calibrated", "not attempted", "reproduced"]
    assert found["outcomes"][0]["ours"] == 131072
    assert found["outcomes"][3]["within"] is True
    assert found["total"]["rows"] == 4


def test_wrong_calls(claims: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", claims, "--draw", "3"]) == 2
    assert "is a table of network claims\n  leave --predictions, --calibrate and --draw out" in capsys.readouterr().err
    bad = tmp_path / "bad.csv"
    bad.write_text("source,quantity,valu,unit,conditions\nx,y,1,m,z\n")
    assert main(["backtest", str(bad)]) == 2
    assert 'lacks the column value\n  is "valu" meant to be value?' in capsys.readouterr().err
    bad.write_text("id,layers,hidden,seq,gpu,gpus,global_batch\nx,1,1,1,H100,1,1\n")
    assert main(["backtest", str(bad), "--simulate"]) == 2
    assert "--simulate: " in capsys.readouterr().err


def test_ctrl_c_prints_what_was_finished(
    claims: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.sim.packets.packet_run import run_connections
    from phalanx.validate import network_htsim

    def halfway(*args: object, **named: object) -> object:
        return replace(run_connections(*args, **named), stopped="interrupted")  # type: ignore[arg-type]

    monkeypatch.setattr(network_htsim, "run_connections", halfway)
    network_htsim._run_case.cache_clear()
    assert main(["backtest", claims]) == 130
    out = capsys.readouterr().out
    assert "not attempted: interrupted" in out
    assert "4 rows: 1 reproduced (1 within their tolerance), 0 by range" in out


def test_a_table_that_acts_on_a_terminal_is_spelt_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claims.csv"
    path.write_text('source,quantity,value,unit,conditions\n"p\x1b[2J\nfake","q\x9b\nr",1,u\u202e,c\x07\n')
    assert main(["backtest", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("p\\x1b[2J\\nfake\n  q\\x9b\\nr | c\\x07  1 u\\u202e")
    assert out.replace("\n", "").isprintable()
