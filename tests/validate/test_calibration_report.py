"""Calibration from a user's own steps: a table, or the folder of a run."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import phalanx
from phalanx.errors import SystemFailure, UserError
from phalanx.plan.calibrate import GROUPS, Calibration, read_calibration
from phalanx.units import plural
from phalanx.validate import calibration_report as fieldwork
from phalanx.validate.calibration_report import (
    CalibrationReport,
    calibrate_run,
    calibrate_table,
    calibration_text,
    write_calibration,
)
from phalanx.validate.throughput_rows import predict_rows

COLUMNS = ("id", "source", "model_name", "layers", "hidden", "seq", "gpu", "gpus", "global_batch", "tp", "dp", "step_s")
# Different splits of one model: what each scalar multiplies has another share in each.
SPLITS = ((1, 64), (2, 32), (4, 16), (8, 8))


def row(at, tp, dp, **changes):
    made = {"id": f"r{at}", "source": "mine", "model_name": "llama-3-8b", "layers": "32", "hidden": "4096"}
    made |= {"seq": "4096", "gpu": "H100-80GB-SXM", "gpus": "64", "global_batch": "256", "tp": str(tp), "dp": str(dp)}
    return made | {"step_s": ""} | changes


def slowed(factor, splits=SPLITS):
    """Rows whose measured step is `factor` times the predicted one."""
    rows = [row(at, tp, dp) for at, (tp, dp) in enumerate(splits)]
    seconds = predict_rows(tuple(rows)).times.step_s
    return [one | {"step_s": f"{factor * s:.9g}"} for one, s in zip(rows, seconds, strict=True)]


@pytest.fixture
def table(tmp_path):
    def make(rows):
        path = tmp_path / "mine.csv"
        path.write_text("\n".join([",".join(COLUMNS), *(",".join(one[name] for name in COLUMNS) for one in rows)]))
        return path

    return make


@pytest.fixture
def run(tmp_path, make_job):
    """A run folder: a plan and the lines of rank 0's events."""

    def make(lines, **job):
        folder = tmp_path / "run"
        folder.mkdir()
        plan = phalanx.plan(make_job(**job))
        (folder / "plan.json").write_text(plan.to_json())
        (folder / "events-0.jsonl").write_text("\n".join(lines))
        return folder, plan

    return make


def step(seconds, **more):
    return json.dumps({"event": "step", "duration_s": seconds} | more)


def refused(call, path):
    with pytest.raises(UserError) as caught:
        call(path)
    return str(caught.value)


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_a_system_that_is_slower_all_over_is_found(table, factor):
    report = calibrate_table(table(slowed(factor)))
    assert report.measurements == 4
    assert report.median_error_before == pytest.approx(abs(1 / factor - 1), rel=1e-6)
    assert report.median_error_after < 0.6 * report.median_error_before  # four rows against the priors
    assert (report.scalars.compute > 1) == (factor > 1)


def test_a_model_that_is_right_stays_as_it_is(table):
    report = calibrate_table(table(slowed(1.0)))
    assert asdict(report.scalars) == pytest.approx(dict.fromkeys(GROUPS, 1.0), abs=1e-3)
    assert report.median_error_after < 1e-3


def test_rows_without_a_step_take_no_part(table):
    rows = slowed(1.3)
    blank = [row(90, 2, 32, step_s=cell) for cell in ("", "0", "-1", "soon", "nan")]
    blank = [one | {"id": f"b{at}"} for at, one in enumerate(blank)]
    assert calibrate_table(table([*blank, *rows])).scalars == calibrate_table(table(rows)).scalars


def test_a_row_that_cannot_be_priced_costs_only_itself(table):
    rows = slowed(1.3)
    report = calibrate_table(table([rows[0] | {"id": "x", "gpu": "H900"}, *rows]))
    assert (report.measurements, report.skipped) == (4, 1)
    assert report.scalars == calibrate_table(table(rows)).scalars


