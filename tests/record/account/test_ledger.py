"""Every second of a run in one account: records made by hand, with answers known beforehand."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.record.account.ledger import Ledger, read_ledger
from phalanx.record.run import Run, create_run


class Scribe:
    """Writes the records of a run; its clock goes on with everything that takes time."""

    def __init__(self, run: Run, *, at_s: float = 1000.0, supervised: bool = True) -> None:
        self.run, self.now_s, self.epoch, self.world, self.supervised = run, at_s, 0, 0, supervised

    def wait(self, seconds: float) -> Scribe:
        self.now_s += seconds
        return self

    def say(self, event: str, **fields: object) -> Scribe:
        fields = {"epoch": self.epoch, **fields}
        self._write(self.run.path / "supervisor.jsonl", {"event": event, "t": self.now_s, "rank": -1, **fields})
        return self

    def form(self, world: int, *, step: int, source: str = "memory") -> Scribe:
        self.epoch, self.world = self.epoch + 1, world
        self.say("epoch", world=world, reason="x")
        return self.say("restore", step=step, source=source)

    def tell(self, event: str, ranks: list[int] | None = None, **fields: object) -> Scribe:
        """What every rank, or some, write into their own files."""
        known = (
            {"epoch": self.epoch} if self.supervised and event in ("ready", "run_start", "step", "checkpoint") else {}
        )
        for rank in ranks if ranks is not None else range(self.world):
            self._write(self.run.events(rank), {"event": event, "t": self.now_s, "rank": rank, **known, **fields})
        return self

    def start(self, step: int, *, after: float = 0.5) -> Scribe:
        self.wait(after).tell("ready", step=step, seconds=after)
        return self.tell("run_start", step=step, steps=100, world=self.world)

    def steps(self, numbers: range, *, each: float = 1.0, between: float = 0.0, **fields: object) -> Scribe:
        for step in numbers:
            self.wait(each + between).tell("step", step=step, duration_s=each, **fields)
        return self

    def _write(self, path: Path, event: dict[str, object]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"v": 1, **event}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = create_run(tmp_path, "x", job_toml="", job={}, plan_json="{}")
    made.set_launch(started=999.0)
    return made


def spent(found: Ledger) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in asdict(found.accounts).items() if seconds}


def test_a_run_without_trouble(run: Run) -> None:
    scribe = Scribe(run).say("host", host="a", state="joined").wait(1).form(4, step=0, source="start").start(0, after=2)
    scribe.steps(range(10)).wait(0.5).tell("evaluate", step=10, seconds=0.5)
    scribe.steps(range(10, 20), between=0.1).wait(0.25).tell("checkpoint", step=20, blocked_s=0.25)
    scribe.steps(range(20, 30)).wait(3).tell("checkpoint", step=30, path="x", seconds=3.0)
    scribe.wait(1).tell("run_end", step=30, state="done").wait(0.5).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {
        "productive": 30.0, "init": 4.0, "evaluate": 0.5, "checkpoint": 3.25, "stopping": 1.5, "other": 1.0,
    }  # fmt: skip
    assert found.wall_s == pytest.approx(40.25)
    assert found.effective == pytest.approx(30 / 40.25)
    assert found.closes
    assert (found.steps, found.steps_lost, found.incidents, found.formations) == (30, 0, 0, 1)


def test_a_rank_falls_and_the_job_shrinks(run: Run) -> None:
    """Rank 0 of 4 falls in step 10: rank 1 bears witness of the first membership, rank 0 of the next."""
    scribe = Scribe(run).form(4, step=0, source="start").start(0).steps(range(9))
    scribe.wait(1.0).tell("step", [1, 2, 3], step=9, duration_s=1.0)  # rank 0 was killed before it could say so
    scribe.wait(1.5).say("incident", rank=0, step=10, cause={"kind": "Died"}, waited_s=0.5)
    scribe.wait(0.25).form(3, step=10).start(10).steps(range(10, 20), each=1.25)
    scribe.wait(0.5).tell("run_end", step=20, state="done").say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {
        "productive": 22.5, "init": 1.5, "detect": 1.0, "restore": 1.25, "stopping": 0.5,
    }  # fmt: skip
    assert (found.steps, found.steps_lost, found.incidents, found.formations) == (20, 0, 1, 2)
    assert found.closes


def test_steps_that_are_undone_are_lost_work(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(10))
    scribe.wait(2).say("incident", rank=1, others=[], step=10).form(2, step=7, source="disk").start(7, after=3)
    scribe.steps(range(7, 12)).wait(1).say("incident", rank=0, step=12).form(2, step=11).start(11).steps(range(11, 15))
    scribe.say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {
        "productive": 15.0, "init": 1.5, "detect": 3.0, "restore": 3.5, "lost_work": 4.0,
    }  # fmt: skip
    assert (found.steps, found.steps_lost) == (15, 4)
    assert found.closes


def test_where_the_ranks_really_went_on_counts(run: Run) -> None:
    """The supervisor hoped for step 8, and the ranks found its checkpoint damaged."""
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(8))
    scribe.say("incident", rank=1).form(2, step=8, source="disk").start(4).steps(range(4, 8)).say("end", state="done")
    assert (read_ledger(run).steps, read_ledger(run).steps_lost) == (8, 4)


def test_a_step_that_ends_after_a_failure_was_noticed(run: Run) -> None:
    """A rank is lost while the others are still at work: what they claim is theirs only from there on."""
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(4)).wait(0.6)
    scribe.say("incident", rank=0).wait(0.4).tell("step", [1], step=4, duration_s=1.0)
    scribe.wait(1).form(1, step=5).start(5).steps(range(5, 8)).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 7.4, "init": 1.5, "detect": 0.6, "restore": 1.5}
    assert found.overlap_s == 0
    assert found.closes


def test_failures_while_recovering_are_one_recovery(run: Run) -> None:
    scribe = Scribe(run).form(4, step=0, source="start").start(0).steps(range(5)).wait(1).say("incident", rank=3)
    scribe.wait(1).form(3, step=5).wait(1).say("incident", rank=2).wait(1).form(2, step=5).start(5).steps(range(5, 9))
    found = read_ledger(run)
    assert spent(found) == {"productive": 9.0, "init": 1.5, "detect": 1.0, "restore": 3.5}
    assert (found.incidents, found.formations) == (2, 3)


def test_growing_again_is_no_failure(run: Run) -> None:
    scribe = Scribe(run).form(3, step=0, source="start").start(0).steps(range(5)).wait(0.3).form(4, step=5)
    scribe.start(5).steps(range(5, 8)).say("end", state="done")
    assert spent(read_ledger(run)) == {"productive": 8.0, "init": 1.5, "restore": 0.8}


def test_copies_in_memory_are_told_apart(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0)
    scribe.steps(range(10), between=0.1, hold_s=0.08).say("end", state="done")
    assert spent(read_ledger(run)) == {"productive": 10.0, "init": 1.52, "checkpoint": 0.8, "other": 0.18}


@pytest.mark.parametrize("told", [(), ("checkpoint",), ("evaluate",), ("checkpoint", "evaluate")])
def test_a_copy_counts_once_whatever_is_told_before_the_next_step(run: Run, told: tuple[str, ...]) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(1))
    for step in range(1, 11):
        scribe.wait(0.25)  # the copy; then the loop tells of commits, and evaluates
        if "checkpoint" in told:
            scribe.tell("checkpoint", step=step - 1, path="x", seconds=0.5)
        if "evaluate" in told:
            scribe.wait(0.5).tell("evaluate", step=step, seconds=0.5)
        scribe.steps(range(step, step + 1), hold_s=0.25)
    found = read_ledger(scribe.say("end", state="done").run)
    evaluated = {"evaluate": 5.0} if "evaluate" in told else {}
    assert spent(found) == {"productive": 11.0, "init": 1.5, "checkpoint": 2.5} | evaluated
    assert (found.overlap_s, found.closes) == (0.0, True)


def test_a_copy_that_cannot_have_been_is_told(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(10), hold_s=0.5)
    assert read_ledger(scribe.run).overlap_s == pytest.approx(4.5)
    assert not read_ledger(scribe.run).closes


def test_a_rank_from_the_past_is_not_heard(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(5)).say("incident", rank=1)
    scribe.form(2, step=5).start(5).steps(range(5, 7))
    scribe.wait(0.5).tell("step", [0], step=99, duration_s=0.1, epoch=1)
    scribe.wait(0.5).tell("step", step=7, duration_s=1.0).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 8.0, "init": 1.5, "restore": 0.5}
    assert found.steps == 8


def test_torn_lines(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(5))
    with run.events(0).open("a", encoding="utf-8") as file:
        file.write('{"v":1,"event":"step","t":10')
    with (run.path / "supervisor.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[]\n")
    found = read_ledger(run)
    assert spent(found) == {"productive": 5.0, "init": 1.5}
    assert (found.wall_s, found.unreadable_lines, found.closes) == (6.5, 3, True)
    assert scribe.now_s == 1005.5


def test_the_time_between_two_launches_is_nobodys(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(5)).wait(0.5).say("end", state="stopped")
    run.set_launch(started=scribe.wait(3600).now_s)
    scribe.wait(2).form(2, step=5, source="disk").start(5).steps(range(5, 10)).say("end", state="done")
    found = read_ledger(run)
    # of the launch before, only its first word is known: launch.json tells of the last
    assert spent(found) == {"productive": 10.0, "init": 3.0, "stopping": 0.5}
    assert found.wall_s == pytest.approx(13.5)


def test_every_launch_begins_when_it_was_launched(run: Run) -> None:
    """Their first words come late: the hosts have to join, the ranks to import."""
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(5)).wait(0.5).say("end", state="stopped")
    again_s = scribe.wait(3600).now_s
    scribe.wait(4).form(2, step=5, source="disk").start(5).steps(range(5, 10)).say("end", state="stopped")
    run.set_launch(earlier=[999.0, again_s, None, "x", {}], launched=scribe.wait(60).now_s)
    scribe.wait(2).form(2, step=10, source="disk").start(10).steps(range(10, 15)).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 15.0, "init": 1.5 + 4.5 + 2.5, "stopping": 0.5}
    assert found.closes


def test_a_launch_that_nobody_ended(run: Run) -> None:
    """The machine went down: the time until somebody started the run again is not the run's."""
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(5))
    run.set_launch(started=scribe.wait(3600).now_s)
    scribe.wait(2).form(2, step=3, source="disk").start(3).steps(range(3, 10)).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 10.0, "init": 3.0, "lost_work": 2.0}
    assert found.closes


