"""The injector: each fault hits the rank, step and place it names, once, and leaves its note before it acts."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.elastic.failure import _NO_MEMORY
from phalanx.record.run import Run
from phalanx.train.drill import firings, inject
from phalanx.train.drill.faults import parse_faults
from phalanx.train.drill.inject import DrillFault, Injector
from phalanx.train.drill_hooks import DrillHooks, drill_hooks_of
from phalanx.train.parallel.tensor_shard import TensorShard

WORLD = 2


class Clock:
    """A clock that only the test moves, and those who sleep."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.slept_s: list[float] = []

    def move(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = SimpleNamespace(time=lambda: made.now_s, monotonic=lambda: made.now_s, sleep=made.sleep)
    for module in (inject, firings):
        monkeypatch.setattr(module, "time", fake)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(path=tmp_path)
    made.set_launch(v=1, drill=True)
    return made


def injector(run: Run, *texts: str, rank: int = 1, epoch: int = 1) -> Injector:
    firings.write_schedule(run, parse_faults(texts))
    hooks = drill_hooks_of(run, rank, 5)
    assert isinstance(hooks, Injector)
    hooks.joining(epoch, rank, WORLD)
    return hooks


def shards(*tensors: torch.Tensor) -> list[TensorShard]:
    return [
        TensorShard(
            name=f"t{number}",
            tensor=tensor,
            shape=tuple(tensor.shape),
            start=(0,) * tensor.dim(),
            replicas=1,
            owner=True,
            groups={},
        )
        for number, tensor in enumerate(tensors)
    ]


def test_without_both_signs_nothing_is_injected(run: Run) -> None:
    assert type(drill_hooks_of(run, 0, 0)) is DrillHooks  # a drill without a schedule
    firings.write_schedule(run, parse_faults(["kill:rank=0,step=0"]))
    assert isinstance(drill_hooks_of(run, 0, 0), Injector)
    run.set_launch(v=1)
    plain = drill_hooks_of(run, 0, 0)  # a schedule that strayed into a real run
    assert type(plain) is DrillHooks
    plain.step_begins(0)
    assert plain.heartbeat_allowed()
    assert not plain.records_samples


def test_a_fault_hits_its_rank_at_its_step_once(run: Run, clock: Clock) -> None:
    other = injector(run, "raise:rank=1,step=3", rank=0)
    other.step_begins(3)
    hooks = injector(run, "raise:rank=1,step=3")
    hooks.step_begins(2)
    with pytest.raises(DrillFault):
        hooks.step_begins(3)
    hooks.step_begins(3)
    again = injector(run, "raise:rank=1,step=3", epoch=2)  # another process, another epoch: it was fired already
    again.step_begins(4)
    [note] = firings.read_firings(run)
    assert (note.id, note.kind, note.rank, note.slot, note.epoch, note.step) == (0, "raise", 1, 5, 1, 3)
    assert note.pid == os.getpid()
    assert (note.t_s, note.monotonic_s) == (clock.now_s, clock.now_s)


def test_only_in_its_epoch(run: Run) -> None:
    hooks = injector(run, "raise:epoch=2")
    hooks.step_begins(0)
    hooks.joining(2, 1, WORLD)
    with pytest.raises(DrillFault):
        hooks.step_begins(0)


def test_during_recovery_means_a_later_epoch(run: Run) -> None:
    hooks = injector(run, "raise:point=restore")
    hooks.restoring(1, 1)
    with pytest.raises(DrillFault):
        hooks.restoring(2, 1)


def test_seconds_count_from_the_first_step(run: Run, clock: Clock) -> None:
    hooks = injector(run, "raise:at_s=0.05")
    hooks.step_begins(0)  # no clock yet
    firings.start_clock(run)
    hooks.step_begins(1)
    clock.move(0.04)
    hooks.step_begins(2)
    clock.move(0.02)
    with pytest.raises(DrillFault):
        hooks.step_begins(2)


@pytest.mark.parametrize(
    ("text", "touch"),
    [
        ("kill:step=2", lambda hooks: hooks.step_begins(2)),
        ("kill:point=save-manifest", lambda hooks: hooks.save_point("manifest")),
        ("kill:point=collective,step=1", lambda hooks: (hooks.step_begins(1), time.sleep(600))),
        ("crash-loop", lambda hooks: hooks.joining(3, 1, WORLD)),
    ],
)
def test_a_kill_is_a_kill_and_its_note_is_there(run: Run, text: str, touch: object) -> None:
    hooks = injector(run, text, rank=9)
    hooks._rank = 1
    child = os.fork()
    if not child:
        try:
            touch(hooks)  # type: ignore[operator]
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [note.pid for note in firings.read_firings(run)] == [child]


def test_a_crash_loop_fires_in_every_epoch(run: Run) -> None:
    [fault] = parse_faults(["crash-loop"])
    firings.write_schedule(run, [fault])
    assert [firings.claim_firing(run, fault, whom=1, epoch=epoch) for epoch in range(5)] == [True] * 5
    assert len(firings.read_firings(run)) == 5


def test_a_stopped_process_is_stopped(run: Run) -> None:
    hooks = injector(run, "hang:step=0", rank=9)
    hooks._rank = 1
    child = os.fork()
    if not child:
        try:
            hooks.step_begins(0)
        finally:
            os._exit(7)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_nan_in_a_gradient(run: Run) -> None:
    hooks = injector(run, "nan:step=1")
    grads = [torch.zeros(0), torch.zeros(2, 3)]
    hooks.step_begins(0)
    hooks.gradients(0, grads)
    assert torch.equal(grads[1], torch.zeros(2, 3))
    hooks.step_begins(1)
    hooks.gradients(1, grads)
    assert int(torch.isnan(grads[1]).sum()) == 1


def changed_bits(before: torch.Tensor, after: torch.Tensor) -> int:
    first, second = (tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in (before, after))
    return sum(bin(a ^ b).count("1") for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["weight", "moment", "update", "gradient"])
def test_one_bit(run: Run, dtype: torch.dtype, how: str) -> None:
    """Exactly one bit of what is named, also where the storage is strided, and none of the rest."""
    hooks = injector(run, f"flip:how={how},step=1,seed=3")
    held = {name: torch.randn(4, 6, dtype=torch.float64).to(dtype).t() for name in ("weight", "moment", "gradient")}
    before = {name: tensor.clone() for name, tensor in held.items()}
    for step in range(3):
        hooks.step_begins(step)
        hooks.gradients(step, [held["gradient"]])
        hooks.updated(step, shards(held["weight"]), shards(held["moment"]))
    name = "weight" if how == "update" else how
    assert {key: changed_bits(before[key], held[key]) for key in held} == {**dict.fromkeys(held, 0), name: 1}


def test_seeds_flip_different_bits(run: Run) -> None:
    found = set()
    for seed in range(20):
        weight = torch.zeros(8, 8)
        hooks = injector(run, f"flip:how=update,seed={seed}", rank=1)
        for path in firings.firings_folder(run).glob("fired-*"):
            path.unlink()
        hooks.step_begins(0)
        hooks.updated(0, shards(weight), [])
        found.add(bytes(weight.view(torch.uint8).flatten().tolist()))
    assert len(found) > 15


def test_slow_and_mute(run: Run, clock: Clock) -> None:
    hooks = injector(run, "slow:step=1,sleep_s=5,for_s=60", "mute:step=1,for_s=30")
    hooks.step_begins(0)
    assert hooks.heartbeat_allowed()
    assert sum(clock.slept_s) == 0
    hooks.step_begins(1)
    hooks.step_begins(2)
    assert sum(clock.slept_s) == 10
    assert not hooks.heartbeat_allowed()
    clock.move(20)
    assert hooks.heartbeat_allowed()
    clock.move(40)
    hooks.step_begins(3)
    assert sum(clock.slept_s) == 10


def test_out_of_memory(run: Run) -> None:
    hooks = injector(run, "memory:step=0", "memory:step=1,how=limit")
    with pytest.raises(MemoryError):
        hooks.step_begins(0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(RuntimeError) as caught:
        hooks.step_begins(1)
    assert _NO_MEMORY.search(str(caught.value))  # each allocator says it in its own words
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_full_disk_refuses_the_data_and_is_free_again(run: Run, clock: Clock) -> None:
    hooks = injector(run, "disk-full:for_s=0.1")
    hooks.step_begins(0)
    hooks.save_point("begin")
    with pytest.raises(OSError, match="No space left"):
        hooks.save_point("data")
    clock.move(0.11)
    hooks.save_point("begin")
    hooks.save_point("data")


def test_a_real_limit_on_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[float, Callable[[], None]]] = []

    class Timer:
        def __init__(self, after_s: float, function: Callable[[], None]) -> None:
            ends.append((after_s, function))

        def start(self) -> None: ...

    monkeypatch.setattr(inject, "threading", SimpleNamespace(Timer=Timer))
    hooks = injector(run, "disk-full:how=limit,for_s=0.2")
    hooks.save_point("begin")
    [(after_s, end)] = ends
    assert after_s == 0.2
    with pytest.raises(OSError, match="File too large"):
        (tmp_path / "big").write_bytes(bytes(100_000))
    end()
    (tmp_path / "big").write_bytes(bytes(100_000))


def test_two_limits_on_files_end_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second does not take the limit of the first for what was there before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ends: list[Callable[[], None]] = []
    timer = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(
        inject, "threading", SimpleNamespace(Timer=lambda after_s, function: ends.append(function) or timer)
    )
    try:
        inject.limit_files(for_s=2.0)
        inject.limit_files(for_s=2.0)
        for end in ends:
            end()
        (tmp_path / "big").write_bytes(bytes(100_000))
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
