"""Networks of the user's own against plain PyTorch: built, initialised and trained the user's way, to 1e-12."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model

from phalanx.errors import UserError
from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.train.data.batches import IGNORED
from phalanx.train.models.hf_weights import read_named, save_named
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.whole_tensors import read_state
from phalanx.train.verify.ranks import run_ranks
from phalanx.train.verify.trial import HELD_OUT, Trial, TrialOutcome, join_rank_outcomes, make_batch

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
networks, tasks = importlib.import_module("own_networks"), importlib.import_module("own_tasks")

NAMES = ("positions", "attention", "recurrent", "batch_norm", "tied")
STAGED = ("positions", "attention", "recurrent", "batch_norm")
SEQUENCES, SEQUENCE, MICRO, SEED, LR = 8, 16, 2, 7, 1e-2
State = dict[str, torch.Tensor]


def shape_of(name: str) -> ModelShape:
    path = Path(networks.__file__)
    return ModelShape(
        name=name, layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=32, vocab=64, module=f"{path}:{name}"
    )


@cache
def plainly(name: str, steps: int) -> tuple[list[float], float, State]:
    """Losses, the loss on a batch that is not learnt from, and the state: a loop as anybody would write it."""
    optim = Optim()
    torch.manual_seed(SEED)
    model = getattr(networks, name)(shape_of(name)).double()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=optim.betas, eps=optim.eps)
    losses = []
    for step in range(steps):
        tokens, targets = make_batch(step, sequences=SEQUENCES, sequence=SEQUENCE, vocab=64)
        valid = (targets != IGNORED).sum()
        total = 0.0
        for x, y in zip(tokens.split(MICRO), targets.split(MICRO), strict=True):
            loss = summed(model(x), y) / valid
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(trained, optim.clip)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    tokens, targets = make_batch(HELD_OUT, sequences=SEQUENCES, sequence=SEQUENCE, vocab=64)
    with torch.no_grad():
        pairs = zip(tokens.split(MICRO), targets.split(MICRO), strict=True)
        held_out = sum(summed(model(x), y).item() for x, y in pairs)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return losses, held_out, state


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def trials_of(
    trial: Callable[..., Trial], names: tuple[str, ...], folder: Path, *, resume: Path | None = None, **changes: Any
) -> list[Trial]:
    made = []
    for name in names:
        one = trial(shape_of(name), allow_code=True, seed=SEED, steps=2, save=str(folder / name), **changes)
        made.append(one if resume is None else replace(one, resume=str(resume / name)))
    return made


def run_all(trials: list[Trial]) -> list[TrialOutcome]:
    ranks = run_ranks(tasks.run_all, trials[0].settings.layout.devices, trials)
    return [join_rank_outcomes(list(each)) for each in zip(*ranks, strict=True)]


def compare(name: str, outcome: TrialOutcome, folder: Path, *, first: int = 0) -> None:
    steps = first + len(outcome.losses)
    losses, held_out, state = plainly(name, steps)
    assert outcome.quarrels == []
    assert outcome.losses == pytest.approx(losses[first:], rel=1e-12)
    assert outcome.evaluations[-1][0] == pytest.approx(held_out, rel=1e-12)
    same(saved(folder / name), state)


def saved(root: Path) -> State:
    found = newest_checkpoint(root)
    assert found is not None
    return {name.removeprefix("network."): tensor for name, tensor in read_state(found.path).items()}


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The state of the plain loop, of which ours holds a tied weight once."""
    once = {name: tensor for name, tensor in wanted.items() if name != "head.weight" or "head.weight" in got}
    once = {name: tensor for name, tensor in once.items() if name != "layers.1.scales" or name in got}
    assert sorted(got) == sorted(once)
    for name, tensor in once.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.allclose(got[name], tensor, rtol=1e-12, atol=1e-12), name


