"""Every address of the API, asked over a real socket."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard import Dashboard, dashboard
from synthetic import write_run

from phalanx.rules.live_check import LiveCheck

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    root = tmp_path_factory.mktemp("runs")
    alpha = write_run(root, name="alpha", ranks=8, steps=120, straggler=5)
    alpha.set_launch(**{**alpha.launch(), "earlier": [alpha.launch()["started"] - 60.0]})
    write_run(root, name="beta", ranks=4, steps=60, seed=3, finished=False, incidents=0)
    with dashboard(root) as found:
        yield found
        assert found.complaints == []


def test_the_list_holds_a_row_per_run(page: Dashboard) -> None:
    _until(lambda: page.json("/api/runs")["settled"], 60)
    rows = {row["name"]: row for row in page.json("/api/runs")["runs"]}
    assert set(rows) == {"alpha", "beta"}
    alpha, beta = rows["alpha"], rows["beta"]
    assert (alpha["state"], alpha["live"], alpha["step"], alpha["steps"]) == ("done", False, 120, 120)
    assert (beta["state"], beta["live"], beta["step"], beta["steps"]) == ("running", True, 60, 120)
    assert (alpha["incidents"], beta["incidents"], alpha["damage"]) == (1, 0, 0)
    assert alpha["world"] == 8
    assert alpha["started"] == page.json("/api/runs/alpha")["launched"] - 60.0, "not when it was last resumed"
    assert 0.5 < alpha["effective"] < 1
    assert alpha["usd"] > 0
    assert 0.4 < alpha["mfu"] < 0.6
    whole = page.json("/api/runs/alpha")["summary"]
    assert [alpha[name] for name in ("tokens_per_s", "mfu")] == [
        whole[name]["measured"] for name in ("tokens_per_s", "mfu")
    ], "of a run that is over, the list says what its page says"
    assert beta["tokens_per_s"] == page.json("/api/runs/beta")["progress"]["tokens_per_s"]
    assert alpha["model"] == "llama-3-8b"


def test_a_run_with_its_summary(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha")
    assert found["damage"] == []
    assert found["summary"]["run"] == "alpha"
    assert found["summary"]["step_s"]["error"] == pytest.approx(
        found["summary"]["step_s"]["measured"] / found["summary"]["step_s"]["predicted"] - 1
    )
    assert {"name": "duration_s", "unit": "s"} in found["names"]
    assert not found["live"]
    assert page.json("/api/runs/beta")["live"]


def test_curves_are_as_long_as_asked(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/curves?names=loss,mfu,absent&points=10&first=20&last=99")
    assert list(found["curves"]) == ["loss", "mfu"]
    assert found["missing"] == ["absent"]
    loss = found["curves"]["loss"]
    assert loss["unit"] == "nats/token"
    assert len(loss["step"]) == len(loss["t"]) == len(loss["low"]) == len(loss["mean"]) <= 10
    assert loss["step"][0] >= 20
    assert loss["step"][-1] <= 99
    assert all(low <= mean <= high for low, mean, high in zip(loss["low"], loss["mean"], loss["high"], strict=True))
    assert found["tokens_per_step"] == 64 * 4096
    assert (found["first_step"], found["last_step"]) == (0, 119)


def test_marks_lie_on_both_axes(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/marks")
    incident = found["incidents"][0]
    assert "killed by signal 9" in incident["text"]
    assert incident["recovery_s"] > 0
    assert incident["lost_steps"] == 3
    assert [one["step"] for one in found["checkpoints"]] == [50, 100, 120]
    assert found["checkpoints"][0]["text"].startswith("checkpoint saved (14.0 GB of rank 0")
    assert found["checkpoints"][0]["blocked_s"] > 0
    assert found["evaluations"][0]["text"].startswith("held-out loss ")
    assert len(found["epochs"]) == 2
    assert [one["step"] for one in found["epochs"]] == [0, incident["restored_step"]]
    assert all(one["t"] > 0 for kind in ("incidents", "checkpoints", "evaluations", "epochs") for one in found[kind])


def test_the_mesh_has_a_row_per_rank_and_names_the_slow_one(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/mesh?name=compute_s&columns=6")
    assert found["ranks"] == list(range(8))
    assert found["places"][5] == "data 2, tensor 1"
    assert found["hosts"][7] == "host-1"
    assert len(found["values"]) == 8
    assert all(len(row) == len(found["step"]) for row in found["values"])
    assert min(found["values"][5]) > 1.2 * max(found["values"][0])
    assert [one["rank"] for one in found["stragglers"]] == [5]
    assert page.json("/api/runs/alpha/mesh?name=nothing")["missing"]


def test_a_rank_knows_its_peers(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/ranks/5")
    assert found["peers"] == {"tensor": [4, 5], "data": [1, 3, 5, 7]}
    assert found["place"] == "data 2, tensor 1"
    assert {one["peer"] for one in found["latency"]} <= set(range(8))
    assert found["latency"][0]["p50_s"] > 0
    assert found["latest"]["step"] == 119
    assert found["monitor"]["utilization_source"] == "gpm-sm"


def test_a_step_beside_its_prediction(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/step?step=60&rank=1")
    assert found["available"] == [49, 99]
    assert found["step"] == 49
    assert found["rank"] == 1
    assert found["damage"] == []
    assert found["measured"]["seconds"] > 0
    assert {"kind", "name", "start_s", "duration_s", "bytes", "group"} == set(found["measured"]["spans"][0])
    assert found["predicted"]["spans"]
    assert {one["op"] for one in found["collectives"]} == {"all_gather", "reduce_scatter"}


def test_ledger_plan_cost_and_findings(page: Dashboard) -> None:
    ledger = page.json("/api/runs/alpha/ledger")
    assert ledger["closes"]
    assert ledger["labels"].keys() >= ledger["accounts"].keys()  # the page says what the report says
    assert ledger["labels"]["lost_work"] == "lost work"
    assert ledger["labels"]["init"] == "start-up"
    assert sum(ledger["accounts"].values()) == pytest.approx(ledger["wall_s"], rel=0.01)
    assert len(ledger["effective"]["t"]) == len(ledger["effective"]["cumulative"]) > 10
    plan = page.json("/api/runs/alpha/plan")
    assert "mbs" in plan["alternatives"][0]["name"]
    assert plan["reasons"][0].startswith("the best of ")
    assert plan["prediction"]["step_s"] > 0
    assert plan["damage"] == []
    cost = page.json("/api/runs/alpha/cost")
    assert cost["so_far"]["usd"] > 0
    assert set(cost["projected"]) == {"usd", "energy_j", "kgco2e"}
    assert cost["sources"]


def test_findings_are_verdicts_by_group(page: Dashboard) -> None:
    for _ in range(120):  # asked while the rules are still being worked out, it waits for a while and says so
        found = page.json("/api/runs/alpha/findings")
        if found["settled"]:
            break
    assert (found["available"], found["settled"], found["so_far"], found["damage"]) == (True, True, False, [])
    listed = {one["rule"]: one for group in found["groups"] for one in group["findings"] if one["verdict"] == "fail"}
    slow = listed["TEL004"]
    assert slow["what"].startswith("rank 5 ")
    assert "score" in slow["formula"][0]
    assert slow["fix"]
    assert slow["impact"]["points"] > 0
    assert next(group["group"] for group in found["groups"]) == "TOP"
    assert all(one["group"] == group["group"] for group in found["groups"] for one in group["findings"])
    counts = page.json("/api/runs/alpha/verdicts")
    assert counts["counts"] == found["report"]["counts"]
    assert counts["counts"]["fail"] == len({one["rule"] for one in listed.values()})


def test_findings_name_no_place_outside_the_run(page: Dashboard) -> None:
    found = page.json("/api/runs/alpha/findings")
    assert str(Path.home()) not in json.dumps(found)
    assert not any(one["file"].startswith(("/", "..")) for group in found["groups"] for one in group["findings"])


def test_a_rule_in_its_own_words(page: Dashboard) -> None:
    found = page.json("/api/rules/TEL004")
    assert found["slug"] == "stragglers-named"
    assert all(found[key] for key in ("requirement", "why", "how", "bad", "good", "fix", "waive", "history"))
    assert {"name": "score", "value": 0.75}.items() <= found["limits"][0].items()
    assert page.get("/api/rules/TEL999").status == 404
    assert page.get("/api/rules/%2e%2e%2fx").status == 404


def test_verdicts_follow_a_run_that_grows(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="going", ranks=2, steps=60, incidents=0, hosts=1, finished=False)
    with run.held(), dashboard(tmp_path) as page:
        before = page.json("/api/runs/going/findings")
        assert before["so_far"]
        broken = json.dumps({"v": 1, "event": "step", "t": 1.8e9, "rank": 0, "step": "sixty"})
        with run.events(0).open("a", encoding="utf-8") as file:
            file.write((broken + "\n") * 3)
        _until(lambda: _failing(page.json("/api/runs/going/findings")) != _failing(before), 30)


def _failing(found: dict[str, Any]) -> set[tuple[str, str]]:
    listed = [one for group in found["groups"] for one in group["findings"]]
    return {(one["rule"], one["what"]) for one in listed if one["verdict"] == "fail"}


def test_a_long_log_is_judged_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.rules.live_check.LiveCheck.look", _slowly(LiveCheck.look))
    write_run(tmp_path, name="long", ranks=4, steps=60)
    with dashboard(tmp_path) as page:
        found = page.json("/api/runs/long/findings")
        assert (found["available"], found["settled"], found["so_far"]) == (True, False, True)
        _until(lambda: page.json("/api/runs/long/findings")["settled"], 30)
        assert not page.json("/api/runs/long/findings")["so_far"]


def test_verdicts_that_take_long_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.web.check_views.PATIENCE_S", 0.0)
    write_run(tmp_path, name="slow", ranks=2, steps=20)
    with dashboard(tmp_path) as page:
        found = page.json("/api/runs/slow/verdicts")
        assert (found["available"], found["settled"], found["damage"]) == (False, False, [])
        _until(lambda: page.json("/api/runs/slow/verdicts")["settled"], 30)
        assert page.json("/api/runs/slow/findings")["available"]


def test_a_fault_of_ours_is_told_and_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.rules.live_check.LiveCheck.look", lambda check: {}["fault"])
    write_run(tmp_path, name="odd", ranks=2, steps=20)
    with dashboard(tmp_path) as page:
        found = page.json("/api/runs/odd/findings")
    assert (found["available"], found["settled"], found["groups"]) == (False, True, [])
    assert [(one["where"], one["what"]) for one in found["damage"]] == [("check", "cannot be read (KeyError)")]


def _slowly(look: Any) -> Any:
    return lambda check: look(check, budget_bytes=20_000)


def test_findings_are_the_plans_warnings_and_who_was_shut_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="warned", steps=20)
    plan = run.plan() | {"warnings": ["job.toml:3: tensor = 2 costs 9%\n  use 1", 7]}
    run.plan_json.write_text(json.dumps(plan), encoding="utf-8")
    with run.supervisor.open("a", encoding="utf-8") as file:
        event = {
            "v": 1,
            "event": "quarantine",
            "t": 1.8e9,
            "rank": -1,
            "host": "b",
            "reason": "no disk\n  mend it",
        }
        file.write(json.dumps(event) + "\n")
    with dashboard(tmp_path) as page:
        found = page.json("/api/runs/warned/findings")
    assert (found["available"], found["damage"]) == (True, [])
    assert [(one["source"], one["what"], one["hints"]) for one in found["remarks"]] == [
        ("plan", "job.toml:3: tensor = 2 costs 9%", ["use 1"]),
        ("run", "b: no disk", ["mend it"]),
    ]


def test_runs_beside_each_other(page: Dashboard) -> None:
    found = page.json("/api/compare?runs=alpha,beta,gone&points=6")
    assert set(found["runs"]) == {"alpha", "beta"}
    assert found["damage"][0]["where"] == "gone"
    assert found["runs"]["alpha"]["tokens"][-1] == pytest.approx(120 * 64 * 4096, rel=0.02)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/nope", 404, "there is no run called 'nope' here"),
        ("/api/runs/nope/stream", 404, "there is no run called 'nope' here"),
        ("/api/runs/alpha/nothing", 404, "there is nothing at this address"),
        ("/api/runs/alpha/ranks/8", 404, "there is no rank 8: this run has 8"),
        ("/api/runs/alpha/ranks/x", 400, "rank = 'x' is not a whole number from 0 to"),
        ("/api/runs/alpha/ranks/-1", 400, "rank = '-1' is not a whole number from 0 to"),
        ("/api/runs/alpha/curves", 400, "names takes 1 to 40 names between commas, not 0"),
        ("/api/runs/alpha/curves?names=loss&points=0", 400, "points = '0' is not a whole number from 1 to 4,000"),
        ("/api/runs/alpha/curves?names=loss&points=1e9", 400, "points = '1e9' is not a whole number"),
        ("/api/runs/alpha/curves?names=loss&point=5", 400, "there is no parameter 'point'; there is names, rank"),
        ("/api/runs/alpha/mesh?columns=501", 400, "columns = '501' is not a whole number from 1 to 500"),
        ("/api/runs?x=1", 400, "there is no parameter 'x'; there is none"),
        ("/api/compare?runs=", 400, "runs takes 1 to 40 names"),
    ],
)
def test_wrong_questions_are_told_so(page: Dashboard, path: str, status: int, text: str) -> None:
    found = page.get(path)
    assert found.status == status
    assert found.headers["content-type"] == "application/json"
    assert found.json()["error"].startswith(text)


def test_head_has_the_headers_alone(page: Dashboard) -> None:
    assert page.get("/api/runs/alpha", method="HEAD").body == b""
    assert page.get("/api/runs/alpha/stream", method="HEAD").headers["content-type"].startswith("text/event-stream")


def test_the_page_is_served_and_cached_by_its_content(page: Dashboard) -> None:
    first = page.get("/")
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    again = page.get("/", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert page.get("/static/js/api.js").headers["content-type"].startswith("text/javascript")


def test_an_answer_follows_a_growing_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="grows", ranks=2, steps=40, finished=False, incidents=0)
    with dashboard(run.path) as page:  # a single run is a folder of one
        assert [row["name"] for row in page.json("/api/runs")["runs"]] == ["grows"]
        assert page.json("/api/runs/grows/curves?names=loss")["last_step"] == 39
        with run.events(0).open("a") as file:
            file.write(
                json.dumps({"v": 1, "event": "step", "t": 1794800000.0, "rank": 0, "step": 40, "loss": 1.0}) + "\n"
            )
        _until(lambda: page.json("/api/runs/grows/curves?names=loss")["last_step"] == 40)


def test_no_path_of_the_machine_leaves_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="told", ranks=2, steps=20)
    run.set_status("stopped", message=f"saved; resume with: phalanx train --resume {run.path}")
    with dashboard(tmp_path) as page:
        for path in ("", "/marks", "/plan", "/cost", "/ledger", "/mesh", "/step"):
            assert str(tmp_path).encode() not in page.get(f"/api/runs/told{path}").body
        assert page.json("/api/runs/told")["summary"]["message"].endswith("--resume told")


def _until(true: Any, seconds: float = 300.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.05)


def test_a_sweep_has_a_page_with_its_fit(tmp_path: Path) -> None:
    import shutil

    data = Path(__file__).parents[1] / "data" / "scaling" / "chinchilla_points_epoch.csv"
    (tmp_path / "sweep <one>").mkdir()
    shutil.copy(data, tmp_path / "sweep <one>" / "points.csv")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "points.csv").write_text("params,tokens,loss\n1e6,1e7,4.0\n")
    with dashboard(tmp_path) as found:
        listing = found.get("/scaling").body.decode()
        assert 'href="scaling/sweep%20%3Cone%3E">sweep &lt;one&gt;<' in listing
        while (page := found.get("/scaling/sweep%20%3Cone%3E")).status == 503:  # each waits a while for the fit
            assert "still being fitted" in page.body.decode()
        assert page.status == 200
        # Tables keep their lines on a narrow screen, sentences are wrapped.
        assert '<pre class="table">COMPUTE-OPTIMAL MODELS' in page.body.decode()
        assert '<pre class="sentences">DIAGNOSTICS' in page.body.decode()
        assert "<one>" not in page.body.decode()
        for name in ("isoflop", "residuals", "frontier"):
            picture = found.get(f"/scaling/sweep%20%3Cone%3E/{name}.svg")
            assert (picture.status, picture.headers["content-type"]) == (200, "image/svg+xml")
            assert picture.body.startswith(b"<svg")
            [ground] = re.findall(rb'height="100%" fill="var\((--\w+)', picture.body)
            assert picture.body.count(ground + b":") >= 2  # white or dark, as the reader's system is
        assert "vpnls needs at least 6" in found.get("/scaling/early").body.decode()
        assert found.get("/scaling/none").status == 404
        assert found.get("/scaling/%2e%2e/points.csv").status == 404
        assert found.complaints == []