def test_a_table_without_steps(table):
    path = table([row(0, 1, 64)])
    assert refused(calibrate_table, path) == (
        f"{path}: has no measured step_s\n  fill in step_s (seconds per optimizer step) for three to five runs"
    )


def test_a_table_whose_column_is_missing(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("id,layers,hidden,seq,gpu,gpus,global_batch\na,32,4096,4096,H100,8,64\n")
    assert "has no measured step_s" in refused(calibrate_table, path)


def test_a_table_nobody_can_price(table):
    path = table([row(0, 1, 64, gpu="H900", step_s="1")])
    told = f"{path}: has no row that can be priced: unknown accelerator 'H900'\n"
    assert refused(calibrate_table, path).startswith(told)


def test_a_run_is_calibrated_on_its_usual_step(run, make_job):
    plan = phalanx.plan(make_job())
    slow = 1.25 * plan.prediction.step_s
    steady = [0.9 * slow] * 3 + [slow] * 2 + [1.1 * slow] * 2 + [9 * slow]  # the last one stalled
    lines = [step(99.0), step(99.0), *map(step, steady)]  # the first fifth is warm-up; with it the median moves
    folder, plan = run(lines)
    report = calibrate_run(folder)
    assert report.measurements == 1
    assert report.source == str(folder)
    assert report.median_error_before == pytest.approx(0.2)
    assert report.median_error_after < 0.15
    assert report.scalars.compute > 1


def test_torn_and_foreign_lines_are_skipped(run):
    lines = [
        *[step(2.0)] * 4, "", "not json", "[]", "7", "null", json.dumps({"event": "checkpoint", "duration_s": 50.0}),
        step("2.0"), step(True), step(None), step(-1.0), step(0), step(1e9), '{"event": "step", "duration_s": NaN}',
        '{"event": "step", "duration_s": Infinity}', '{"event": "step"}', step(2.0), '{"event": "step", "durat',
    ]  # fmt: skip
    folder, _ = run(lines)
    assert list(fieldwork._step_durations(folder)) == [2.0] * 5
    assert calibrate_run(folder).measurements == 1


def test_a_hostile_line_is_skipped_too(run):
    folder, _ = run([*[step(2.0)] * 5, "[" * 200_000])
    assert calibrate_run(folder).measurements == 1


def test_a_folder_named_like_a_log_is_a_mistake(run):
    folder, _ = run([])
    (folder / "events-0.jsonl").unlink()
    (folder / "events-0.jsonl").mkdir()
    assert refused(calibrate_run, folder)


def test_a_plan_that_is_no_text_is_a_mistake(run):
    folder, _ = run([step(1.0)] * 5)
    (folder / "plan.json").write_bytes(b"\xff\xfe")
    assert refused(calibrate_run, folder).startswith(f"{folder / 'plan.json'}:1: byte 0xff is not UTF-8\n")


def test_a_run_far_off_writes_factors_that_plan_takes(run, tmp_path, make_job):
    slow = 50 * phalanx.plan(make_job("gpt2", "8xH100:1", sequence=1024, batch=64)).prediction.step_s
    folder, _ = run([step(slow)] * 5, preset="gpt2", cluster="8xH100:1", sequence=1024, batch=64)
    report = calibrate_run(folder)
    write_calibration(tmp_path / "c.json", report)
    taken = read_calibration(tmp_path / "c.json").scalars
    assert taken == asdict(report.scalars)
    assert max(taken.values()) > 1.5  # it did move, within what plan accepts


def test_bytes_that_are_no_text_do_not_stop_it(run):
    folder, _ = run([])
    (folder / "events-0.jsonl").write_bytes(b"\xff\xfe{\n" + "\n".join([step(2.0)] * 5).encode())
    assert list(fieldwork._step_durations(folder)) == [2.0] * 5


def test_only_the_first_rank_counts(run):
    folder, _ = run([step(2.0)] * 5)
    (folder / "events-1.jsonl").write_text("\n".join([step(50.0)] * 50))
    assert list(fieldwork._step_durations(folder)) == [2.0] * 5


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_steps(run, count):
    folder, _ = run([step(1.0)] * count)
    assert refused(calibrate_run, folder) == (
        f"{folder}: has {plural(count, 'measured step')}, and calibration needs 3 after warm-up\n"
        '  let it run longer; steps are lines {"event": "step", "duration_s": 1.25} of events*.jsonl'
    )


def test_three_steps_are_enough(run):
    folder, _ = run([step(1.0)] * 3)
    assert calibrate_run(folder).measurements == 1


def test_a_folder_without_events(run):
    folder, _ = run([])
    (folder / "events-0.jsonl").unlink()
    assert "has 0 measured steps" in refused(calibrate_run, folder)


def test_a_folder_without_a_plan(tmp_path):
    assert refused(calibrate_run, tmp_path) == (
        f"{tmp_path}: has no plan.json\n  name a run folder, or a CSV table of measured steps"
    )


def test_a_damaged_plan_is_named(run):
    folder, _ = run([step(1.0)] * 5)
    (folder / "plan.json").write_text('{"half')
    assert refused(calibrate_run, folder).startswith(f"{folder / 'plan.json'}: ")


def test_an_endless_log_is_refused(run, monkeypatch):
    folder, _ = run([step(1.0)] * 5)
    monkeypatch.setattr(fieldwork, "LARGEST_EVENTS_BYTES", 10)
    told = f"{folder / 'events-0.jsonl'}: is larger than 10 bytes\n  name a shorter run"
    assert refused(calibrate_run, folder) == told


def test_what_is_written_can_be_read_back(table, tmp_path):
    report = calibrate_table(table(slowed(1.3)))
    write_calibration(tmp_path / "mine.json", report)
    assert read_calibration(tmp_path / "mine.json").scalars == asdict(report.scalars)


REPORT = CalibrationReport(
    version=1, source="mine.csv", measurements=1, skipped=0, median_error_before=0.2, median_error_after=0.031,
    scalars=Calibration(compute=1.25, memory=0.9, host=1.0, inner_traffic=2.0, outer_traffic=1.5),
)  # fmt: skip


def test_an_unwritable_place(tmp_path):
    with pytest.raises(SystemFailure) as caught:
        write_calibration(tmp_path / "no" / "mine.json", REPORT)
    assert "cannot be written: No such file or directory\n  name a writable file" in str(caught.value)


def test_the_page():
    assert (
        calibration_text(REPORT)
        == """\
1 measurement from mine.csv

factor         value  applies to
compute        1.250  matrix products and attention
memory         0.900  memory-bound kernels and the optimizer
host           1.000  launches, data, logging
inner_traffic  2.000  tensor, context, expert and pipeline traffic
outer_traffic  1.500  gradients and sharded parameters

median error 20.0% before, 3.1% after
fewer than 3 measurements: the factors are uncertain; measure three to five runs"""
    )
    assert set(fieldwork.MEANING) == set(GROUPS)


def test_the_page_warns_of_rows_left_out_and_of_measurements_that_disagree():
    page = calibration_text(replace(REPORT, measurements=4, skipped=2, median_error_after=0.3))
    assert page.endswith(
        "median error 20.0% before, 30.0% after\n"
        "2 measured rows left out, not predictable; phalanx backtest says why\n"
        "warning: these measurements disagree with each other more than with the prediction; do not use it"
    )


def test_finite_whatever_is_measured(table):
    """A step measured in milliseconds, or a thousand times too long, gives factors a plan can still be made with."""
    for factor in (1e-3, 1e3):
        report = calibrate_table(table(slowed(factor)))
        assert np.isfinite([getattr(report.scalars, name) for name in GROUPS]).all()
