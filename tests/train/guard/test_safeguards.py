"""The checks between steps: which state is trusted, which error ends the membership, and which warnings appear."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.errors import UserError
from phalanx.train.guard import safeguards
from phalanx.train.guard.compiled import CompiledComparison
from phalanx.train.guard.divergence import digest_shards
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.guard.safeguards import (
    FIRST_RANK_BUFFER,
    UNSAVED_BUFFER,
    ChangedBuffers,
    CompiledCodeCheck,
    ReplicaComparison,
    odd_replicas,
)
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_control import UntrustedState
from phalanx.train.step_result import NO_REQUESTS, StepRequest

LAST_STEP = 20
EVERY = 4
COPIES = Divergence(step=6, kind="copies", suspects=(1,), certain=True, boxes="x", digests={0: "a", 1: "b", 2: "a"})
UNCLEAR = Divergence(step=6, kind="copies", suspects=(0, 1), certain=False, boxes="x", digests={0: "a", 1: "b"})
REST = Divergence(step=6, kind="rest", suspects=(1,), certain=True, boxes="", digests={1: "a"})


def shard(tensor: torch.Tensor) -> TensorShard:
    shape = tuple(tensor.shape)
    return TensorShard(name="w", tensor=tensor, shape=shape, start=(0,) * len(shape), replicas=1, owner=True, groups={})


class Replicas:
    """Two ranks in each of three model replicas, and the digests that they exchange."""

    def __init__(self, gathered: Mapping[int, bytes] | None = None, *, replica: int = 1) -> None:
        self.replicas: Any = SimpleNamespace(count=3, rank=lambda replica, position: 2 * replica + position)
        self.replica = replica
        self.sent: list[bytes] = []
        self._gathered = gathered

    def gather(self, mine: torch.Tensor) -> dict[int, torch.Tensor] | None:
        self.sent.append(bytes(mine.tolist()))
        if self._gathered is None:
            return None
        return {replica: torch.tensor(list(digest), dtype=torch.uint8) for replica, digest in self._gathered.items()}


class StubGuard:
    """A guard that compares every `EVERY` steps and returns the given divergences."""

    def __init__(self, found: Mapping[int, Divergence], last: Mapping[str, str], *, every: int = EVERY) -> None:
        self.last = dict(last)
        self.is_on = every > 0
        self.remembers = True
        self.saved: list[int] = []
        self._found, self._every = found, every

    def is_due(self, step: int) -> bool:
        return self.is_on and step % self._every == 0

    def check(self, step: int, *, is_saved: bool) -> Divergence | None:
        self.saved += [step] if is_saved else []
        return self._found.get(step)

    def name_changed(self, step: int) -> Divergence:
        return REST

    def compare_memory(self) -> torch.Tensor:
        return torch.zeros(())


def make_training(*, every: int = EVERY, case: Divergence | None = None, across: Replicas | None = None) -> Any:
    tensor = torch.arange(8.0)
    engine = SimpleNamespace(
        state=lambda: [shard(tensor)],
        at_rest=lambda: [shard(tensor)],
        weights=lambda: [shard(tensor)],
        device=torch.device("cpu"),
        across=across,
        compare_memory=None,
    )
    plan = SimpleNamespace(
        job=SimpleNamespace(fault=SimpleNamespace(digest_every=every)),
        reliability=None,
        prediction=None,
        duration=SimpleNamespace(wall_s=1.0),
    )
    return SimpleNamespace(
        plan=plan,
        engine=engine,
        control=SimpleNamespace(case=case, check=lambda: None),
        step=0,
        batch_plan=SimpleNamespace(steps=LAST_STEP),
    )


def make_comparison(
    training: Any, found: Mapping[int, Divergence] | None = None, last: Mapping[str, str] | None = None
) -> tuple[ReplicaComparison, Any]:
    comparison = ReplicaComparison(training)
    guard: Any = StubGuard(found or {}, last or {})
    comparison.guard = guard
    return comparison, guard


def take_steps(
    comparison: ReplicaComparison, training: Any, until: int, requests: Mapping[int, StepRequest] | None = None
) -> None:
    """Take steps as the loop does; `requests` by the number of steps done."""
    while training.step < until:
        if training.engine.compare_memory is not None:
            training.engine.compare_memory()
        training.step += 1
        flags = list(NO_REQUESTS)
        request = (requests or {}).get(training.step)
        if request is not None:
            flags[request] = True
        report: Any = SimpleNamespace(step=training.step - 1, result=SimpleNamespace(requests=tuple(flags)))
        comparison.on_step_end(training, report)


def untrusted(
    comparison: ReplicaComparison, training: Any, until: int, requests: Mapping[int, StepRequest] | None = None
) -> UntrustedState:
    with pytest.raises(UntrustedState) as caught:
        take_steps(comparison, training, until, requests)
    return caught.value


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A process group of one rank; returns the tensors that were reduced over it."""
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(safeguards.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(safeguards.dist, "all_reduce", lambda tensor, op: reduced.append(tensor))
    return reduced


@pytest.mark.parametrize("every", [0, 4])
def test_the_engine_compares_memory_only_if_comparison_is_on(every: int) -> None:
    training = make_training(every=every)
    comparison = ReplicaComparison(training)
    assert (training.engine.compare_memory is not None) == (every > 0)
    if every:
        assert training.engine.compare_memory() == 0.0
        assert comparison.guard.is_due(every)


@pytest.mark.parametrize("each_step", [None, True, False])
def test_memory_is_compared_in_every_step_by_default(each_step: bool | None) -> None:
    training = make_training()
    comparison = ReplicaComparison(training) if each_step is None else ReplicaComparison(training, each_step=each_step)
    take_steps(comparison, training, EVERY - 1)
    assert comparison.guard.remembers == (each_step is not False)


@pytest.mark.parametrize(
    ("step", "requests", "sound"),
    [
        (6, {}, 4),
        (6, {5: StepRequest.SAVE}, 5),
        (6, {3: StepRequest.STOP}, 4),
        (7, {5: StepRequest.STOP}, 5),
        (7, {5: StepRequest.REFORM}, 4),
        (3, {}, 2),  # nothing was compared since the state of step 2 was restored
    ],
)
def test_differing_copies_go_back_to_the_last_compared_step(
    step: int, requests: dict[int, StepRequest], sound: int
) -> None:
    training = make_training()
    comparison, guard = make_comparison(training, {step: COPIES})
    training.step = 2
    comparison.on_start(training)
    error = untrusted(comparison, training, step, requests)
    assert (error.fault, error.step, error.sound, error.suspects) == ("diverged", COPIES.step, sound, (1,))
    assert error.evidence == COPIES.to_json()
    assert str(error) == "step 6: rank 1 holds other values than its 2 copies"
    assert guard.saved == [saved for saved, request in requests.items() if request != StepRequest.REFORM]


def test_the_last_step_is_saved_and_therefore_compared() -> None:
    training = make_training()
    comparison, guard = make_comparison(training)
    take_steps(comparison, training, LAST_STEP)
    assert guard.saved == [LAST_STEP]


@pytest.mark.parametrize(("found", "suspects"), [(COPIES, (1,)), (UNCLEAR, ())])
def test_only_certain_suspects_are_accused(found: Divergence, suspects: tuple[int, ...]) -> None:
    training = make_training()
    comparison, _ = make_comparison(training, {6: found})
    error = untrusted(comparison, training, 6)
    assert error.suspects == suspects
    assert error.evidence == found.to_json()


@pytest.mark.parametrize(("found", "has_evidence"), [(COPIES, False), (REST, True)])
def test_suspects_of_a_model_replica_are_numbered_in_the_job(
    found: Divergence, has_evidence: bool, world: list[torch.Tensor]
) -> None:
    training = make_training(across=Replicas({}, replica=2))
    comparison, _ = make_comparison(training, {6: found})
    error = untrusted(comparison, training, 6)
    assert error.suspects == (5,)
    assert error.evidence == (found.to_json() if has_evidence else None)


def test_changed_memory_goes_back_to_the_last_state_that_was_unchanged_before_its_update() -> None:
    """Copies that were compared later do not make that memory sound."""
    training = make_training()
    comparison, guard = make_comparison(training)
    training.step = 2
    comparison.on_start(training)
    assert comparison.memory_changed(training).sound == 2
    take_steps(comparison, training, 7)
    assert comparison.memory_changed(training).sound == 6
    guard.remembers = False
    take_steps(comparison, training, 9)  # copies are compared after step 8
    error = comparison.memory_changed(training)
    assert (error.fault, error.sound, error.suspects, error.evidence) == ("diverged", 6, (1,), REST.to_json())


def test_memory_that_changed_in_an_aborted_collective_is_not_reported() -> None:
    training = make_training()
    comparison, _ = make_comparison(training)

    def check() -> None:
        raise RuntimeError("the membership ended")

    training.control.check = check
    with pytest.raises(RuntimeError, match="the membership ended"):
        comparison.memory_changed(training)


@pytest.mark.parametrize(
    ("last", "wrong"),
    [
        ({"x": "a"}, 1),
        ({"x": "b"}, 0),
        ({"x": "c"}, None),  # the repetition was not exact
        ({"y": "a"}, None),  # no digest of that set
    ],
)
def test_an_open_case_is_settled_by_doing_its_step_again(last: dict[str, str], wrong: int | None) -> None:
    training = make_training(case=UNCLEAR)
    comparison, _ = make_comparison(training, last=last)
    training.step = 4
    comparison.on_start(training)
    if wrong is None:
        take_steps(comparison, training, 8)
        return
    error = untrusted(comparison, training, 8)
    assert (error.fault, error.step, error.sound, error.suspects) == ("settled", 6, 6, (wrong,))
    assert str(error) == f"rank {wrong} was wrong at step 6: done again, the others' values came out"


def test_a_case_is_decided_at_its_own_step_only() -> None:
    training = make_training(case=UNCLEAR)
    comparison, _ = make_comparison(training, last={"x": "a"})
    training.step = 6
    comparison.on_start(training)
    take_steps(comparison, training, 8)


def test_steps_that_are_compared_have_a_digest_and_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training()
    comparison, _ = make_comparison(training)
    clock = iter([100.0, 103.0, 200.0, 205.0])
    monkeypatch.setattr(safeguards.time, "perf_counter", lambda: next(clock))
    training.step = 3
    assert comparison.digest(training) == (None, None)
    take_steps(comparison, training, 4)
    assert comparison.digest(training) == (digest_shards(training.engine.weights()), 3.0 + 5.0)


def test_no_seconds_were_spent_before_the_first_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training()
    comparison, _ = make_comparison(training)
    clock = iter([200.0, 205.0])
    monkeypatch.setattr(safeguards.time, "perf_counter", lambda: next(clock))
    assert comparison.digest(training)[1] == 5.0


# ---- model replicas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digests", "wrong"),
    [
        ("", []),
        ("a", []),
        ("aa", []),
        ("ab", []),
        ("aab", [2]),
        ("baa", [0]),
        ("abc", []),
        ("aabb", []),
        ("aabc", []),  # two of four are no majority
        ("aabac", [2, 4]),
    ],
)
def test_replicas_that_differ_from_the_majority(digests: str, wrong: list[int]) -> None:
    assert odd_replicas({replica: digest.encode() for replica, digest in enumerate(digests)}) == wrong