def test_a_run_that_never_took_a_step(run: Run) -> None:
    Scribe(run).form(2, step=0, source="start").wait(3).say("incident", rank=0).wait(1).say("end", state="failed")
    found = read_ledger(run)
    assert spent(found) == {"init": 5.0}
    assert (found.effective, found.closes) == (0.0, True)


def test_no_record_at_all(run: Run) -> None:
    found = read_ledger(run)
    assert (found.wall_s, spent(found), found.closes, found.effective) == (0.0, {}, True, 0.0)


def test_without_a_supervisor(run: Run) -> None:
    """Under torchrun rank 0's own events are all there is; a second start goes back two steps."""
    scribe = Scribe(run, supervised=False)
    scribe.world = 2
    scribe.start(0).steps(range(10)).wait(600).start(8, after=3).steps(range(8, 12)).wait(1)
    scribe.tell("run_end", step=12, state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 12.0, "init": 4.5, "lost_work": 2.0, "stopping": 1.0}
    assert found.wall_s == pytest.approx(19.5)
    assert (found.formations, found.steps, found.steps_lost) == (2, 12, 2)


def test_marks_that_claim_the_same_seconds_do_not_close(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0).steps(range(5))
    for step in range(5, 10):
        scribe.wait(0.5).tell("step", step=step, duration_s=1.0)
    found = read_ledger(run)
    assert found.overlap_s == pytest.approx(2.5)
    assert not found.closes
    assert str(found).endswith("; does not close, 2.50 s are claimed twice")


