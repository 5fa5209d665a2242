"""Blind predictions, and the score computed by hand on tables small enough to do so."""

import csv
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.validate.throughput_score import (
    RowPrediction,
    draw_known,
    fit_sources,
    predict_table,
    quantile,
    score_predictions,
)
from phalanx.validate.throughput_table import read_table

FIXTURE = Path(__file__).parents[1] / "data" / "published_runs.csv"
# What a scorer hides: everything measured, and everything that hints at it.
MEASURED = (
    "measured_tflops_per_gpu", "measured_mfu_pct", "measured_step_s", "measured_tokens_per_s_per_gpu",
    "measured_mem_gb", "notes", "status", "tier", "step_s", "step_s_from", "flops_convention",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return read_table(FIXTURE).rows


# --- prediction ---


def test_every_row_once_in_order(rows):
    assert [one.id for one in predict_table(rows)] == [row["id"] for row in rows]


def test_predictions_do_not_see_what_was_measured(rows):
    blind = tuple({name: "" if name in MEASURED else value for name, value in row.items()} for row in rows)
    absent = tuple({name: value for name, value in row.items() if name not in MEASURED} for row in rows)
    misleading = tuple(row | dict.fromkeys(MEASURED, "1e6") for row in rows)
    assert predict_table(rows) == predict_table(blind) == predict_table(absent) == predict_table(misleading)


def test_neither_id_nor_source_nor_order_matters(rows):
    renamed = tuple(row | {"id": f"x{at}", "source": ""} for at, row in enumerate(rows))
    told, again = predict_table(rows), predict_table(tuple(reversed(renamed)))
    assert [one.step_s for one in told] == pytest.approx([one.step_s for one in reversed(again)])


def test_a_row_has_a_prediction_or_a_reason(rows):
    for row, one in zip(rows, predict_table(rows), strict=True):
        if one.reason:
            assert one.step_s is one.mem_gb is one.fits is None
            assert one.reason == "layers is empty"
            assert row["layers"] == ""
        else:
            assert 0 < one.step_s_lo < one.step_s < one.step_s_hi
            assert 0 < one.mem_gb < 1e4
            assert one.fits in (True, False)


def test_memory_is_what_rank_0_can_reserve():
    """An allocator cannot show more than the device has, however much too large the layout is."""
    row = {
        "id": "a",
        "layers": "80",
        "hidden": "8192",
        "seq": "8192",
        "gpu": "A100-80GB-SXM",
        "gpus": "1",
        "global_batch": "8",
    }
    [one] = predict_table((row,))
    assert one.fits is False
    assert one.mem_gb < 86


# --- calibration ---


def slower(rows, factor):
    """The rows as a system would report them that is `factor` slower than predicted."""
    return tuple(
        row | {"step_s": str(one.step_s * factor)}
        for row, one in zip(rows, predict_table(rows), strict=True)
        if one.step_s
    )


@pytest.fixture
def megatron(rows):
    return tuple(row for row in rows if row["source"] == "megatron-sc21-table1")


def test_three_rows_calibrate_the_others(megatron):
    system = slower(megatron, 1.2)
    known, blind = system[:3], system[3:]
    for row, one in zip(blind, predict_table(blind, known=known), strict=True):
        assert one.step_s == pytest.approx(float(row["step_s"]), rel=0.04)
        assert one.step_s_lo < one.step_s < one.step_s_hi


def test_a_calibrated_interval_is_no_wider(megatron):
    known = slower(megatron, 1.2)[:3]
    for before, after in zip(predict_table(megatron), predict_table(megatron, known=known), strict=True):
        assert after.step_s_hi / after.step_s_lo <= before.step_s_hi / before.step_s_lo * (1 + 1e-9)


def test_calibration_stays_with_its_source(megatron):
    others = tuple(row | {"source": "elsewhere"} for row in megatron)
    assert predict_table(others, known=slower(megatron, 1.5)) == predict_table(others)


def test_known_rows_without_measurements_change_nothing(megatron):
    blank = tuple(row | {"step_s": ""} for row in megatron)
    plain = predict_table(megatron)
    for before, after in zip(plain, predict_table(megatron, known=blank), strict=True):
        assert after.step_s == pytest.approx(before.step_s)


def test_one_fit_per_source(rows):
    fitted = fit_sources(rows)
    assert set(fitted) == {row["source"] for row in rows if row["layers"]}


def test_drawing_is_seeded_and_takes_measured_rows_only(rows):
    known, rest = draw_known(rows, per_source=3, seed=0)
    assert (known, rest) == draw_known(rows, per_source=3, seed=0)
    assert known != draw_known(rows, per_source=3, seed=1)[0]
    assert len(known) + len(rest) == len(rows)
    assert not {row["id"] for row in known} & {row["id"] for row in rest}
    for row in known:
        assert float(row["step_s"]) > 0
        assert row["status"] == "ok"
        assert row["tier"] in ("A", "B")
    per_source = [row["source"] for row in known]
    assert max(per_source.count(name) for name in per_source) == 3


# --- score ---


def run(name, step_s, **cells):
    return {"id": name, "source": "s", "step_s": str(step_s), "status": "ok", "tier": "A", "task": "pretrain", **cells}


def guess(name, step_s, *, low=0.0, high=1e9, **more):
    return RowPrediction(
        id=name,
        step_s=step_s,
        step_s_lo=low,
        step_s_hi=high,
        mem_gb=more.get("mem_gb", 10.0),
        fits=more.get("fits", True),
    )


def scored(pairs):
    return score_predictions([row for row, _ in pairs], [one for _, one in pairs])


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5.0], 0.9, 5.0), ([3.0, 1.0, 2.0], 0.5, 2.0), (list(range(11)), 0.9, 9), (list(range(5)), 0.9, 4)],
)
def test_quantile_is_the_nearest_rank(values, share, expected):
    assert quantile(values, share) == expected


