"""A loose guard: on a few published runs of every source the cost model must stay close to what was measured.

The limits are not the aims (those are in docs/validation.md, over the whole table); they catch a broken formula.
"""

from pathlib import Path

import pytest

from phalanx.validate.throughput_score import draw_known, predict_table, score_predictions
from phalanx.validate.throughput_table import read_table

FIXTURE = Path(__file__).parents[1] / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def rows():
    return read_table(FIXTURE).rows


@pytest.fixture(scope="module")
def card(rows):
    return score_predictions(rows, predict_table(rows))


def test_step_time(card):
    assert len([source for source in card.sources if source.rows >= 5]) == 13
    assert card.mean_median < 0.12
    assert card.mean_p90 < 0.30
    for source in card.sources:
        assert source.median < 0.30, source
        assert abs(source.bias) < 0.25, source


def test_memory(card):
    assert card.memory_rows >= 20
    assert card.memory_median < 0.12
    assert card.memory_p90 < 0.30


def test_out_of_memory_calls(card):
    assert card.oom_precision > 0.8
    assert card.oom_recall > 0.8


def test_the_pick_of_a_sweep(card):
    assert card.regret_cells == 1
    assert card.regret_median < 0.15


def test_the_interval(card):
    assert 0.6 < card.coverage < 0.97


def test_what_was_refused_is_what_nobody_can_price(card):
    assert card.unpriced == {"layers is empty": 6}


def test_three_measured_rows_find_a_slower_system(rows):
    """The same runs on machines a third slower than any the constants were fitted to."""
    slow = tuple(row | {"step_s": str(1.35 * float(row["step_s"]))} if row["step_s"] else row for row in rows)
    known, rest = draw_known(slow, per_source=3, seed=0)
    plain, fitted = (score_predictions(rest, predict_table(rest, known=some)) for some in ((), known))
    medians = [sum(source.median for source in one.sources) / len(one.sources) for one in (plain, fitted)]
    assert medians[1] < 0.6 * medians[0]