def test_the_text(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0).steps(range(9)).wait(0.5).say("incident", rank=0)
    scribe.form(1, step=9).start(9).steps(range(9, 10)).say("end", state="done")
    assert (
        str(read_ledger(run))
        == "12.5 s (effective training time 80.0%): training steps 10.0 s, start-up 1.50 s, failure detection 500 ms, "
        "recovery 500 ms"
    )
    told = read_ledger(run).to_json()
    assert json.loads(json.dumps(told))["accounts"]["productive"] == 10.0
    assert (told["closes"], told["effective"]) == (True, 0.8)


def test_memory_does_not_grow_with_the_steps(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0)
    lines = [
        json.dumps({"event": "step", "t": scribe.now_s + step, "rank": 0, "epoch": 1, "step": step, "duration_s": 1.0})
        for step in range(7_000)
    ]
    with run.events(0).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    tracemalloc.start()
    found = read_ledger(run)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.steps == 7_000
    assert most < 500_000 < run.events(0).stat().st_size


# ---- what a step was held up by --------------------------------------------------------------------------------------


def test_what_steps_were_held_up_by(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(1), each=10.0, compile_s=8.0, data_s=0.5)
    scribe.steps(range(1, 9), data_s=0.25).say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 7.5, "init": 1.5, "compile": 8.0, "data": 2.5}
    assert found.effective == pytest.approx((18 - 8) / 19.5)  # data makes steps slow, compiling is none
    assert found.closes


