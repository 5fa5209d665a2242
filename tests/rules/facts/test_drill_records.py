"""Records of drills: found, verified, read with suspicion, and counted only where they prove something."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rules.kit import evidence

from phalanx.record.drill_record import NAME, drill_subject, key_path, sign_record, store_path
from phalanx.record.run import Run
from phalanx.rules.facts import drill_facts as drills
from phalanx.rules.facts.drill_facts import (
    MOST_RECORDS,
    DrillFacts,
    counted_records,
    find_drills,
    newest_record,
    why_none,
)
from phalanx.rules.run_rules import judge
from phalanx.train.drill.drill_report import MOST_STORED, drill_key, software_versions, store_record, write_record

FAULTS = ["kill:rank=0,step=12,point=save-commit", "hang:rank=1", "damage:step=9", "flip"]
JOB: dict[str, Any] = {
    "name": "first",
    "model": {"name": "small", "layers": 2, "module": ""},
    "data": {"tokens": 1000},
    "optim": {"name": "adamw", "lr": 1e-3},
    "precision": {"compute": "fp32"},
    "checkpoint": {"path": "checkpoints", "interval_s": 60.0, "keep": 3, "async": True, "memory_every": "auto"},
    "fault": {"recovery": "auto", "dead_after_s": 5.0, "digest_every": "auto", "restarts": 3},
}
LAYOUT = {"data": 2, "tensor": 1, "pipeline": 2, "schedule": "1f1b", "zero": 2, "offload": "none"}
SUBJECT = drill_subject(JOB, LAYOUT, base=Path())
BODY: dict[str, Any] = {
    "subject": SUBJECT,
    "faults": FAULTS,
    "profile": "cpu-gloo",
    "part": "recovery",
    "outcomes": [
        {"fault": FAULTS[0], "kind": "kill", "detected_s": 0.03, "recovered_s": 0.6},
        {"fault": FAULTS[1], "kind": "hang", "detected_s": 5.0, "recovered_s": 5.6},
        {"fault": FAULTS[2], "kind": "damage", "detected_s": None, "recovered_s": None},
        {"fault": FAULTS[3], "kind": "flip", "detected_s": 0.4, "recovered_s": 0.9},
    ],
    "verdicts": [
        {"name": "equal to a fault-free replay", "ok": True, "evidence": "40 steps"},
        {"name": "damaged files were refused", "ok": True, "evidence": "generation 2 refused step-00000009"},
    ],
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}


def write(folder: Path, environ: dict[str, str], *, made_s: float | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "events-00000.jsonl").write_text('{"event":"step"}\n')
    (folder / "launch.json").write_text('{"v":1,"world":4}')
    clock = time.time if made_s is None else lambda: made_s
    return write_record(Run(path=folder), {**BODY, **changes}, drill_key(key_path(environ)), clock=clock)


def test_what_a_record_proves(tmp_path: Path, environ: dict[str, str]) -> None:
    write(tmp_path / "runs" / "a", environ)
    [found] = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert (found.signed, found.current, found.clean, found.bitwise, found.wrong) == (True, True, True, True, ())
    assert found.fired == ("corrupt", "flip", "hang", "kill", "save-kill")
    assert found.save_points == ("commit",)
    assert found.detect_s == (0.03, 5.0)  # a flipped bit is found by a comparison, not by a heartbeat
    assert found.recovery_s == (0.6, 0.9, 5.6)
    assert (found.version, found.profile, found.part) == (software_versions()["phalanx"], "cpu-gloo", "recovery")
    assert found.world == 4


def test_a_record_of_other_code(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The version may be the same: it is for many commits."""
    write(tmp_path / "runs" / "a", environ)
    monkeypatch.setattr(drills, "our_code", lambda: "sha256:0")
    [found] = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert (found.signed, found.version, found.current) == (True, software_versions()["phalanx"], False)


