"""The table of cases: derived columns and restriction to some rows."""

import numpy as np
import pytest

from phalanx.validate.throughput_rows import row_columns, to_cases

ROW = {"layers": "32", "hidden": "4096", "seq": "4096", "gpu": "H100", "gpus": "16", "global_batch": "64"}


def table(*changes):
    return to_cases([row_columns(ROW, 1, "none") | one for one in changes])


def test_devices_are_the_product_of_the_axes_without_experts():
    assert table({"tp": 4.0, "pp": 3.0, "cp": 2.0, "dp": 5.0, "ep": 8.0}).devices == 120


@pytest.mark.parametrize(
    ("batch", "dp", "micro", "expected"),
    [(64, 8, 2, 4), (64, 8, 3, 3), (4, 8, 1, 1), (96, 32, 3, 1)],  # a share that does not divide is rounded up
)
def test_accumulation(batch, dp, micro, expected):
    assert table({"global_batch": batch, "dp": dp, "micro_batch": micro}).accumulation == expected


def test_tokens_of_a_rank_are_split_by_context_only():
    assert table({"micro_batch": 2.0, "cp": 4.0, "tp": 8.0}).tokens == 2 * 4096 / 4


def test_take_keeps_rows_together():
    cases = table({"tp": 1.0, "pp": 8.0}, {"tp": 2.0, "pp": 4.0}, {"tp": 4.0, "pp": 2.0})
    kept = cases.take(np.array([2, 0]))
    assert kept.tp.tolist() == [4, 1]
    assert kept.pp.tolist() == [2, 8]
    assert cases.take(cases.tp > 1).pp.tolist() == [4, 2]
