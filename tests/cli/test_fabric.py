import json
from pathlib import Path

import pytest

from phalanx.cli.main import main


def test_design_as_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "131072", "--nic-gbps", "800", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["fabric"]["switches"] == 6144
    assert (first["fabric"]["hops"], first["fabric"]["paths"], first["fabric"]["hosts_one_switch_away"]) == (
        3,
        2048,
        256,
    )
    assert first["loss"]["nic_link"] == 0.125
    assert first["bill"]["optics_800g"] == 524288
    assert first["pareto"] is True


def test_design_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "2048", "--nic-gbps", "400", "--switch", "quantum-2", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2,048 GPUs with a 400 Gb/s NIC each: ")
    assert "Quantum-2" in out
    assert err == ""


def test_a_refusal_is_exit_2_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["fabric", "design", "--gpus", "131072", "--nic-gbps", "800", "--switch", "Tomahawk 5", "--tiers", "2"]
    assert main([*call, "--planes", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "2 tiers of Tomahawk 5 256x200G join at most 32,768" in err
    assert "use --tiers 3" in err


@pytest.mark.parametrize("gpus", ["0", "abc", "1.5", "1e12", "nan", "9" * 40])
def test_gpus_that_are_none(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", gpus, "--nic-gbps", "800"]) == 2
    assert capsys.readouterr().err.startswith("phalanx fabric design: ")


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "64", "--nic-gbps", "800", "--top", "0"]) == 2
    assert "--top 0 shows nothing" in capsys.readouterr().err


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