LAYOUTS = {
    "one rank": {},
    "data": {"data": 2},
    "zero 3": {"data": 2, "shard": 2, "zero": 3},
    "zero 2, hsdp, recompute": {"data": 4, "shard": 2, "zero": 2, "recompute": "full", "micro_batch": 2},
    "zero 1, offload": {"data": 2, "shard": 2, "zero": 1, "offload": "parameters"},
    "pipeline": {"pipeline": 2},
    "selective recompute": {"recompute": "selective"},
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_a_plain_loop(layout: str, trial: Callable[..., Trial], tmp_path: Path) -> None:
    names = STAGED if layout == "pipeline" else NAMES
    trials = trials_of(trial, names, tmp_path, **LAYOUTS[layout])
    for name, outcome in zip(names, run_all(trials), strict=True):
        compare(name, outcome, tmp_path)


def test_goes_on_in_another_layout(trial: Callable[..., Trial], tmp_path: Path) -> None:
    """Buffers, frozen and tied weights through a checkpoint, those that it does not hold included."""
    run_all(trials_of(trial, NAMES, tmp_path / "a", data=2, shard=2, zero=3))
    again = trials_of(trial, NAMES, tmp_path / "b", resume=tmp_path / "a", data=4)
    for name, outcome in zip(NAMES, run_all(again), strict=True):
        compare(name, outcome, tmp_path / "b", first=2)


def test_starts_from_a_file_under_its_own_names(trial: Callable[..., Trial], tmp_path: Path) -> None:
    """`train.weights` of an own network: what `phalanx export` writes, or safetensors of its state_dict()."""
    _, _, state = plainly("tied", 2)
    once = {name: one for name, one in state.items() if name not in ("head.weight", "layers.1.scales")}
    save_named(once, tmp_path / "out", tied={"head.weight": "table.weight"})
    wanted = trial(shape_of("tied"), allow_code=True, save=str(tmp_path / "saved"), data=2, shard=2, zero=3)
    run_ranks(tasks.take_and_save, 2, wanted, str(tmp_path / "out"))
    same(saved(tmp_path / "saved"), state)

    plain = networks.tied(shape_of("tied"))  # in float32: .double() would make two of the table that layers share
    assert load_model(plain, tmp_path / "out" / "model.safetensors") == (set(), [])
    assert all(torch.equal(plain.state_dict()[name], one.float()) for name, one in state.items())

    sizes = {name: one.shape for name, one in once.items()} | {"head.bias": (3,), "more": (1,)}
    del sizes["table.weight"]
    with pytest.raises(UserError) as caught:
        list(read_named(tmp_path / "out", sizes, wanted=sizes))
    assert [problem.what for problem in caught.value.problems] == [
        "lacks more",
        "has tensors this network does not: table.weight",
        "has tensors of another size: head.bias [64] instead of [3]",
    ]


# ---- buffers that forward changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "shard": 2, "zero": 3}], ids=["data", "zero 3"])
def test_changed_buffers_are_the_first_ranks_on_all(layout: dict[str, int], trial: Callable[..., Trial]) -> None:
    """In whatever way they are changed; the guard takes none of them for bad memory."""
    wanted = trial(shape_of("counting"), allow_code=True, seed=SEED, steps=3, **layout)
    first, second = run_ranks(tasks.step_guarded, 2, wanted)
    assert first.quarrels == second.quarrels == []
    assert first.values == second.values
    assert first.values["network.steps"] == [6.0]  # three steps of two micro-batches on each rank
    assert first.values["network.seen"] == [0.0, float(first.tokens[-1]), 0.0]
    assert first.tokens[-1] != second.tokens[-1]
    assert first.values["network.constant"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert first.first_rank == {"network.steps", "network.seen", "network.scratch"}
    assert first.unsaved == ["network.scratch"]
    assert first.drawn != second.drawn  # dropout falls on other places of other sequences


def test_batch_norm_is_not_taken_for_bad_memory(trial: Callable[..., Trial]) -> None:
    wanted = trial(shape_of("batch_norm"), allow_code=True, seed=SEED, steps=2, data=2)
    first, second = run_ranks(tasks.step_guarded, 2, wanted)
    assert first.quarrels == second.quarrels == []
    assert (first.first_rank, first.unsaved) == (set(), [])


def test_a_buffer_that_grows_is_refused_by_name(trial: Callable[..., Trial]) -> None:
    with pytest.raises(UserError) as caught:
        run_ranks(tasks.step_guarded, 1, trial(shape_of("growing"), allow_code=True, steps=1))
    assert str(caught.value).splitlines()[0] == ("network.cache: is a buffer of [2], and forward made it one of [32]")


def test_the_same_bits_on_any_number_of_ranks_are_not_promised(trial: Callable[..., Trial]) -> None:
    wanted = trial(shape_of("counting"), allow_code=True, steps=1, data=2, reproducible=True)
    with pytest.raises(UserError) as caught:
        run_ranks(tasks.step_guarded, 2, wanted)
    assert "numerics.reproducible: forward changes the buffer network." in str(caught.value)