def test_an_undone_step_is_lost_whole(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(4), data_s=0.25, compile_s=0.5)
    scribe.say("incident", rank=1).form(2, step=2).start(2).steps(range(2, 4)).say("end", state="done")
    found = spent(read_ledger(run))
    assert (found["lost_work"], found["data"], found["compile"]) == (2.0, 0.5, 1.0)


def test_claims_beyond_the_step_are_cut(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0).steps(range(2), data_s=0.75, compile_s=0.75)
    scribe.steps(range(2, 4), data_s=-5.0, compile_s=1e300).say("end", state="done")
    assert spent(read_ledger(run)) == {"productive": 2.0, "init": 1.5, "compile": 1.5, "data": 0.5}


def ranks_wait(run: Run, own_s: list[float], *, layout: dict[str, int], steps: int = 40) -> Ledger:
    """Steps of 2 s in which each rank works for so long and waits for the rest."""
    run.plan_json.write_text(json.dumps({"layout": layout}))
    scribe = Scribe(run).form(len(own_s), step=0, source="start").start(0)
    for step in range(steps):
        scribe.wait(2.0)
        for rank, seconds in enumerate(own_s):
            scribe.tell("step", [rank], step=step, duration_s=2.0, compute_s=seconds, wait_s=2.0 - seconds)
    scribe.say("end", state="done")
    return read_ledger(run)


def test_what_a_slow_rank_costs_the_others(run: Run) -> None:
    found = ranks_wait(run, [1.0, 1.0, 1.5, 1.0], layout={"data": 4})
    assert spent(found) == {"productive": 60.0, "init": 1.5, "stragglers": 20.0}
    assert found.effective == pytest.approx(80 / 81.5)
    assert found.closes


def test_stages_of_a_pipeline_differ_by_design(run: Run) -> None:
    found = ranks_wait(run, [1.0, 1.0, 1.5, 1.5], layout={"data": 2, "pipeline": 2})
    assert spent(found) == {"productive": 80.0, "init": 1.5}


def test_a_straggler_that_a_busier_stage_hides_costs_little(run: Run) -> None:
    """The ranks of the first stage wait 0.05 s: a quicker rank 3 would have saved no more."""
    found = ranks_wait(run, [1.95, 1.95, 1.0, 1.5], layout={"data": 2, "pipeline": 2})
    assert spent(found)["stragglers"] == pytest.approx(40 * 0.05)


