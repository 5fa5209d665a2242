"""`phalanx fabric simulate` as a person calls it."""

from __future__ import annotations

import json

import pytest

from phalanx.cli.main import main


def test_text_names_rates_times_and_stalled_flows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "simulate", "clos2:64x800G/8p/16", "--fail", "transceiver:3"]) == 0
    out = capsys.readouterr().out
    assert "permutation, 64 flows of 2.00 MB per host" in out
    assert "broken: transceiver:3 at 0%" in out
    assert "last never" in out
    assert "2 flows have no working path" in out


def test_json_is_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["fabric", "simulate", "clos2:64x100G/1p/16", "--routing", "flow", "--seed", "7", "--json"]
    found = []
    for _ in range(2):
        assert main(call) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert 0.3 < found[0]["rate_mean"] < 0.8
    assert found[0]["recovery"] == "conventional"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--traffic", "rng"], "use ring"),
        (["--bytes", "0"], "a transfer of 0 bytes"),
        (["--bytes", "many"], "--bytes"),
        (["--fail", "t1:0/77"], "there is no (0, 77)"),
        (["--routing", "qp", "--paths", "-2"], "-2 paths per flow"),
    ],
)
def test_mistakes_end_with_two_and_a_fix(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "simulate", "clos2:64x100G/1p/16", *words]) == 2
    assert text in capsys.readouterr().err