def test_a_record_that_names_no_code_is_of_other_code(tmp_path: Path, environ: dict[str, str]) -> None:
    path = write(tmp_path / "runs" / "a", environ)
    body = json.loads(path.read_text())
    del body["code"], body["signature"]
    path.write_text(json.dumps(body | {"signature": sign_record(body, drill_key(key_path(environ)))}))
    [found] = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert (found.signed, found.current) == (True, False)


def test_the_newest_is_by_the_time_that_was_signed(tmp_path: Path, environ: dict[str, str]) -> None:
    """A copy changes the time of a file, and who writes a time without a signature may write any."""
    old = write(tmp_path / "runs" / "old", environ, made_s=1e9, part="old")
    new = write(tmp_path / "runs" / "new", environ, made_s=2e9, part="new")
    forged = write(tmp_path / "runs" / "forged", environ, made_s=1e9, part="forged")
    forged.write_text(forged.read_text().replace('"made_s": 1000000000.0', '"made_s": 3000000000.0'))
    os.utime(new, (1.0, 1.0))
    os.utime(old, (5e9, 5e9))
    found = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert [one.part for one in found] == ["new", "old", "forged"]


def test_one_file_that_cannot_be_read_hides_no_other(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / "runs" / name, environ, part=name).rename(tmp_path / "runs" / f"{name}.json")
    opened = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> Any:
        if str(path).endswith("b.json"):
            raise PermissionError
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert {one.part for one in find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)} == {"a", "c"}


def test_damage_that_nobody_met_is_no_proof(tmp_path: Path, environ: dict[str, str]) -> None:
    unread = [{"name": "damaged files were refused", "ok": True, "evidence": "no restore met one; 1 of 1 nobody read"}]
    write(tmp_path / "runs" / "a", environ, verdicts=unread)
    [found] = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert "corrupt" in found.faults
    assert "corrupt" not in found.fired
    assert not found.bitwise


def test_changed_evidence_and_changed_records_do_not_count(tmp_path: Path, environ: dict[str, str]) -> None:
    first, second = write(tmp_path / "runs" / "a", environ), write(tmp_path / "runs" / "b", environ)
    (first.parent / "events-00000.jsonl").write_text("")
    second.write_text(second.read_text().replace("cpu-gloo", "nvidia-h100"))
    found = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert {one.wrong for one in found} == {
        ("events-00000.jsonl has changed",),
        ("the signature is not ours: the record was changed, or another user wrote it",),
    }
    assert not any(one.signed for one in found)


def test_a_record_of_somebody_else(tmp_path: Path, environ: dict[str, str]) -> None:
    write(tmp_path / "runs" / "a", environ)
    stranger = {**environ, "XDG_CONFIG_HOME": str(tmp_path / "other")}
    [found] = find_drills([tmp_path / "runs"], environ=stranger, subject=SUBJECT)
    assert (found.signed, found.wrong) == (False, ("there is no key of this user to verify it with",))
    assert not (tmp_path / "other").exists(), "a check makes no key"


def test_the_store_outlives_the_run(tmp_path: Path, environ: dict[str, str]) -> None:
    path = write(tmp_path / "runs" / "a", environ)
    kept = store_record(path, store_path(environ))
    assert re.fullmatch(r"cpu-gloo-recovery-first-[0-9a-f]{12}\.json", kept.name)
    (path.parent / "events-00000.jsonl").unlink()
    path.unlink()
    [found] = find_drills([], environ=environ, subject=SUBJECT)
    assert (found.signed, found.clean, found.path) == (True, True, str(kept))
    kept.write_text(kept.read_text().replace('"ok": true', '"ok": false'))
    assert not find_drills([], environ=environ, subject=SUBJECT)[0].signed