def test_two_slow_ranks_cost_what_one_costs(run: Run) -> None:
    found = ranks_wait(run, [1.0, 1.0, 1.5, 1.5, 1.0], layout={"data": 5})
    assert spent(found)["stragglers"] == pytest.approx(40 * 0.5)


# ---- what is no account ----------------------------------------------------------------------------------------------


def test_telemetry_and_unknown_events_say_nothing_of_accounts(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0)
    for step in range(5):
        scribe.wait(0.5).tell("monitor", energy_j=1.0).tell("peers").tell("never heard of", text="x" * 9000)
        scribe.wait(0.5).tell("step", step=step, duration_s=1.0)
    scribe.say("end", state="done")
    found = read_ledger(run)
    assert spent(found) == {"productive": 5.0, "init": 1.5}
    assert (found.unreadable_lines, found.closes) == (0, True)


def test_time_that_no_event_explains_does_not_close(run: Run) -> None:
    scribe = Scribe(run).form(1, step=0, source="start").start(0).steps(range(20), each=10.0)
    scribe.wait(3600).steps(range(20, 40), each=10.0).say("end", state="done")
    found = read_ledger(run)
    assert spent(found)["other"] == 3600
    assert not found.closes
    assert str(found).endswith("; does not close, no event explains 1.00 h")


def test_a_clock_that_is_set_back(run: Run) -> None:
    run.set_launch(started=99_999.0)
    scribe = Scribe(run, at_s=1e5).form(2, step=0, source="start").start(0).steps(range(10))
    scribe.wait(-3600).steps(range(10, 20)).wait(1).tell("run_end", step=20, state="done").say("end", state="done")
    found = read_ledger(run)
    assert spent(found)["productive"] == pytest.approx(20.0, abs=1.0)
    assert found.overlap_s <= 1.0
    assert (found.clock_jumps, found.steps) == (1, 20)
    assert 20 < found.wall_s < 25
    assert "; the clock jumped once, and" in str(found)


def test_a_clock_that_leaps_a_year_ahead(run: Run) -> None:
    scribe = Scribe(run).form(2, step=0, source="start").start(0).steps(range(10)).wait(365 * 86400)
    scribe.steps(range(10, 20)).say("end", state="done")
    found = read_ledger(run)
    assert spent(found)["productive"] == pytest.approx(20.0)
    assert found.wall_s < 60
    assert found.clock_jumps >= 1


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "event": st.sampled_from(
                    ["ready", "run_start", "step", "evaluate", "checkpoint", "stop", "run_end", "x"]
                )
            },
            optional={
                "t": st.one_of(st.floats(-1e3, 1e5), st.floats(), st.integers(), st.just("now")),
                "step": st.one_of(st.integers(-3, 9), st.just(10**400), st.text(max_size=3)),
                "duration_s": st.floats(),
                "data_s": st.floats(-1, 9),
                "seconds": st.floats(),
                "epoch": st.one_of(st.integers(0, 3), st.none()),
            },
        ),
        max_size=25,
    ),
    st.booleans(),
)
@settings(max_examples=60)
def test_whatever_is_recorded_no_account_is_negative_and_all_add_up(
    events: list[dict[str, object]], told: bool
) -> None:
    with TemporaryDirectory() as folder:
        made = Run(path=Path(folder))
        lines = [json.dumps({"t": 1000.0 + number, **event}) for number, event in enumerate(events)]
        made.events(0).write_text("\n".join(lines))
        if told:
            made.supervisor.write_text("\n".join(lines).replace('"step"', '"incident"').replace('"stop"', '"epoch"'))
        found = read_ledger(made)
    values = asdict(found.accounts).values()
    assert min(values) >= 0.0
    assert found.wall_s >= 0.0
    assert sum(values) == pytest.approx(found.wall_s, abs=1e-3, rel=1e-6)
