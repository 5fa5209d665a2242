"""The comparison of several ranks, each a thread of this process: who is accused, which tensors, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.train.guard import divergence
from phalanx.train.guard.divergence import ReplicaGuard, shard_sets
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.parallel.tensor_shard import TensorShard


class World:
    """Collectives among threads, in place of `torch.distributed`."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, ranks: int) -> None:
        self.ranks, self.num_reduced = ranks, 0
        self._here = threading.local()
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * ranks

    def run(self, task: Callable[[int], Any]) -> list[Any]:
        """Call the task once for each rank; return what the ranks returned."""

        def run_rank(rank: int) -> Any:
            self._here.rank = rank
            try:
                return task(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            return [future.result() for future in [pool.submit(run_rank, rank) for rank in range(self.ranks)]]

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.ranks

    def all_gather(self, tensors: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._sent[self._here.rank] = mine.clone()
        self._barrier.wait()
        for tensor, sent in zip(tensors, self._sent, strict=True):
            tensor.copy_(sent)
        self._barrier.wait()

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        assert op == "max"
        self.num_reduced += self._here.rank == 0
        tensors = [torch.empty_like(tensor) for _ in range(self.ranks)]
        self.all_gather(tensors, tensor)
        tensor.copy_(torch.stack(tensors).amax(dim=0))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensors = [torch.empty_like(tensor) for _ in range(self.ranks)]
        self.all_gather(tensors, tensor)
        tensor.copy_(tensors[src])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    """Make a world of so many ranks."""

    def make(ranks: int) -> World:
        made = World(ranks)
        monkeypatch.setattr(divergence, "dist", made)
        return made

    return make


def shard(name: str, *, replicas: int = 3, moves: bool = False, groups: Any = None, value: float = 1.0) -> TensorShard:
    return TensorShard(
        name=name,
        tensor=torch.full((8,), value),
        shape=(8,),
        start=(0,),
        replicas=replicas,
        owner=True,
        groups=groups or {},
        moves=moves,
    )


def make_guard(shards: Sequence[TensorShard], **settings: Any) -> ReplicaGuard:
    return ReplicaGuard(lambda: shards, **{"every": 1, **settings})


@pytest.mark.parametrize(
    ("changed", "suspects", "certain", "tensors"),
    [
        ({2: "b"}, (2,), True, ("b",)),
        ({0: "abcdef"}, (0,), True, ("a", "b", "c", "d")),  # at most four names
        ({1: "a", 2: "c"}, (0, 1, 2), False, ("a", "c")),
        ({}, None, False, ()),
    ],
)
def test_copies_on_three_ranks(
    changed: dict[int, str],
    suspects: tuple[int, ...] | None,
    certain: bool,
    tensors: tuple[str, ...],
    world: Callable[[int], World],
) -> None:
    def check(rank: int) -> tuple[Divergence | None, dict[str, str]]:
        guard = make_guard(
            [shard(name, value=float(rank) if name in changed.get(rank, "") else 9.0) for name in "abcdef"]
        )
        return guard.check(7), guard.last

    answers = world(3).run(check)
    assert all(answer == answers[0] for answer in answers)
    found, last = answers[0]
    if suspects is None:
        assert found is None
        assert [len(digest) for digest in last.values()] == [16]
        return
    assert (found.step, found.kind, found.suspects, found.certain) == (7, "copies", suspects, certain)
    assert found.tensors == tensors
    assert list(found.digests) == [0, 1, 2]
    assert last == {}


def test_ranks_compare_what_they_hold_with_the_ranks_that_hold_the_same(world: Callable[[int], World]) -> None:
    """Ranks 0 and 1 have one set, ranks 2 and 3 two, and each has a shard that no other holds."""

    def check(rank: int) -> tuple[Divergence | None, Divergence | None, dict[str, str]]:
        held = [shard(f"own{rank}", replicas=1), shard("low" if rank < 2 else "high", replicas=2)]
        if rank >= 2:
            held += [shard("first", replicas=2, moves=True), shard("buffer", replicas=2, moves=True)]
        guard = make_guard(held)
        before, last = guard.check(1), guard.last
        if rank == 3:
            held[3].tensor[5] = 2.0
        return before, guard.check(2), last

    answers = world(4).run(check)
    assert all(answer == answers[0] for answer in answers)
    before, found, last = answers[0]
    assert before is None
    assert (found.suspects, found.certain, found.tensors) == ((2, 3), False, ("buffer",))
    assert len(last) == 3
    assert found.boxes in last


def test_ranks_agree_once_on_the_number_of_sets(world: Callable[[int], World]) -> None:
    for replicas in (1, 2):
        made = world(2)
        guards = [make_guard([shard("a", replicas=replicas)]) for _ in range(2)]
        for step in (1, 2, 3):
            assert made.run(lambda rank, step=step, guards=guards: guards[rank].check(step)) == [None, None]
        assert made.num_reduced == 1


@pytest.mark.parametrize(
    ("every", "step", "is_saved", "is_compared"),
    [
        (2, 4, False, True),
        (2, 5, False, False),
        (2, 5, True, True),
        (1, 5, False, True),
        (0, 5, True, False),
        (0, 0, False, False),
    ],
)
def test_copies_are_compared_when_due_or_saved(
    every: int, step: int, is_saved: bool, is_compared: bool, world: Callable[[int], World]
) -> None:
    def check(rank: int) -> tuple[bool, bool, bool]:
        guard = make_guard([shard("a", replicas=2, value=float(rank))], every=every)
        assert guard.is_due(step) == (is_compared and not is_saved)
        found = guard.check(step, is_saved=is_saved)
        return found is not None, guard.remembers, guard.is_on

    assert world(2).run(check) == [(is_compared, is_compared, every > 0)] * 2


def test_a_step_is_not_saved_unless_the_caller_states_it(world: Callable[[int], World]) -> None:
    guards = [make_guard([shard("a", replicas=2, value=float(rank))], every=2) for rank in range(2)]
    assert world(2).run(lambda rank: guards[rank].check(3)) == [None, None]


# ---- memory --------------------------------------------------------------------------------------------------------


def change(held: Sequence[TensorShard], names: str) -> None:
    for one in held:
        if one.name in names:
            one.tensor[3] = 5.0


@pytest.mark.parametrize(
    ("changed", "suspects", "certain", "tensors"),
    [
        (["", "", ""], (), False, ()),
        (["", "a", ""], (1,), True, ("a",)),
        (["", "b", "c"], (1, 2), True, ("b",)),  # the names are those of the first suspect
        (["", "", "abcdef"], (2,), True, ("a", "b", "c", "d")),
        (["a", "a", "a"], (0, 1, 2), False, ("a",)),
        (["a"], (0,), True, ("a",)),
        ([""], (), False, ()),
        (["", "a"], (1,), True, ("a",)),
        (["a", "a"], (0, 1), False, ("a",)),
    ],
)
def test_ranks_whose_memory_changed(
    changed: list[str],
    suspects: tuple[int, ...],
    certain: bool,
    tensors: tuple[str, ...],
    world: Callable[[int], World],
) -> None:
    def compare(rank: int) -> Divergence:
        held = [shard(name, replicas=1) for name in "abcdef"]
        guard = make_guard(held)
        guard.check(4)
        change(held, changed[rank])
        assert bool(guard.compare_memory()) == bool(changed[rank])
        return guard.name_changed(4)

    answers = world(len(changed)).run(compare)
    assert all(answer == answers[0] for answer in answers)
    found = answers[0]
    assert (found.step, found.kind, found.suspects, found.certain) == (4, "rest", suspects, certain)
    assert found.tensors == tensors
    # Four words of two floats: 1.0 and 1.0 three times, 1.0 and 5.0 once.
    total = (3 * 0x3F8000003F800000 + 0x40A000003F800000) % 2**64
    assert found.digests == dict.fromkeys(suspects, f"{total:016x}")


def test_memory_that_became_zero_is_a_change(world: Callable[[int], World]) -> None:
    """Its sum is 0, as is the number that ranks without a change send."""
    world(1)
    held = [shard("a", replicas=1)]
    guard = make_guard(held)
    guard.check(1)
    held[0].tensor.zero_()
    assert guard.compare_memory()
    found = guard.name_changed(1)
    assert (found.suspects, found.tensors, found.digests) == ((0,), ("a",), {0: "0" * 16})


def test_long_names_are_cut_to_the_message(world: Callable[[int], World]) -> None:
    world(1)
    held = [shard(letter * 300, replicas=1) for letter in "ab"]
    guard = make_guard(held)
    guard.check(1)
    for one in held:
        one.tensor[0] = 2.0
    guard.compare_memory()
    assert guard.name_changed(1).tensors == ("a" * 300, "b" * 211)


def test_buffers_that_forward_changes_are_not_compared_at_rest() -> None:
    held = [shard("a", replicas=1), shard("buffer", replicas=1, moves=True)]
    guard = make_guard(held)
    guard.check(1)
    change(held, "buffer")
    assert not guard.compare_memory()
    guard.check(2)
    change(held, "a")
    assert guard.compare_memory()


def test_the_caller_may_choose_what_is_at_rest() -> None:
    held, resting = [shard("a", replicas=1)], [shard("b", replicas=1)]
    guard = make_guard(held, at_rest=lambda: resting)
    guard.check(1)
    change(held, "a")
    assert not guard.compare_memory()
    guard.check(2)
    change(resting, "b")
    assert guard.compare_memory()
    assert guard.name_changed(2).tensors == ("b",)


@pytest.mark.parametrize(("settings", "remembers"), [({}, False), ({"each_step": True}, True)])
def test_memory_is_remembered_after_steps_that_are_compared(settings: dict[str, bool], remembers: bool) -> None:
    guard = make_guard([shard("a", replicas=1)], every=2, **settings)
    guard.check(1)
    assert guard.remembers == remembers
    guard.check(2)
    assert guard.remembers
    guard.check(3)  # without a comparison in between, as after a skipped step
    assert guard.remembers == remembers


def test_state_that_was_taken_over_from_elsewhere_is_not_compared() -> None:
    held = [shard("a", replicas=1)]
    guard = make_guard(held)
    guard.check(1)
    guard.forget()
    change(held, "a")
    assert not guard.remembers
    assert not guard.compare_memory()


def test_shards_are_grouped_by_the_ranks_that_hold_them() -> None:
    rows, columns = object(), object()
    held = [
        shard("a"),
        shard("b", groups={0: (rows,)}),
        shard("c", groups={1: (rows,)}),
        shard("d", groups={0: (rows, columns)}),
        shard("e", replicas=2),
        shard("f", moves=True),
        shard("g"),
    ]
    sets = shard_sets(held)
    assert ["".join(one.name for one in members.shards) for members in sets] == ["ag", "bc", "d", "e", "f"]
    assert [(members.replicas, members.moves) for members in sets] == [
        (3, False),
        (3, False),
        (3, False),
        (2, False),
        (3, True),
    ]
    assert len({members.boxes for members in sets}) == 5