def test_the_store_is_bounded_and_keeps_the_newest_of_a_part(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = store_path(environ)
    for number in range(MOST_STORED + 3):
        store_record(write(tmp_path / "runs" / str(number), environ, part=f"part-{number}"), folder)
    assert len(list(folder.iterdir())) == MOST_STORED
    store_record(write(tmp_path / "runs" / "again", environ, part="part-9", faults=["nan"]), folder)
    [kept] = folder.glob("cpu-gloo-part-9-*.json")
    assert json.loads(kept.read_text())["faults"] == ["nan"]


def test_a_store_name_leads_nowhere(tmp_path: Path, environ: dict[str, str]) -> None:
    kept = store_record(
        write(tmp_path / "runs" / "a", environ, profile="../../etc", part="x/../y"), store_path(environ)
    )
    assert kept.parent == store_path(environ)
    assert kept.name.startswith("-etc-x-y-first-")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"v":1}',
        '{"v":2,"files":{}}',
        '{"v":1,"files":{"../../etc/passwd":"x"},"faults":7,"outcomes":{"a":1},"verdicts":"x","versions":3}',
        '{"v":1,"files":{},"outcomes":[1,null,{"fault":null,"kind":[],"detected_s":"x","recovered_s":NaN}]}',
        '{"v":1,"files":{},"profile":"\x1b[2J","signature":[1],"verdicts":[{"name":7}],"named_right":"yes"}',
        "\x00\xff" * 50,
        '{"v":1,' * 5000,
    ],
)
def test_anything_may_lie_there(text: str, tmp_path: Path, environ: dict[str, str]) -> None:
    drill_key(key_path(environ))
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(text.encode("utf-8", "replace"))
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / NAME).mkdir()
    for one in find_drills(
        [tmp_path / "runs", tmp_path / "nowhere", tmp_path / "runs" / "a" / NAME], environ=environ, subject=SUBJECT
    ):
        assert not one.signed
        assert one.profile.isprintable()


def test_only_the_newest_are_read(tmp_path: Path, environ: dict[str, str]) -> None:
    for number in range(MOST_RECORDS + 2):
        write(tmp_path / "runs" / f"{number:03}", environ, part=str(number))
    found = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert len(found) == MOST_RECORDS
    assert found[0].part == str(MOST_RECORDS + 1)


def fact(**changes: Any) -> DrillFacts:
    values: dict[str, Any] = {"path": "x", "signed": True, "version": "1", "profile": "cpu-gloo", "faults": ("kill",)}
    return DrillFacts(**{**values, "fired": ("kill",), "clean": True, "bitwise": True, **changes})


