"""What a log says, line for line: of whole runs, of runs that grow, and of ranks that disagree."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import TOKENS, write_run

from phalanx.record.archive import history as history_module
from phalanx.record.events import EventWriter
from phalanx.record.provenance import job_digest, job_provenance
from phalanx.record.run import Run
from phalanx.rules.facts.log_facts import LogFacts
from phalanx.rules.log import agreement as agree
from phalanx.rules.log import stream as stream_module
from phalanx.rules.log.agreement import Digests
from phalanx.rules.log.stream import LogStream, read_log


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change every event of a file; None takes it out."""
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events if event is not None))


def at_step(number: int, **fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        return event | fields if event["event"] == "step" and event["step"] == number else event

    return change


def with_digests(run: Run, *, wrong: int | None = None) -> None:
    """A digest every ten steps; that of rank `wrong` at step 89 is another."""

    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["event"] != "step" or event["step"] % 10 != 9:
            return event
        tensor = event["rank"] % 2  # tensor ranks hold different halves
        return event | {
            "digest": f"{event['step']:031x}{2 if event['rank'] == wrong and event['step'] == 89 else tensor}"
        }

    for path in run.event_files():
        edit(path, change)


def test_a_good_run_in_numbers(tmp_path):
    found = read_log(write_run(tmp_path, ranks=4, steps=200, incidents=1))
    assert (found.state, found.is_over, found.world, found.ranks) == ("done", True, 4, (0, 1, 2, 3))
    steps = found.steps
    assert (steps.first, steps.last, steps.count, steps.again) == (0, 199, 200, 3)
    assert steps.tokens == {TOKENS: 203}
    assert steps.duration_s.count == 203 - 2 * 5
    assert steps.duration_s.p50 == pytest.approx(6.65, rel=0.02)
    assert abs(steps.drift) < 0.01
    assert steps.tokens_per_s == pytest.approx(TOKENS / 6.65, rel=0.01)
    assert steps.data_share < 0.003
    assert (steps.skipped, steps.not_finite, steps.skips_differ) == (0, 0, None)
    assert 1.0 < steps.worst_jump < 1.5
    assert found.noise.gap_steps == 1.0
    assert found.noise.has_parts
    assert found.noise.error < 1e-9
    assert found.monitor.ranks == 4
    assert found.monitor.held_bytes == 62 * 2**30  # what the samples tell; the peak is the steps'
    assert found.monitor.memory_peak_bytes == pytest.approx(61 * 2**30, rel=0.01)
    assert found.monitor.utilization_sources == ("gpm-sm",)
    assert found.monitor.gap_s == pytest.approx(10.0, rel=0.02)
    assert found.monitor.energy_j == pytest.approx(found.energy_j, rel=1e-6)
    assert found.peers.gap_s == pytest.approx(30.0, rel=0.02)
    assert found.peers.lost_share == 0.0
    saved = found.checkpoints
    assert (saved.stages, saved.commits, saved.kept, saved.restores) == (5, 4, 3, 1)
    assert (saved.commits_without_stage, saved.overlapping, saved.restored_uncommitted) == (0, 0, 0)
    assert saved.bytes == pytest.approx(112e9, rel=1e-6)
    assert saved.blocked_s.p50 == pytest.approx(1.6, rel=0.02)
    assert (found.memberships, found.preflights, found.refused_hosts) == (2, 2, 0)
    assert len(found.incidents) == 1
    assert found.recovery_s.count == 1
    assert found.most_in_a_row == 1
    assert 0.0 < found.detect_s.p95 < 5.0
    assert found.ledger.closes
    assert found.effective == pytest.approx(found.ledger.effective)
    assert found.straggler_scores == 4
    assert found.imbalance == pytest.approx(1.0, abs=0.01)
    grammar = found.grammar
    assert (grammar.unreadable, grammar.invalid, grammar.unknown_kinds, grammar.out_of_order) == (0, 0, {}, 0)
    assert (grammar.missing, grammar.repeated, grammar.unclosed, grammar.ranks_missing) == ((), (), 0, ())
    assert grammar.skew_s == 0.0
    assert grammar.secrets == 0


def test_a_run_that_grows_is_read_on_and_says_the_same_as_read_whole(tmp_path):
    whole = write_run(tmp_path, name="whole", ranks=2, steps=120, incidents=1)
    grown = Run(path=tmp_path / "grown" / "whole")
    shutil.copytree(whole.path, grown.path)
    files = [*grown.event_files(), grown.supervisor]
    texts = {path: path.read_bytes() for path in files}
    for path in files:
        path.write_bytes(b"")
    stream = LogStream(grown)
    for share in (0.1, 0.101, 0.37, 0.8, 1.0):  # within lines, too
        for path in files:
            path.write_bytes(texts[path][: int(share * len(texts[path]))])
        assert stream.refresh()
        stream.facts()
    assert not stream.refresh()
    found, wanted = stream.facts(), read_log(whole)
    assert _same(found) == _same(wanted)


def _same(found: LogFacts) -> Any:
    """Without what names the folder, and sums as they are whatever their order."""
    steps = replace(found.steps, tokens_spot=None, worst_jump_spot=None, worst_loss_jump_spot=None)
    saved = replace(found.checkpoints, free_bytes=None)
    return _rounded(asdict(replace(found, folder="", steps=steps, checkpoints=saved)))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def test_a_budget_stops_early_and_says_what_is_left(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=100)
    stream = LogStream(run)
    total = run.event_bytes() + run.supervisor.stat().st_size
    stream.refresh(10_000)
    first = stream.facts()
    assert 0 < stream.bytes_read < total
    assert first.bytes_left == total - stream.bytes_read
    while stream.refresh(40_000):
        pass
    assert stream.facts().bytes_left == 0
    assert _same(stream.facts()) == _same(read_log(run))


def test_the_folder_is_listed_no_more_often_for_more_ranks(tmp_path, monkeypatch):
    listed = []
    for ranks in (2, 16):
        run = write_run(tmp_path, name=f"of{ranks}", ranks=ranks, steps=5, incidents=0)
        stream = LogStream(run)
        list_folder, count = os.listdir, []
        monkeypatch.setattr(os, "listdir", lambda path, known=list_folder, seen=count: seen.append(path) or known(path))
        stream.refresh(2**30, progress=lambda done, total: None)
        assert stream.bytes_left == 0
        monkeypatch.setattr(os, "listdir", list_folder)
        assert stream.bytes_read == sum(path.stat().st_size for path in [*run.event_files(), run.supervisor])
        listed.append(len(count))
    assert listed[0] == listed[1]


def test_closed_parts_are_read_in_order(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    lines = run.events(0).read_text().splitlines()
    run.events(0).unlink()
    writer = EventWriter(run.events(0), rank=0, rotate_bytes=10_000, clock=lambda: 0.0)
    for line in lines:
        event = json.loads(line)
        writer._clock = lambda t=event["t"]: t
        writer.write(event["event"], **{name: event[name] for name in event if name not in ("v", "event", "t", "rank")})
    writer.close()
    assert len(list(run.path.glob("events-00000-*.jsonl"))) > 2
    found = read_log(run)
    assert found.steps.count == 60
    assert found.grammar.out_of_order == 0
    assert found.bytes_left == 0


def test_progress_is_told(tmp_path):
    run, told = write_run(tmp_path, ranks=2, steps=40), []
    read_log(run, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0


# ---- ranks that disagree ---------------------------------------------------------------------------------------------


def test_digests_are_compared_among_ranks_that_hold_the_same(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=120, incidents=0)
    _zero(run, 0)
    with_digests(run)
    found = read_log(run).digests
    assert (found.compared, found.every_steps, found.differing, found.stale) == (12, 10, 0, 0)


def test_a_digest_that_differs_is_found(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=120, incidents=0)
    _zero(run, 0)
    with_digests(run, wrong=3)
    found = read_log(run).digests
    assert found.differing == 1
    assert found.differing_spot.file.endswith("events-00003.jsonl")
    line = run.events(3).read_text().splitlines()[found.differing_spot.line - 1]
    assert json.loads(line)["step"] == 89


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_zero_are_no_copies(tmp_path, stage):
    run = write_run(tmp_path, ranks=4, steps=120, incidents=0)
    _zero(run, stage)
    with_digests(run, wrong=3)
    found = read_log(run).digests
    assert (found.compared, found.differing, found.alone) == (0, 0, 48)


def test_shards_that_two_groups_hold_are_copies(tmp_path):
    """ZeRO within half of the data ranks: of 2 tensor x 4 data ranks in groups of 2, each shard is there twice."""
    run = write_run(tmp_path, ranks=8, steps=40, incidents=0)
    _layout(run, zero=3, shard=2)

    def digest(event):
        place = (event["rank"] % 2, event["rank"] // 2 % 2)
        return event | ({"digest": f"{place}"} if event["event"] == "step" and event["step"] % 10 == 9 else {})

    for path in run.event_files():
        edit(path, digest)
    found = read_log(run).digests
    assert (found.compared, found.differing, found.alone) == (4, 0, 0)
    edit(run.events(7), at_step(19, digest="another"))
    edit(run.events(6), at_step(19, digest="another"))  # of the same step
    found = read_log(run).digests
    assert (found.compared, found.differing) == (4, 1)


def test_nothing_is_compared_where_nobody_says_who_holds_what(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=120, incidents=0)
    edit(run.supervisor, lambda event: {name: event[name] for name in event if name != "layout"})
    run.plan_json.unlink()
    with_digests(run, wrong=3)
    found = read_log(run).digests
    assert (found.compared, found.differing, found.alone) == (0, 0, 0)


def test_a_step_that_one_rank_alone_digested_is_not_compared(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=120, incidents=0)
    _zero(run, 0)
    with_digests(run)
    for rank in (1, 2, 3):
        edit(run.events(rank), lambda event: event | ({"digest": None} if event.get("step", 0) < 100 else {}))
    assert read_log(run).digests.compared == 2


def test_tensor_ranks_alone_hold_no_copies(tmp_path):
    run = write_run(tmp_path, ranks=2, steps=40, incidents=0)
    _zero(run, 0)
    with_digests(run)
    found = read_log(run).digests
    assert (found.compared, found.alone) == (0, 8)


def test_a_step_that_a_rank_does_again_is_not_compared_with_itself(tmp_path):
    """Where nobody numbers the memberships, as under torchrun, what was done again has the same name."""
    run = write_run(tmp_path, ranks=4, steps=60, incidents=1)
    plan = run.plan()
    run.plan_json.write_text(json.dumps(plan | {"layout": plan["layout"] | {"zero": 0}}))

    def told(event):
        event.pop("epoch", None)
        return event | ({"digest": f"{event['t']}"} if event["event"] == "step" else {})

    edit(run.events(0), told)
    found = read_log(run)
    assert found.steps.again == 3
    assert (found.digests.compared, found.digests.differing, found.digests.alone) == (0, 0, 0)


def test_few_digests_are_remembered_and_none_is_counted_that_was_not_compared(tmp_path, monkeypatch):
    run = write_run(tmp_path, ranks=4, steps=400, incidents=0)
    _zero(run, 0)
    for path in run.event_files():
        edit(path, lambda event: event | ({"digest": f"{event['rank'] % 2}"} if event["event"] == "step" else {}))
    monkeypatch.setattr(agree, "MOST_HELD", 64)
    kept = Digests._add_digest
    most = []

    def watched(self, *args):
        kept(self, *args)
        most.append(sum(map(len, self._held.values())))

    monkeypatch.setattr(Digests, "_add_digest", watched)
    found = read_log(run).digests
    assert max(most) <= 64
    assert 10 <= found.compared <= 32
    assert found.differing == 0


def _zero(run: Run, stage: int) -> None:
    _layout(run, zero=stage)


def _layout(run: Run, **changes: int) -> None:
    edit(
        run.supervisor,
        lambda event: event | ({"layout": event["layout"] | changes} if "layout" in event else {}),
    )


def test_a_rank_that_speaks_from_an_older_formation_is_stale(tmp_path):
    run = write_run(tmp_path, ranks=2, steps=60, incidents=1)
    edit(run.events(1), at_step(55, epoch=1))
    found = read_log(run).digests
    assert found.stale == 1
    assert found.stale_spot.file.endswith("events-00001.jsonl")


def test_a_rank_that_was_shut_out_and_goes_on_is_stale(tmp_path):
    """It never told of the newer membership itself; one step may come late, the one it was in."""
    run = write_run(tmp_path, ranks=2, steps=60, incidents=1)
    whole = run.events(1).read_text()
    began_s = next(
        json.loads(line)["t"] for line in whole.splitlines() if '"event":"ready"' in line and '"epoch":2' in line
    )

    def go_on(count):
        old = whole[: whole.index('"event":"ready"', whole.index('"event":"ready"') + 1)].rsplit("\n", 1)[0] + "\n"
        last = [json.loads(line) for line in old.splitlines() if '"event":"step"' in line][-1]
        more = [last | {"t": began_s + 30 * (1 + n), "step": last["step"] + 1 + n} for n in range(count)]
        run.events(1).write_text(old + "".join(json.dumps(event) + "\n" for event in more))

    go_on(3)
    found = read_log(run).digests
    assert found.stale == 2
    assert found.stale_spot.file.endswith("events-00001.jsonl")
    go_on(1)
    assert read_log(run).digests is None


def test_a_step_that_one_rank_skipped_and_another_did_not(tmp_path):
    run = write_run(tmp_path, ranks=3, hosts=1, steps=60, incidents=0)
    for rank in range(3):
        edit(run.events(rank), at_step(20, skipped=True, loss=None))
    found = read_log(run).steps
    assert (found.skipped, found.skipped_in_a_row, found.not_finite, found.skips_differ) == (1, 1, 0, None)
    edit(run.events(2), at_step(20, skipped=False, loss=3.0))
    found = read_log(run).steps
    assert found.skips_differ is not None
    assert found.skips_differ.file.endswith("events-00000.jsonl")


def test_a_step_that_is_not_finite_and_was_not_skipped(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    edit(run.events(0), at_step(30, loss=None))
    found = read_log(run).steps
    assert found.not_finite == 1
    assert json.loads(run.events(0).read_text().splitlines()[found.not_finite_spot.line - 1])["step"] == 30


def test_a_step_that_moved_nothing(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    edit(run.events(0), at_step(30, grad_norm=0.0))
    edit(run.events(0), at_step(31, grad_norm=0.0, skipped=True))
    found = read_log(run).steps
    assert found.zero_norm == 1
    assert json.loads(run.events(0).read_text().splitlines()[found.zero_norm_spot.line - 1])["step"] == 30


def test_the_worst_jump_is_named(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=80, incidents=0)
    edit(run.events(0), at_step(50, grad_norm=9.0))
    edit(run.events(0), at_step(51, grad_norm=90.0, skipped=True))
    found = read_log(run).steps
    assert 8.0 < found.worst_jump < 10.0
    assert found.worst_loss_jump < 2.0
    assert json.loads(run.events(0).read_text().splitlines()[found.worst_jump_spot.line - 1])["step"] == 50


def test_clocks_that_are_apart(tmp_path):
    run = write_run(tmp_path, ranks=3, hosts=1, steps=60, incidents=0)
    edit(run.events(2), lambda event: event | {"t": event["t"] + 4.0})
    assert read_log(run).grammar.skew_s == pytest.approx(4.0, abs=0.01)


def test_a_noise_scale_that_its_parts_do_not_give(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    edit(run.events(0), at_step(40, noise_scale=1.0))
    assert read_log(run).noise.error > 0.5


def test_the_quotient_of_a_single_step_is_not_the_noise_scale(tmp_path):
    """It is biased, and TEL003 says so."""
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    assert read_log(run).noise.error < 1e-9

    def alone(event):
        is_told = event.get("noise_scale") is not None
        return event | ({"noise_scale": event["noise_trace"] / event["grad_squared"]} if is_told else {})

    edit(run.events(0), alone)
    assert read_log(run).noise.error > 0.05


def test_the_noise_grew_since_a_tenth_of_the_run(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=206, incidents=0)
    edit(
        run.events(0),
        lambda event: event | ({"noise_scale": 1.0 + event["step"] - 6} if event.get("noise_scale") else {}),
    )
    found = read_log(run).noise
    assert (found.count, found.last) == (200, 200.0)
    assert found.growth == pytest.approx(200 / 21)


# ---- how often ranks tell --------------------------------------------------------------------------------------------


def test_a_rank_that_falls_silent_and_one_that_is_slow_are_seen_among_many(tmp_path):
    run = write_run(tmp_path, ranks=16, steps=60, incidents=0)
    good = read_log(run)
    assert good.monitor.gap_s == pytest.approx(10.0, rel=0.02)
    last_s = [json.loads(line)["t"] for line in run.events(5).read_text().splitlines() if '"step"' in line][-1]
    first_s = []

    def silent(event):
        if event["event"] != "monitor":
            return event
        first_s.append(event["t"])
        return event if len(first_s) == 1 else None

    edit(run.events(5), silent)
    found = read_log(run).monitor
    assert found.ranks == 16
    assert found.gap_s == pytest.approx(last_s - first_s[0], rel=0.05)


def test_a_rank_that_samples_six_times_too_slowly_is_seen_among_many(tmp_path):
    run, seen = write_run(tmp_path, ranks=16, steps=60, incidents=0), []

    def slow(event):
        seen.append(event["event"] == "monitor")
        return None if seen[-1] and sum(seen) % 6 else event

    edit(run.events(5), slow)
    assert read_log(run).monitor.gap_s == pytest.approx(60.0, rel=0.02)


def test_a_rank_that_is_silent_at_first_is_seen(tmp_path):
    run, seen = write_run(tmp_path, ranks=2, hosts=1, steps=60, incidents=0), []

    def silent(event):
        seen.append(event["event"] == "monitor")
        return None if seen[-1] and sum(seen) <= 20 else event

    edit(run.events(1), silent)
    assert 170.0 < read_log(run).monitor.gap_s < 210.0


def test_one_late_sample_of_many_is_no_gap(tmp_path):
    """21 s in two hours; what counts is how much of the time a rank was silent."""
    run, seen = write_run(tmp_path, ranks=2, hosts=1, steps=800, incidents=0), []

    def late(event):
        seen.append(event["event"] == "monitor")
        return None if seen[-1] and sum(seen) == 50 else event

    edit(run.events(1), late)
    assert read_log(run).monitor.gap_s == pytest.approx(10.0, rel=0.02)


def test_silence_between_formations_is_no_gap(tmp_path):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=60, incidents=1)
    began_s = [json.loads(line)["t"] for line in run.events(0).read_text().splitlines() if '"event":"ready"' in line][1]
    for path in run.event_files():
        edit(path, lambda event: event | ({"t": event["t"] + 500.0} if event["t"] >= began_s else {}))
    assert read_log(run).monitor.gap_s < 15.0


def test_a_batch_of_another_size_is_named(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    edit(run.events(0), at_step(30, tokens=7))
    found = read_log(run).steps
    assert found.tokens == {TOKENS: 59, 7: 1}
    assert json.loads(run.events(0).read_text().splitlines()[found.tokens_spot.line - 1])["step"] == 30


# ---- what the supervisor and the folder say --------------------------------------------------------------------------


def test_a_host_that_nobody_looked_at_is_no_preflight(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=60, incidents=1)
    edit(run.supervisor, lambda event: None if event["event"] == "host" and event["host"] == "host-1" else event)
    assert (read_log(run).memberships, read_log(run).preflights) == (2, 0)


def test_a_host_that_joined_without_saying_what_it_found_was_not_looked_at(tmp_path):
    run = write_run(tmp_path, ranks=4, steps=60, incidents=1)
    edit(
        run.supervisor,
        lambda event: {name: event[name] for name in event if name != "problems" or event["host"] != "host-1"},
    )
    assert (read_log(run).memberships, read_log(run).preflights) == (2, 0)


def test_a_restore_of_what_was_never_committed(tmp_path):
    run = write_run(tmp_path, ranks=2, steps=120, incidents=1)
    edit(run.supervisor, lambda event: event | {"source": "disk"} if event["event"] == "restore" else event)
    found = read_log(run).checkpoints  # step 57: a copy in memory, no checkpoint
    assert found.restored_uncommitted == 1
    assert found.restored_spot.file.endswith("supervisor.jsonl")


def test_a_commit_without_a_stage_and_a_stage_before_the_last_was_safe(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=160, incidents=0)

    def without(event):
        is_save = event["event"] == "checkpoint"
        return None if is_save and (event["step"], event["phase"]) in ((50, "stage"), (100, "commit")) else event

    edit(run.events(0), without)
    found = read_log(run).checkpoints
    assert (found.commits_without_stage, found.overlapping) == (1, 1)
    assert found.disorder_spot is not None


@pytest.mark.parametrize("reason", ["stop", "end", "reform"])
def test_a_save_that_was_not_due_says_nothing_of_the_interval(tmp_path, reason):
    """A Ctrl-C saves when it comes: that save is no interval, and what it took is told apart."""
    run = write_run(tmp_path, ranks=2, hosts=1, steps=160, incidents=0)

    def told(event):
        if event["event"] != "checkpoint":
            return event
        last = event["step"] == 160
        early_s = -100.0 if last and event["phase"] == "commit" else 0.0
        return event | {"t": event["t"] + early_s, "reason": reason if last else "interval"}

    for path in run.event_files():
        edit(path, told)
    found = read_log(run).checkpoints
    assert (found.stages, found.commits, found.interval_saves) == (4, 4, 3)
    assert found.interval_s.count == 2
    assert (found.blocked_s.count, found.final_blocked_s.count) == (6, 2)
    assert (found.persist_s.count, found.final_persist_s.count) == (6, 2)


def test_where_saves_give_no_reason_the_last_of_a_formation_is_not_counted(tmp_path):
    found = read_log(write_run(tmp_path, ranks=2, hosts=1, steps=160, incidents=0)).checkpoints
    assert (found.commits, found.interval_saves, found.interval_s.count) == (4, 3, 2)
    assert found.final_blocked_s is None


def test_a_stop_while_a_save_is_being_written_is_no_backlog(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=160, incidents=0)

    def told(event):
        if event["event"] != "checkpoint" or (event["step"], event["phase"]) == (100, "commit"):
            return None if event["event"] == "checkpoint" else event
        return event | {"reason": "stop" if event["step"] >= 150 else "interval"}

    edit(run.events(0), told)
    assert read_log(run).checkpoints.overlapping == 0


def test_a_checkpoint_folder_without_a_manifest_is_incomplete(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=120, incidents=0)
    (run.path / "checkpoints" / "step-00000050" / "manifest.json").unlink()
    found = read_log(run).checkpoints
    assert (found.kept, found.incomplete) == (2, 1)
    assert found.free_bytes > 0


@pytest.mark.parametrize(("ended", "given_up"), [(1, (100, 150)), (0, ())])
def test_a_roll_back_explains_missing_checkpoints_until_the_next_commit(tmp_path, ended, given_up):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=160, incidents=0)  # all is saved in generation 1
    with run.supervisor.open("a") as file:
        event = {"v": 1, "event": "rollback", "t": 1e9, "rank": -1, "epoch": ended, "step": 160, "target": 60}
        file.write(json.dumps(event | {"reason": "not finite", "set_aside": [100, 150]}) + "\n")
    found = read_log(run).checkpoints
    assert (found.given_up, found.rolled_back_to) == (given_up, 60 if given_up else None)


def test_provenance_and_addresses_are_read_from_the_launch(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    assert read_log(run).grammar.has_provenance is False
    known = {"versions": {"phalanx": "1"}, "job_digest": job_digest(run.plan()["job"]), "commit": "ab" * 20}
    run.set_launch(**run.launch() | {"provenance": known, "addresses": ["10.0.0.1"]})
    (run.path / "coordinator.json").write_text('{"address": ["0.0.0.0", 5], "go": {"store": ["127.0.0.1", 6]}}')
    found = read_log(run)
    assert found.grammar.has_provenance is True
    assert found.listens == ("0.0.0.0", "10.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("said", "is_known"),
    [
        ({"commit": ""}, False),
        ({"commit": "", "code": "sha256:1"}, True),
        ({"commit": "ab" * 20, "job_digest": ""}, False),
        ({"commit": "ab" * 20, "versions": {}}, False),
    ],
)
def test_what_ran_is_known_by_commit_or_by_the_digest_of_its_files(tmp_path, said, is_known):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    known = {"versions": {"phalanx": "1"}, "job_digest": "sha256:0"} | said
    run.set_launch(**run.launch() | {"provenance": known})
    assert read_log(run).grammar.has_provenance is is_known


def test_a_configuration_that_was_changed_after_the_launch(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    run.set_launch(**run.launch() | {"provenance": job_provenance(run.plan()["job"])})
    found = read_log(run).grammar
    assert (found.has_provenance, found.job_changed) == (True, False)
    job = json.loads((run.path / "job.json").read_text())
    (run.path / "job.json").write_text(json.dumps(job | {"name": "another"}))
    assert read_log(run).grammar.job_changed


def test_the_end_of_a_run_that_goes_on_is_not_missing(tmp_path):
    going = write_run(tmp_path, name="going", ranks=2, steps=40, finished=False)
    going.set_status("running")
    found = read_log(going)
    assert not found.is_over
    assert found.grammar.missing == ()
    done = write_run(tmp_path, name="done", ranks=2, steps=40)
    edit(done.events(0), lambda event: None if event["event"] == "run_end" else event)
    edit(done.supervisor, lambda event: None if event["event"] in ("end", "epoch") else event)
    assert set(read_log(done).grammar.missing) == {"run_end", "end", "epoch"}


def test_what_telemetry_costs_is_a_share_of_the_steps(tmp_path):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=60, incidents=0)
    assert read_log(run).telemetry_share is None  # an older run does not say
    for path in run.event_files():
        edit(path, lambda event: event | ({"telemetry_s": 0.01 * event["duration_s"]} if "duration_s" in event else {}))
    assert read_log(run).telemetry_share == pytest.approx(0.01)


def test_a_run_that_is_just_starting_lacks_nothing_yet(tmp_path):
    run = write_run(tmp_path, ranks=3, hosts=1, steps=40, finished=False)
    run.set_status("launching")
    run.supervisor.write_text(run.supervisor.read_text().splitlines(keepends=True)[0])
    run.events(0).write_text(run.events(0).read_text().splitlines(keepends=True)[0])
    for rank in (1, 2):
        run.events(rank).unlink()
    found = read_log(run)
    assert not found.is_over
    assert (found.grammar.missing, found.grammar.ranks_missing, found.grammar.unreadable) == ((), (), 0)


def test_what_was_not_read_yet_is_not_missing(tmp_path):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=100)
    stream = LogStream(run)
    stream.refresh(30_000)
    found = stream.facts()
    assert found.bytes_left > 0
    assert found.grammar.missing == ()


def test_of_very_many_ranks_some_are_read_evenly_spread(tmp_path, monkeypatch):
    run = write_run(tmp_path, ranks=8, steps=60)
    everybody = LogStream(run)
    everybody.refresh()
    one_bytes = run.events(0).stat().st_size
    monkeypatch.setattr(stream_module, "MANY_RANKS", 4)
    monkeypatch.setattr(stream_module, "MANY_BYTES", int(4.5 * one_bytes))
    stream = LogStream(run)
    stream.refresh()
    assert sorted(stream._ranks) == [0, 2, 4, 6]
    assert stream.bytes_left == 0  # those that are not read are not waited for
    assert stream.facts().ranks == everybody.facts().ranks  # they are known all the same
    monkeypatch.setattr(stream_module, "MANY_BYTES", 1)
    least = LogStream(run)
    least.refresh()
    assert sorted(least._ranks) == [0, 4]


def test_meshes_of_very_many_ranks_show_some(tmp_path, monkeypatch):
    run = write_run(tmp_path, ranks=8, steps=60)
    monkeypatch.setattr(history_module, "MANY_RANKS", 4)
    monkeypatch.setattr(history_module, "SAMPLE_RANKS", 4)
    history = history_module.RunHistory.open(run)
    assert (history.is_sampled, history.mesh("loss").ranks) == (True, (0, 2, 4, 6))
    assert history.ranks == tuple(range(8))
