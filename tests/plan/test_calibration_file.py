import json
from dataclasses import replace

import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.plan.calibrate import GROUPS, Calibration, apply_calibration, read_calibration
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.plan.score import price_layouts
from phalanx.plan.search import search_layouts
from phalanx.plan.text import plan_text

SCALARS = {"compute": 1.2, "memory": 1.0, "host": 2.0, "inner_traffic": 1.1, "outer_traffic": 0.7}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"version": 1, "scalars": SCALARS, "measured": [1, 2, 3]}))
    return path


def test_what_calibrate_writes_is_read(file):
    note = read_calibration(file)
    assert note.file == str(file)
    assert note.scalars == SCALARS
    assert set(SCALARS) == set(GROUPS)


def test_a_calibrated_plan_is_the_calibrated_step(file, make_job, make_ask):
    plan = make_plan(make_job(cluster="8xH100:4", parallel__tensor=2), calibration=read_calibration(file))
    _, times, _ = price_layouts(make_ask(cluster="8xH100:4", parallel__tensor=2), [plan.layout])
    expected = apply_calibration(times, Calibration(**SCALARS))
    assert plan.prediction.step_s == pytest.approx(float(expected.step_s[0]))
    assert plan.prediction.step_s > float(times.step_s[0])
    shown = {use.axis: use.shown_s for use in plan.mapping}
    assert shown["tensor"] == pytest.approx(float(expected.tensor_s[0]))


def test_the_search_follows_the_calibration(make_ask):
    request = make_ask(cluster="8xH100:4")
    slow_network = replace(request, calibration=Calibration(outer_traffic=20.0))
    assert search_layouts(slow_network).fastest.layout != search_layouts(request).fastest.layout


def test_the_plan_says_so(file, make_job):
    plan = make_plan(make_job(), calibration=read_calibration(file))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.to_dict()["calibration"] == {"file": str(file), "scalars": SCALARS}
    page = " ".join(plan_text(plan).split())
    assert f"calibrated with {file}: compute ×1.2, memory ×1, host ×2, inner_traffic ×1.1, outer_traffic ×0.7" in page
    assert phalanx.plan(make_job()).calibration is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "mine.json: is not JSON: "),
        ("[]", "mine.json: is no calibration file: it has no object named scalars"),
        ('{"version": 1}', "mine.json: is no calibration file: it has no object named scalars"),
        ('{"version": 2, "scalars": {}}', "mine.json: version = 2 is not 1, the one this Phalanx reads"),
        ('{"scalars": {}}', "mine.json: version = None is not 1"),
        (
            '{"version": 1, "scalars": {"compute": 1}}',
            "mine.json: scalars lacks memory, host, inner_traffic, outer_traffic\n  write it again with phalanx",
        ),
        (json.dumps({"version": 1, "scalars": SCALARS | {"hots": 1.0}}), "did you mean host?"),
        (
            json.dumps({"version": 1, "scalars": SCALARS | {"host": "fast"}}),
            "mine.json: scalars.host: fast is not a number from 0.05 to 20\n  write it again with phalanx",
        ),
        (json.dumps({"version": 1, "scalars": SCALARS | {"host": True}}), "scalars.host: True is not a number"),
        (json.dumps({"version": 1, "scalars": SCALARS | {"host": 0}}), "scalars.host: 0 is not a number from"),
        (json.dumps({"version": 1, "scalars": SCALARS | {"host": float("nan")}}), "scalars.host: nan is not a number"),
        (json.dumps({"version": 1, "scalars": SCALARS | {"host": 10**400}}), "is not a number from 0.05 to 20"),
        ("\0", "holds a NUL byte"),
    ],
)
def test_a_bad_file_is_refused_with_a_cure(tmp_path, text, told):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_calibration(path)
    assert told in str(caught.value)


def test_a_missing_file_names_the_near_one(file):
    with pytest.raises(UserError) as caught:
        read_calibration(file.with_name("mien.json"))
    assert f"there is no such calibration file\n  did you mean {file}?" in str(caught.value)
