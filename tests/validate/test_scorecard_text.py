"""The scorecard as text, and predictions as a file that appears whole or not at all."""

import csv

import pytest

from phalanx.errors import SystemFailure
from phalanx.validate.throughput_score import RowPrediction, Scorecard, SourceScore, scorecard_text, write_predictions

PRICED = RowPrediction(id="a", step_s=1.23456789, step_s_lo=1.0, step_s_hi=2.0, mem_gb=40.0, fits=True)
UNPRICED = RowPrediction(id="b, with a comma", reason="gpu is empty")


def test_file_layout(tmp_path):
    target = tmp_path / "out.csv"
    write_predictions(
        target, [PRICED, UNPRICED, RowPrediction(id="c", step_s=1e-7, step_s_lo=0, step_s_hi=1, mem_gb=1, fits=False)]
    )
    assert target.read_text().splitlines() == [
        "id,step_s,step_s_lo,step_s_hi,mem_gb,fits",
        "a,1.23457,1,2,40,true",
        '"b, with a comma",,,,,',
        "c,1e-07,0,1,1,false",
    ]


@pytest.mark.parametrize("name", ["plain", 'comma,quote"', "line\nbreak", "ünïcode", "=1+1"])
def test_any_id_survives(tmp_path, name):
    write_predictions(tmp_path / "out.csv", [RowPrediction(id=name)])
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [name]


def test_an_old_file_is_replaced_whole(tmp_path):
    target = tmp_path / "out.csv"
    target.write_text("old\n" * 1000)
    write_predictions(target, [PRICED])
    assert len(target.read_text().splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SystemFailure) as caught:
        write_predictions(tmp_path / "no" / "out.csv", [PRICED])
    assert str(caught.value) == (
        f"{tmp_path / 'no' / 'out.csv'}: cannot be written: No such file or directory\n  name a writable file"
    )


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "out.csv").mkdir()
    with pytest.raises(SystemFailure):
        write_predictions(tmp_path / "out.csv", [PRICED])
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_others_may_read_it_as_any_file(tmp_path):
    write_predictions(tmp_path / "out.csv", [PRICED])
    (tmp_path / "plain").touch()
    assert (tmp_path / "out.csv").stat().st_mode == (tmp_path / "plain").stat().st_mode


FULL = Scorecard(
    rows=1200, priced=1190, unpriced={"layers is empty": 8, "gpu is empty": 2},
    sources=[
        SourceScore(source="megatron", rows=1100, median=0.051, p90=0.152, bias=-0.021),
        SourceScore(source="mine", rows=3, median=0.3, p90=0.4, bias=0.3),
    ],
    mean_median=0.051, mean_p90=0.152, memory_rows=7, memory_median=0.04, memory_p90=0.11, oom_precision=0.951,
    oom_recall=0.953, coverage=0.801, regret_cells=18, regret_median=0.02, regret_p90=0.09,
)  # fmt: skip


def test_the_page():
    assert (
        scorecard_text(FULL)
        == """\
1,190 of 1,200 rows priced
  8 not: layers is empty
  2 not: gpu is empty

step time, |predicted/measured - 1|
source                rows  median    p90    bias
megatron             1,100    5.1%  15.2%   -2.1%
mine                     3   30.0%  40.0%  +30.0%  (too few for the mean)
mean over 1 sources           5.1%  15.2%

80 % interval holds       80.1% of measured steps
memory of rank 0           4.0% median, 11.0% p90 error (7 rows)
does not fit             0.951 precision, 0.953 recall
regret of the pick         2.0% median, 9.0% p90 over 18 (model, GPUs) cells"""
    )


def test_calibration_is_announced():
    assert "calibrated on its measured rows (39 in all)" in scorecard_text(FULL, calibrated_on=39).splitlines()[0]


def test_without_measurements_it_says_so():
    page = scorecard_text(Scorecard(rows=2, priced=2, unpriced={}))
    assert page == "2 of 2 rows priced\n\nno row of this table has a measured step_s that counts"


def test_many_reasons_are_shortened():
    page = scorecard_text(Scorecard(rows=20, priced=0, unpriced={f"reason {at}": at for at in range(1, 13)}))
    assert page.splitlines()[1] == "  12 not: reason 12"  # the commonest first
    assert "  and 4 other reasons; --json names all" in page