def test_which_records_count() -> None:
    good, old = fact(), fact(current=False)
    assert counted_records(
        (old, good, fact(signed=False), fact(profile="tpu"), fact(other="x")), profile="cpu-gloo"
    ) == (good,)
    newer = fact(clean=False)
    assert newest_record((newer, good), profile="cpu-gloo", kind="kill") is newer
    assert newest_record((newer, good), profile="cpu-gloo", kind="nan") is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ((), ""),
        ((fact(),), ""),
        ((fact(signed=False, wrong=("it was changed",)),), "the record x does not count: it was changed"),
        ((fact(profile="tpu"),), "the newest record is of tpu, not of cpu-gloo"),
        ((fact(other="job a, not b"),), "the newest record is of another job (job a, not b)"),
        ((fact(current=False),), "the newest record is of other code than this Phalanx (it was 1)"),
    ],
)
def test_why_none_counts(facts: tuple[DrillFacts, ...], said: str) -> None:
    assert why_none(facts, profile="cpu-gloo") == said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("name", "second", "job first, not second"),
        ("model", {"name": "large", "layers": 2, "module": ""}, "model small, not large"),
        ("model", {"name": "small", "layers": 9, "module": ""}, "first with other settings of model, precision"),
        ("fault", {**JOB["fault"], "dead_after_s": 60.0}, "first with other settings"),
        ("optim", {"name": "muon"}, "first with other settings"),
        ("checkpoint", {**JOB["checkpoint"], "path": "s3://bucket/x"}, "first with other settings"),
        # What a suite sets itself, and what changes nothing about a recovery:
        ("data", {"tokens": 9}, ""),
        ("optim", {"name": "adamw", "lr": 9.0}, ""),
        ("checkpoint", {**JOB["checkpoint"], "interval_s": 0.05, "keep": 9}, ""),
        ("fault", {**JOB["fault"], "digest_every": 1, "restarts": 10}, ""),
    ],
)
def test_a_drill_counts_for_its_own_job_alone(
    key: str, value: Any, said: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Wherever its record lies: two projects of one user share the store, and often the folder of runs."""
    store_record(write(tmp_path / "runs" / "a", environ), store_path(environ))
    subject = drill_subject({**JOB, key: value}, LAYOUT, base=Path())
    found = find_drills([tmp_path / "runs"], environ=environ, subject=subject)
    assert len(found) == 2
    for one in found:
        assert (one.other[: len(said)], bool(one.other)) == (said, bool(said))
        assert bool(counted_records((one,), profile="cpu-gloo")) is not bool(said)


def test_a_drill_counts_for_layouts_that_split_alike(tmp_path: Path, environ: dict[str, str]) -> None:
    write(tmp_path / "runs" / "a", environ)
    more = drill_subject(JOB, {**LAYOUT, "data": 64}, base=Path())
    other = drill_subject(JOB, {**LAYOUT, "tensor": 8}, base=Path())
    [same] = find_drills([tmp_path / "runs"], environ=environ, subject=more)
    [elsewhere] = find_drills([tmp_path / "runs"], environ=environ, subject=other)
    assert same.other == ""
    said = "its layout splits pipeline 1f1b, data, ZeRO-2, this one tensor, pipeline 1f1b, data, ZeRO-2"
    assert elsewhere.other == said
    [unknown] = find_drills([tmp_path / "runs"], environ=environ, subject=None)
    assert unknown.other == "what is checked names no job and layout"


def test_a_drill_of_other_code_of_the_model_does_not_count(tmp_path: Path) -> None:
    job = {**JOB, "model": {"name": "own", "module": "net.py:build"}}
    (tmp_path / "net.py").write_text("one")
    before = drill_subject(job, LAYOUT, base=tmp_path)
    named = drill_subject({**job, "model": {"name": "own", "module": f"{tmp_path}/net.py:build"}}, LAYOUT, base=Path())
    assert named == before, "a run's job names the file by its whole path"
    (tmp_path / "net.py").write_text("two")
    assert drill_subject(job, LAYOUT, base=tmp_path) != before


def test_drills_of_others_hide_none_of_ours(tmp_path: Path, environ: dict[str, str]) -> None:
    write(tmp_path / "runs" / "ours", environ, made_s=1e9)
    for number in range(MOST_RECORDS + 2):
        stranger = drill_subject({**JOB, "name": f"other-{number}"}, LAYOUT, base=Path())
        write(tmp_path / "runs" / f"{number:03}", environ, subject=stranger)
    found = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert len(found) == MOST_RECORDS
    assert (found[0].other, found[0].statement) == (
        "",
        f"{tmp_path / 'runs' / 'ours' / NAME} (first, 4 ranks, 2001-09-09)",
    )


def test_what_was_not_judged_proves_nothing_and_breaks_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    late = {"fault": "mute:rank=1", "kind": "mute", "detected_s": None, "recovered_s": None, "judged": False}
    open_verdict = {"name": "every fault was noticed", "ok": False, "judged": False, "evidence": "too late"}
    write(
        tmp_path / "runs" / "a",
        environ,
        outcomes=[*BODY["outcomes"], late],
        verdicts=[*BODY["verdicts"], open_verdict],
    )
    [found] = find_drills([tmp_path / "runs"], environ=environ, subject=SUBJECT)
    assert "mute" not in found.fired
    assert found.clean
    assert found.wrong == ()


def test_records_that_do_not_count_are_not_told_as_evidence() -> None:
    base = evidence(drills=(fact(other="x"),))
    assert "D" not in judge((), base, edition="2026.1").evidence
    counted = evidence(drills=(fact(profile=base.profile.name),))
    assert "D" in judge((), counted, edition="2026.1").evidence