def test_errors_per_source_by_hand():
    # predicted over measured: +10 %, -20 %, +30 %, 0, +50 %
    pairs = [(run(str(at), 10.0), guess(str(at), step)) for at, step in enumerate((11.0, 8.0, 13.0, 10.0, 15.0))]
    card = scored(pairs)
    [source] = card.sources
    assert (source.source, source.rows) == ("s", 5)
    assert source.median == pytest.approx(0.20)
    assert source.p90 == pytest.approx(0.50)
    assert source.bias == pytest.approx(0.10)
    assert (card.mean_median, card.mean_p90) == (source.median, source.p90)


def test_the_median_of_an_even_number_is_between():
    pairs = [(run(str(at), 10.0), guess(str(at), step)) for at, step in enumerate((11.0, 12.0, 14.0, 18.0))]
    assert scored(pairs).sources[0].median == pytest.approx(0.30)


def test_the_mean_is_over_sources_with_five_rows():
    pairs = [(run(f"a{at}", 10.0, source="a"), guess(f"a{at}", 11.0)) for at in range(5)]
    pairs += [(run(f"b{at}", 10.0, source="b"), guess(f"b{at}", 13.0)) for at in range(50)]
    pairs += [(run(f"c{at}", 10.0, source="c"), guess(f"c{at}", 90.0)) for at in range(4)]
    card = scored(pairs)
    assert card.mean_median == pytest.approx((0.1 + 0.3) / 2)  # plain: fifty rows weigh as much as five
    assert [source.rows for source in card.sources] == [5, 50, 4]


@pytest.mark.parametrize(
    "cells",
    [{"status": "oom"}, {"tier": "C"}, {"tier": "M"}, {"task": "lora"}, {"step_s": ""}, {"step_s": "0"}],
    ids=lambda cells: str(next(iter(cells.items()))),
)
def test_rows_that_do_not_count(cells):
    assert scored([(run("a", 10.0) | cells, guess("a", 99.0))]).sources == []


def test_rows_without_a_prediction_do_not_count_but_say_why():
    card = scored(
        [(run("a", 10.0), RowPrediction(id="a", reason="no such device")), (run("b", 10.0), guess("b", 10.0))]
    )
    assert (card.rows, card.priced, card.unpriced) == (2, 1, {"no such device": 1})
    assert card.sources[0].rows == 1


def test_idle_runs_of_the_sweeps_count_for_ranking_only():
    """plan_score: rows of the two sweeps below 5 % measured MFU are left out of the errors, not of the coverage."""
    idle = run("a", 10.0, source="hf-ultrascale", measured_mfu_pct="4.9")
    busy = run("b", 10.0, source="hf-ultrascale", measured_mfu_pct="5.1")
    other = run("c", 10.0, source="elsewhere", measured_mfu_pct="1.0")
    card = scored([(idle, guess("a", 20.0, high=15.0)), (busy, guess("b", 11.0)), (other, guess("c", 11.0))])
    assert {source.source: source.rows for source in card.sources} == {"hf-ultrascale": 1, "elsewhere": 1}
    assert card.coverage == pytest.approx(1.0)


def test_coverage_counts_measurements_inside():
    pairs = [
        (run(str(at), step), guess(str(at), 10.0, low=9.0, high=12.0))
        for at, step in enumerate((8.9, 9.0, 10.0, 12.0, 12.1))
    ]
    assert scored(pairs).coverage == pytest.approx(3 / 5)


def test_memory_by_hand():
    pairs = [
        (run(str(at), 10.0, measured_mem_gb=gb), guess(str(at), 10.0, mem_gb=11.0))
        for at, gb in enumerate(("10", "11", "22", "", "garbage"))
    ]
    card = scored(pairs)
    assert card.memory_rows == 3
    assert card.memory_median == pytest.approx(0.1)
    assert card.memory_p90 == pytest.approx(0.5)


def test_nothing_measured_gives_no_figures():
    card = scored([(run("a", ""), guess("a", 10.0))])
    assert card.priced == 1
    assert card.sources == []
    assert {card.mean_median, card.memory_median, card.oom_precision, card.coverage, card.regret_median} == {None}