@pytest.mark.parametrize(
    ("digests", "names"),
    [
        ({0: b"a", 1: b"a", 2: b"b"}, "2"),
        ({0: b"b", 1: b"a", 2: b"a"}, "0"),
        ({0: b"a", 1: b"b"}, "which cannot be told"),
        ({0: b"a", 1: b"b", 2: b"c"}, "which cannot be told"),
    ],
)
def test_states_of_model_replicas_that_differ(digests: dict[int, bytes], names: str, world: list[torch.Tensor]) -> None:
    across = Replicas(digests)
    training = make_training(across=across)
    comparison, _ = make_comparison(training)
    comparison.on_start(training)
    error = untrusted(comparison, training, EVERY)
    assert (error.fault, error.step, error.sound, error.suspects) == ("diverged", 4, 0, ())
    assert str(error) == f"the states of model replicas differ after step 4 (wrong: {names})"
    assert [digest.hex() for digest in across.sent] == [digest_shards(training.engine.state())]
    assert world == [], "one rank has no other to ask"


@pytest.mark.parametrize("digests", [None, {0: b"a"}, {0: b"a", 1: b"a"}])
def test_model_replicas_that_agree_or_cannot_be_asked(
    digests: dict[int, bytes] | None, world: list[torch.Tensor]
) -> None:
    """After a lost replica the next step finds out; until then nothing is accused."""
    across = Replicas(digests)
    training = make_training(across=across)
    comparison, _ = make_comparison(training)
    take_steps(comparison, training, 2 * EVERY + 1, {2: StepRequest.SAVE})
    assert len(across.sent) == 3, "at the saved step, and at those that are due"


