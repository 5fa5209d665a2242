"""Names of before 0.8: they work, are not listed, and say on stderr what they are called now."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main, usage
from phalanx.cli.parser import Parser, add_hosts


def test_validate_is_backtest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path / "no.csv")]) == 2
    assert capsys.readouterr().err.startswith("note: phalanx validate is now called phalanx backtest\n")
    assert "validate" not in usage()


def test_data_verify_is_data_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(tmp_path)]) == 2
    former = capsys.readouterr().err
    assert main(["data", "checksum", str(tmp_path)]) == 2
    assert former == "note: phalanx data verify is now called phalanx data checksum\n" + capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    listed = capsys.readouterr().out.partition("positional")[2].partition("see also")[0]
    assert "checksum" in listed
    assert "verify" not in listed


def test_drill_check_is_drill_read_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--check", "nofile"]) == 2
    assert capsys.readouterr().err.startswith("note: --check is now called --read-record\nnofile")


def test_agents_are_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="phalanx drill")
    add_hosts(parser)
    assert parser.parse_args(["--agents", "3"]).hosts == 3
    assert capsys.readouterr().err == "note: --agents is now called --hosts\n"
    assert parser.parse_args(["--hosts", "2"]).hosts == 2
    assert parser.parse_args([]).hosts == 1
    assert "--agents" not in parser.format_help()