def sweep(failed=20, finished=7):
    """A source with enough failures to be a sweep: every failed run is called, every finished one fits."""
    lost = [(run(f"x{at}", "", source="w", status="oom"), guess(f"x{at}", 1.0, fits=False)) for at in range(failed)]
    cell = {"source": "w", "model_name": "m", "gpus": "8", "global_batch": "10", "seq": "10"}
    done = [(run(f"y{at}", 10.0 + at, **cell), guess(f"y{at}", 20.0 + at)) for at in range(finished)]
    return lost, done


def test_oom_calls_by_hand():
    lost, done = sweep()
    lost[0] = (lost[0][0], guess("x0", 1.0, fits=True))  # missed
    lost[1] = (lost[1][0], guess("x1", 1.0, fits=True))  # missed
    done[0] = (done[0][0], guess("y0", 20.0, fits=False))  # false alarm
    card = scored(lost + done)
    assert card.oom_precision == pytest.approx(18 / 19)
    assert card.oom_recall == pytest.approx(18 / 20)


def test_a_source_that_reports_few_failures_is_no_sweep():
    lost, done = sweep(failed=19)
    card = scored(lost + done)
    assert card.oom_precision is None
    assert card.regret_cells == 0


def test_no_regret_when_the_best_is_picked():
    lost, done = sweep()
    card = scored(lost + done)
    assert (card.regret_cells, card.regret_median) == (1, 0.0)


def test_regret_is_how_much_slower_the_pick_ran():
    lost, done = sweep()
    done[4] = (done[4][0], guess("y4", 1.0))  # predicted fastest, really 14 s where 10 s was possible
    assert scored(lost + done).regret_median == pytest.approx(0.4)


def test_a_pick_that_failed_costs_everything():
    lost, done = sweep()
    failed = run(
        "z",
        "",
        status="oom",
        **{name: done[0][0][name] for name in ("source", "model_name", "gpus", "global_batch", "seq")},
    )
    assert scored([*lost, *done, (failed, guess("z", 0.5))]).regret_median == 1.0
    # One that we said would not fit is never picked.
    assert scored([*lost, *done, (failed, guess("z", 0.5, fits=False))]).regret_median == 0.0


def test_regret_is_per_token():
    """A layout with a larger batch takes a longer step and may still be the best."""
    lost, done = sweep()
    big = run(
        "z", 40.0, **{name: done[0][0][name] for name in ("source", "model_name", "gpus", "seq")}, global_batch="80"
    )
    assert scored([*lost, *done, (big, guess("z", 40.0))]).regret_median == 0.0  # 0.05 s per token against 0.1


def test_cells_with_few_finished_runs_do_not_count():
    lost, done = sweep(finished=5)
    assert scored(lost + done).regret_cells == 0


def test_where_nothing_fits_the_fastest_is_picked():
    lost, done = sweep()
    done = [(row, guess(one.id, one.step_s, fits=False)) for row, one in done]
    assert scored(lost + done).regret_median == 0.0


def test_two_equal_predictions_one_of_which_failed():
    lost, done = sweep()
    cell = {name: done[0][0][name] for name in ("source", "model_name", "gpus", "global_batch", "seq")}
    twin = (run("z", "", status="oom", **cell), guess("z", done[0][1].step_s))
    assert scored([*lost, *done, twin]).regret_median == 0.0  # of equals the first in the table is picked


def test_medians_of_memory_and_regret_are_true_medians():
    pairs = [
        (run(str(at), 10.0, measured_mem_gb=gb), guess(str(at), 10.0, mem_gb=12.0))
        for at, gb in enumerate(("12", "10"))
    ]
    assert scored(pairs).memory_median == pytest.approx(0.1)


def test_the_fixture_holds_both_kinds_of_every_claim():
    """The shipped table has finished and failed runs, three rows of each source, and says where each is from."""
    with FIXTURE.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    sources = [row["source"] for row in table]
    assert min(sources.count(name) for name in sources) >= 3
    assert {row["status"] for row in table} == {"ok", "oom", "crash_or_oom"}
    described = (FIXTURE.parent / "README.md").read_text(encoding="utf-8")
    assert f"{len(table)} rows" in described
    assert all(name.removesuffix("-table2").removesuffix("-table1") in described for name in sources)


def test_a_backtest_prints_as_the_verb_prints_it(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text("id,layers,hidden,seq,gpu,gpus,global_batch,source\na,32,4096,4096,H100,8,64,mine\n")
    found = phalanx.backtest(path)
    assert main(["validate", str(path)]) == 0
    assert capsys.readouterr().out.rstrip() == str(found).rstrip()
    claims = tmp_path / "claims.csv"
    claims.write_text("source,quantity,value,unit,conditions\npaper,no such quantity,1,,\n")
    assert main(["validate", str(claims)]) == 0
    assert capsys.readouterr().out.rstrip() == str(phalanx.backtest(claims)).rstrip()