def test_model_replicas_are_not_compared_if_comparison_is_off(world: list[torch.Tensor]) -> None:
    across = Replicas({0: b"a", 1: b"b"})
    training = make_training(every=0, across=across)
    take_steps(ReplicaComparison(training), training, 5, {2: StepRequest.SAVE})
    assert across.sent == []


def test_model_replicas_are_not_compared_after_a_divergence_within_one(world: list[torch.Tensor]) -> None:
    across = Replicas({0: b"a", 1: b"b"})
    training = make_training(across=across)
    comparison, _ = make_comparison(training, {EVERY: COPIES})
    assert untrusted(comparison, training, EVERY).evidence is None
    assert across.sent == []


def test_all_ranks_of_a_replica_learn_of_a_difference_that_one_of_them_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, op: object) -> None:
        """Another rank found that replica 2 is wrong."""
        tensor.copy_(torch.maximum(tensor, torch.tensor([1.0, 0.0, 0.0, 1.0])))

    monkeypatch.setattr(safeguards.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(safeguards.dist, "all_reduce", all_reduce)
    training = make_training(across=Replicas({0: b"a", 1: b"a", 2: b"a"}))
    comparison, _ = make_comparison(training)
    assert str(untrusted(comparison, training, EVERY)).endswith("(wrong: 2)")


# ---- buffers -------------------------------------------------------------------------------------------------------


class Events:
    """Events that a rank wrote."""

    def __init__(self) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.written.append((kind, fields))


def remark(step: int, name: str, effect: str) -> tuple[str, dict[str, Any]]:
    return "remark", {"step": step, "text": f"the buffer {name} {effect}", "is_warning": True}


def test_changed_buffers_are_reported_once_for_each_effect() -> None:
    events = Events()
    first_rank: Iterable[str] = ["b", "c", "a"]
    engine = SimpleNamespace(first_rank_buffers=first_rank, changed_unsaved=lambda: ["a"])
    training: Any = SimpleNamespace(engine=engine, events=events, step=0)
    callback, report = ChangedBuffers(), SimpleNamespace()
    callback.on_checkpoint_taken(training, 0)
    training.step = 3
    for _ in range(2):
        callback.on_step_end(training, report)  # type: ignore[arg-type]
        callback.on_checkpoint_taken(training, 3)
    assert events.written == [
        remark(0, "a", UNSAVED_BUFFER),
        remark(2, "a", FIRST_RANK_BUFFER),
        remark(2, "b", FIRST_RANK_BUFFER),
        remark(2, "c", FIRST_RANK_BUFFER),
    ]


# ---- compiled code -------------------------------------------------------------------------------------------------


def make_check(
    monkeypatch: pytest.MonkeyPatch, comparison: CompiledComparison | str, *, is_due: bool = True
) -> tuple[Any, Events]:
    """A training at step 3 of 20, whose code compares like that."""
    events = Events()
    clock, compiling = iter([10.0, 17.0]), iter([1.0, 3.0])
    batches: Mapping[int, tuple[Any, Any]] = {3: (np.zeros((1, 2)), np.ones((1, 2)))}

    def compare(engine: Any, tokens: torch.Tensor, targets: torch.Tensor) -> CompiledComparison | str:
        assert not tokens.any()
        assert targets.all()
        return comparison

    monkeypatch.setattr(safeguards.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(safeguards, "compiled_s", lambda: next(compiling))
    monkeypatch.setattr(safeguards, "compare_compiled", compare)
    monkeypatch.setattr(safeguards, "code_key", lambda engine: "key")
    monkeypatch.setattr(safeguards, "is_comparison_due", lambda engine, compared: is_due and "key" not in compared)
    progress: list[int] = []
    training: Any = SimpleNamespace(
        control=SimpleNamespace(
            compared=set(), generation=5, progress=lambda step, phase: progress.append(step), reported=progress
        ),
        engine=SimpleNamespace(settings=SimpleNamespace(compute="fp32")),
        step=3,
        batch_plan=SimpleNamespace(steps=LAST_STEP),
        job=SimpleNamespace(train=SimpleNamespace(compile_check=True)),
        batches=SimpleNamespace(get=batches.__getitem__),
        memory=SimpleNamespace(left_out=nullcontext),
        events=events,
    )
    return training, events


def compared(*, gradient_difference: float) -> CompiledComparison:
    return CompiledComparison(
        loss=1.0,
        eager_loss=1.0,
        grad_norm=1.0,
        eager_grad_norm=1.0,
        loss_difference=0.0,
        gradient_difference=gradient_difference,
        bound=0.1,
        worst="w",
    )


def test_compiled_code_that_agrees_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training, events = make_check(monkeypatch, compared(gradient_difference=0.05))
    for _ in range(2):
        CompiledCodeCheck().on_start(training)
    ((kind, fields),) = events.written
    assert (kind, fields["step"], fields["epoch"], fields["passed"]) == ("compile_check", 3, 5, True)
    assert (fields["seconds"], fields["compile_s"]) == (7.0, 2.0)
    assert training.control.compared == {"key"}
    assert training.control.reported == [3]


def test_compiled_code_that_could_not_be_compared_is_recorded_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    training, events = make_check(monkeypatch, "no memory")
    CompiledCodeCheck().on_start(training)
    assert [(fields["passed"], fields["reason"]) for _, fields in events.written] == [(None, "no memory")]
    assert training.control.compared == {"key"}


def test_wrong_compiled_code_is_recorded_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training, events = make_check(monkeypatch, compared(gradient_difference=0.2))
    with pytest.raises(UserError, match="compiled code computes something else"):
        CompiledCodeCheck().on_start(training)
    assert [fields["passed"] for _, fields in events.written] == [False]
    assert training.control.compared == set(), "the next process compares again"


@pytest.mark.parametrize(
    ("step", "compile_check", "is_due", "is_compared"),
    [
        (3, True, True, True),
        (3, True, False, False),
        (3, False, True, False),
        (LAST_STEP, True, True, False),
        (LAST_STEP + 1, True, True, False),
    ],
)
def test_compiled_code_is_compared_if_steps_are_left_and_the_job_wants_it(
    step: int, compile_check: bool, is_due: bool, is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, events = make_check(monkeypatch, compared(gradient_difference=0.0), is_due=is_due)
    training.step, training.job.train.compile_check = step, compile_check
    CompiledCodeCheck().on_start(training)
    assert bool(events.written) == is_compared
