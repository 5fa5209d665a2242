"""What a finding asks for cures it, and says why where that is not plain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.cases.com import predicted, saving
from rules.kit import answers, evidence, verdict

from phalanx.rules.facts.trainers import Practice


@pytest.mark.parametrize("step_s", [11.288, 23.99, 130.4])
@pytest.mark.parametrize("written_s", [31, 1800])
def test_the_timeout_that_is_asked_for_is_one_that_holds(step_s, written_s) -> None:
    found = [one for one in answers("COM004", predicted(step_s, f"train.timeout_s={written_s}")) if one.outcome.edits]
    (edit,) = found[0].outcome.edits
    assert verdict("COM004", predicted(step_s, f"train.timeout_s={edit.value}")) == "pass"


@pytest.mark.parametrize("trainer", ["phalanx", "torchtitan"])
@pytest.mark.parametrize("save_s", [82.0, 400.0])
@pytest.mark.parametrize("sets", [("train.timeout_s=600",), ("train.timeout_s=3",), ("comm.init_timeout_s=9",),
                                  ("comm.init_timeout_s=3600", "train.timeout_s=3600")])  # fmt: skip
def test_no_timeout_is_proposed_that_a_save_outlasts(trainer, save_s, sets) -> None:
    """39 s were proposed beside a synchronous save of 82 s."""
    before = replace(saving(save_s, *sets), practice=Practice(trainer=trainer))
    edits = [edit for one in answers("COM004", before) if one.verdict == "fail" for edit in one.outcome.edits]
    assert edits or verdict("COM004", before) != "fail"  # 600 s outlast a save of 400 s
    assert all(edit.value >= 2 * save_s for edit in edits)
    made = {edit.key: f"{edit.key}={edit.value}" for edit in edits}
    kept = [one for one in sets if one.partition("=")[0] not in made]
    after = replace(saving(save_s, *kept, *made.values()), practice=Practice(trainer=trainer))
    assert verdict("COM004", after) != "fail"


def test_a_batch_that_cannot_be_shared_out_says_why() -> None:
    (plain,) = answers("BAT001", evidence("batch.global_sequences=500"))
    assert "every data rank takes the same number of sequences" in plain.outcome.formula[0]
    (bound,) = answers("BAT001", evidence("batch.global_sequences=100", "numerics.reproducible=true", text=FREE))
    assert "numerics.reproducible = true" in bound.outcome.formula[-1]


FREE = """\
name = "free"
[model]
preset = "llama-3-8b"
[data]
tokens = "1T"
sequence = 8192
[batch]
global_sequences = 512
[cluster]
spec = "8xH100:16"
"""


def test_a_long_timeout_costs_what_only_it_notices() -> None:
    slow = predicted(2.0, "train.timeout_s=1800")
    with_heartbeat = replace(slow, practice=Practice(trainer="phalanx", heartbeat_s=0.25))
    (dear,) = (one.outcome.impact for one in answers("COM004", slow) if one.verdict == "fail")
    (cheap,) = (one.outcome.impact for one in answers("COM004", with_heartbeat) if one.verdict == "fail")
    assert cheap.points == pytest.approx(dear.points * 5_948 / 49_212)
