"""`phalanx scale predict`: a healthy run is never called bad, one that goes wrong is, and noise of steps is neither."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import phalanx
from phalanx.api.scale_predict import _rate_left
from phalanx.cli.main import main
from phalanx.job.schema import Optim
from phalanx.scale.fit_result import LeftOutBudget
from phalanx.scale.judge_run import RunForecast, judge_run
from phalanx.scale.laws import law_loss

sys.path.append(str(Path(__file__).parents[1]))
from made_law import made_law, write_law
from synthetic import write_run

# The law of a sweep of 12 runs, and what the run that allocate sized by it evaluated: 59,552 parameters on 1,679,360
# tokens, wsd with a decay over the last fifth (2026-11-19, examples/scaling.toml).
LAW = made_law(
    {"E": 2.63588794, "A": 4256.891267, "B": 15.09205506, "alpha": 0.95266895, "beta": 0.20462241},
    flops=(2.5e10, 1.6e11),
    noise=0.0081,
)
# Its largest budget, predicted from the others, was off to one side.
TESTED = LeftOutBudget(
    rows=4, least_flops=1.6e11, mean_abs_error=0.024, worst_error=0.039, drift=0.02324, decades=0.4029
)
LAW = replace(LAW, diagnostics=replace(LAW.diagnostics, left_out_budget=TESTED))
PARAMS, TOKENS, EVERY = 59_552.0, 1_679_360.0, 102_400.0
LOSSES = (5.0152, 4.5412, 4.3437, 4.2207, 4.1467, 4.1041, 4.0463, 4.0183, 3.9829, 3.9436, 3.8965, 3.875, 3.8537, 3.7408,
          3.6911, 3.6488, 3.6388)  # fmt: skip
SEEN = (*(EVERY * place for place in range(1, 17)), TOKENS)
OPTIM = Optim(lr=8e-3, schedule="wsd", decay=0.2, final_lr=0.1, warmup_tokens=16_384)


def judged(losses: Sequence[float], *, evaluated: bool = True) -> RunForecast:
    """The forecast after so many evaluations."""
    curve = list(zip(SEEN, losses, strict=False))
    return judge_run(
        LAW,
        run="run",
        finished=False,
        params=PARAMS,
        planned_tokens=TOKENS,
        curve=curve,
        rate_left=[_rate_left(OPTIM, tokens, TOKENS) for tokens, _ in curve],
        evaluated=evaluated,
    )


def test_a_healthy_run_is_inside_at_each_of_its_evaluations() -> None:
    """It was called bad at the first nine of seventeen: its loss is 7 to 20 % above the law until its rate decays."""
    verdicts = [judged(LOSSES[:count]).verdict for count in range(1, len(LOSSES))]
    assert verdicts == ["inside"] * 16
    assert LOSSES[-1] / law_loss("vpnls", LAW.values(), PARAMS, TOKENS) < 1.03, "and it ends where the law says"


def test_what_is_allowed_falls_to_nothing() -> None:
    allowed = [one.allowed for one in judged(LOSSES).evaluations]
    assert all(after < before for before, after in pairwise(allowed))
    assert allowed[0] > 0.15
    assert allowed[12] == pytest.approx(0.086, abs=0.002)  # the last one before the decay
    assert allowed[-1] == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_diverges_is_caught_at_its_first_bad_evaluation() -> None:
    for at in range(2, len(LOSSES)):
        assert judged([*LOSSES[:at], LOSSES[at - 1] + 0.5]).verdict == "above", f"after {at} evaluations"


def test_a_run_15_percent_above_the_law_is_caught_from_its_first_quarter_on() -> None:
    for count in range(4, len(SEEN) + 1):
        losses = [1.15 * law_loss("vpnls", LAW.values(), PARAMS, tokens) for tokens in SEEN[:count]]
        assert judged(losses).verdict == "above", f"at {SEEN[count - 1] / TOKENS:.0%}"


def test_the_rate_that_is_left() -> None:
    wsd = [_rate_left(OPTIM, share * 1e6, 1e6) for share in (0.001, 0.5, 0.8, 0.85, 1.0)]
    assert wsd == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
    cosine = replace(OPTIM, schedule="cosine", warmup_tokens=0)
    assert [_rate_left(cosine, share * 1e6, 1e6) for share in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert _rate_left(replace(OPTIM, final_lr=1.0), 1e6, 1e6) == 1.0, "a rate that never decays"


def test_a_run_moves_away_only_by_its_evaluations() -> None:
    """Of 794 windows of training losses 12 were said to move away: four single steps in a row that rise are noise."""
    law = made_law(LAW.values(), flops=(2.5e10, 1.6e11), noise=0.03)
    tokens = (1e6, 1.05e6, 1.1e6, 1.15e6)
    curve = [(one, off * law_loss("vpnls", LAW.values(), PARAMS, one)) for one, off in zip(tokens, OFF, strict=True)]
    for evaluated, verdict in ((True, "moving away"), (False, "inside")):
        found = judge_run(
            law, run="", finished=False, params=PARAMS, planned_tokens=TOKENS, curve=curve, evaluated=evaluated
        )
        assert found.verdict == verdict


OFF = (0.96, 0.98, 1.01, 1.05)


def test_training_losses_are_averaged(tmp_path: Path) -> None:
    run = write_run(tmp_path, finished=False, incidents=0)
    for path in run.path.glob("events-*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["event"] != "evaluate"]
        path.write_text("".join(lines))
    found = phalanx.scale.predict(write_law(tmp_path / "law.json", LAW), run.path).forecast
    assert len(found.evaluations) == 32
    assert "means of training losses" in found.notes[0]
    late = np.array([one.loss for one in found.evaluations[-8:]])
    assert np.all(np.diff(late) < 0.0), "single steps rise now and then"


def test_a_table_says_where_its_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law, table = write_law(tmp_path / "law.json", LAW), tmp_path / "run.csv"
    table.write_text(f"params,tokens,loss\n{PARAMS},{SEEN[0]},{LOSSES[0]}\n")
    call = ["scale", "predict", str(law), "--run", str(table)]
    assert main(call) == 1, "taken as a run that ends here"
    assert main([*call, "--tokens", "1679360"]) == 0
    capsys.readouterr()
    assert main([*call, "--tokens", "1e5"]) == 2
    assert "fewer than the 102k of the last row" in capsys.readouterr().err


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = write_law(tmp_path / "law.json", LAW)
    assert main(["scale", "predict", str(law), "--run", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["scale", "predict", str(law), "--run", str(tmp_path / "nope")]) == 2
    assert "there is no such run folder or table" in capsys.readouterr().err
