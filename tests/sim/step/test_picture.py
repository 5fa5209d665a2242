"""The timeline in letters."""

from phalanx.sim.step.step_text import COLUMNS, LEGEND, timeline_picture
from phalanx.sim.step.step_timeline import simulate_timeline

from .conftest import by_hand, sharing


def test_a_pipeline_fills_and_drains():
    # Forward 1 s, backward 2 s: 18 s on both stages, four columns a second.
    first, second, legend = timeline_picture(simulate_timeline(by_hand(micros=5, schedule="gpipe")))
    assert legend == LEGEND
    assert first == "stage 0  " + 20 * "F" + 12 * "." + 40 * "B"
    assert second == "stage 1  " + 4 * "." + 20 * "F" + 40 * "B" + 8 * "."


def test_passes_shorter_than_a_column_are_told_together():
    drawn = timeline_picture(simulate_timeline(by_hand(stages=4, micros=200)))
    assert all(len(line) == len("stage 0  ") + COLUMNS for line in drawn[:-1])
    assert all("x" * 60 in line for line in drawn[:-1])


def test_traffic_that_shows_the_update_and_delayed_weights():
    work = by_hand(stages=1, micros=1, shared=sharing(reduce_s=3.0, overlap=0.0), optimizer_s=3.0)
    assert timeline_picture(simulate_timeline(work))[0] == "stage 0  " + 8 * "F" + 16 * "B" + 24 * "c" + 24 * "o"
    assert (
        "W" in timeline_picture(simulate_timeline(by_hand(stages=4, micros=4, schedule="zero-bubble", weight_s=1.0)))[0]
    )


def test_of_many_stages_a_few_are_drawn():
    drawn = timeline_picture(simulate_timeline(by_hand(stages=16, micros=16)))
    assert [line.split()[1] for line in drawn[:-1]] == ["0", "2", "4", "6", "9", "11", "13", "15"]
