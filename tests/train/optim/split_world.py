"""One rank of four that hold parts of tensors: `python split_world.py RANK FOLDER`. Writes what differed from no split.

Two groups cut the tensors, "tensor" (ranks 0,1 and 2,3) and "shard" (ranks 0,2 and 1,3), in every way a layout does,
with sizes that do not divide and parts that are empty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.job.schema import Optim
from phalanx.train.optim.base import Optimizer
from phalanx.train.optim.build_optimizer import build_optimizer
from phalanx.train.optim.gathered_tensors import gather_tensor, local_region
from phalanx.train.parallel.tensor_shard import TensorShard

WORLD = 4
STEPS = 4
Spec = dict[int, str]  # dimension -> letters of the groups that cut it, outermost first
SHAPES: dict[str, tuple[tuple[int, ...], Spec]] = {
    "embed.tokens.weight": ((7, 4), {0: "ts"}),
    "layers.0.attn.wq.weight": ((6, 5), {0: "ts"}),
    "layers.1.attn.wq.weight": ((6, 5), {0: "ts"}),
    "layers.2.attn.wq.weight": ((6, 5), {0: "ts"}),
    "layers.0.attn.wo.weight": ((5, 9), {1: "t", 0: "s"}),
    "layers.0.attn_norm.weight": ((3,), {0: "s"}),
    "layers.1.attn_norm.weight": ((1,), {0: "s"}),
    "layers.0.mlp.gate.weight": ((1, 8), {0: "ts"}),
    "layers.0.mlp.experts.up": ((4, 7, 3), {0: "t", 1: "s"}),
    "layers.1.mlp.experts.up": ((3, 4, 5), {0: "ts"}),
    "layers.1.mlp.down.weight": ((9, 4), {1: "s"}),
    "layers.2.mlp.down.weight": ((9, 4), {}),
    "head.weight": ((7, 4), {0: "t", 1: "s"}),
}
OTHER: dict[int, str] = {0: "st"}  # the split a state is loaded into: every tensor's first dimension


def shard_of(name: str, whole: torch.Tensor, spec: Spec, groups: dict[str, ProcessGroup]) -> TensorShard:
    """This rank's part, by torch.chunk itself."""
    part, start = whole, [0] * whole.ndim
    for dim, letters in spec.items():
        for letter in letters:
            group = groups[letter]
            size = -(-part.shape[dim] // group.size())
            start[dim] += min(size * group.rank(), part.shape[dim])
            chunks = torch.chunk(part, group.size(), dim=dim)
            part = chunks[group.rank()] if group.rank() < len(chunks) else part.narrow(dim, 0, 0)
    idle = [group for letter, group in groups.items() if not any(letter in letters for letters in spec.values())]
    return TensorShard(
        name=name,
        tensor=part.clone(),
        shape=tuple(whole.shape),
        start=tuple(start),
        replicas=prod(group.size() for group in idle),
        owner=all(group.rank() == 0 for group in idle),
        groups={dim: tuple(groups[letter] for letter in letters) for dim, letters in spec.items()},
    )


def decays(name: str) -> bool:
    """No decay of norms."""
    return "norm" not in name


def gradients(step: int) -> dict[str, torch.Tensor | None]:
    """Whole gradients; one parameter takes no part in the second step."""
    generator = torch.Generator().manual_seed(step)
    grads: dict[str, torch.Tensor | None] = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _) in SHAPES.items()
    }
    if step == 1:
        grads["layers.0.attn.wq.weight"] = None
    return grads


def take_step(optimizer: Optimizer, shards: list[TensorShard], step: int) -> None:
    """Hand every shard its part of the whole gradient."""
    for shard in shards:
        grad = gradients(step)[shard.name]
        shard.tensor.grad = None if grad is None else local_region(shard, grad).clone()
    optimizer.step(1e-2 / (step + 1))


def differences(shards: list[TensorShard], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each whole tensor from the expected one."""
    assert [shard.name for shard in shards] == list(expected)
    found = {}
    for shard in shards:
        whole = gather_tensor(shard, shard.tensor.detach())
        difference = (whole - expected[shard.name]).abs()
        found[shard.name] = float(difference.max()) if difference.numel() else 0.0
    return found


def compare(name: str, groups: dict[str, ProcessGroup]) -> dict[str, dict[str, float]]:
    """Train split and unsplit; then load the split state into another split and go on."""
    generator = torch.Generator().manual_seed(99)
    wholes = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, (s, _) in SHAPES.items()}

    def start(spec_of: Callable[[str], Spec]) -> tuple[list[TensorShard], Optimizer]:
        shards = [shard_of(n, whole, spec_of(n), groups) for n, whole in wholes.items()]
        return shards, build_optimizer(shards, optim=Optim(name=name), state_dtype="fp32", decays=decays)

    alone, reference = start(lambda n: {})
    parts, split = start(lambda n: SHAPES[n][1])
    for step in range(STEPS):
        take_step(reference, alone, step)
        take_step(split, parts, step)
    results = {
        "weights": differences(parts, {shard.name: shard.tensor for shard in alone}),
        "state": differences(split.state(), {shard.name: shard.tensor for shard in reference.state()}),
        "owned": owned(split.state(), groups),
    }
    saved = {shard.name: gather_tensor(shard, shard.tensor) for shard in split.state()}
    wholes = {shard.name: gather_tensor(shard, shard.tensor) for shard in parts}
    parts, other = start(lambda n: OTHER)
    other.load({shard.name: local_region(shard, saved[shard.name]) for shard in other.state()}, split.steps)
    for step in range(STEPS, STEPS + 2):
        take_step(reference, alone, step)
        take_step(other, parts, step)
    results["resumed"] = differences(parts, {shard.name: shard.tensor for shard in alone})
    return results


def owned(state: list[TensorShard], groups: dict[str, ProcessGroup]) -> dict[str, float]:
    """How far any element of a state tensor is from having one owner and as many holders as its shard says."""
    found = {}
    for shard in state:
        owners, holders = torch.zeros(shard.shape), torch.zeros(shard.shape)
        local_region(shard, owners).fill_(float(shard.owner))
        local_region(shard, holders).fill_(1.0)
        for count in (owners, holders):
            for group in groups.values():
                dist.all_reduce(count, group=group)
        found[shard.name] = float((owners - 1).abs().max() + (holders - shard.replicas).abs().max())
    return found


def main() -> None:
    """Join, compare every optimizer, write what was found."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shard = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = {"t": tensor[rank // 2], "s": shard[rank % 2]}
    found = {name: compare(name, groups) for name in ("adamw", "adafactor", "muon")}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
