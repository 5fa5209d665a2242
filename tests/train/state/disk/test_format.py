"""The format of 0.6, from a checkpoint that 0.6 wrote (data/checkpoint_0_6): read back, and written the same today."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.rank_state import private_shards, read_private_tensors
from phalanx.train.state.reader import (
    CheckpointReader,
    newest_checkpoint,
    read_checkpoint_meta,
    read_rank_meta,
    verify_checkpoint,
)
from phalanx.train.state.restore import load_shards
from phalanx.train.state.save import save_checkpoint
from phalanx.train.state.whole_tensors import read_state, state_digest

ROOT = Path(__file__).parent / "data/checkpoint_0_6"
FOLDER = ROOT / "step-00000100"
META = {"data": "0123", "tokens": 51200, "optimizer_steps": 100, "loss_scale": None}


def tensors():
    """What 0.6 was given to save."""
    return {
        "embed.tokens.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4) / 8,
        "layers.0.attn.wq.weight": (torch.arange(12, dtype=torch.float64).reshape(4, 3) - 5) / 16,
        "layers.0.mlp.experts.up": torch.arange(8).reshape(4, 2).bfloat16(),
        "layers.0.mlp.router.counts": torch.arange(5) * 2**40,
        "norm.weight": (torch.arange(6) / 4).half(),
        "norm.weight#exp_avg": torch.arange(6) / 32,
        "scale": torch.tensor(3.5),
    }


def shards(rank):
    """Even tensors in two halves, the others on both ranks and written by rank 0; one tensor of each rank's own."""
    found = []
    for name, tensor in tensors().items():
        is_split = tensor.dim() > 0 and tensor.shape[0] % 2 == 0
        rows = tensor.shape[0] // 2 if is_split else 0
        local = tensor[rank * rows : (rank + 1) * rows].clone() if is_split else tensor.clone()
        start = (rank * rows, *(0,) * (tensor.dim() - 1)) if tensor.dim() else ()
        found.append(
            TensorShard(
                name=name,
                tensor=local,
                shape=tuple(tensor.shape),
                start=start,
                replicas=1 if is_split else 2,
                owner=is_split or rank == 0,
                groups={},
            )
        )
    return found + private_shards(rank, {"exchange/0": torch.full((3,), rank + 0.5)})


def test_a_checkpoint_of_0_6_is_read(kit):
    found = newest_checkpoint(ROOT, verify=True)
    assert (found.path, found.step, found.world, found.generation, found.warnings) == (FOLDER, 100, 2, 3, ())
    assert verify_checkpoint(FOLDER).code == "phalanx 0.6.0, torch 2.13.0"
    assert read_checkpoint_meta(FOLDER) == {**META, "step": 100, "world": 2}
    assert [read_rank_meta(FOLDER, rank)["random"] for rank in (0, 1)] == [{"cpu": "00" * 8}, {"cpu": "01" * 8}]
    state = read_state(FOLDER, select=lambda name: not name.startswith("#"))
    assert state.keys() == tensors().keys()
    assert all(kit.same_bits(state[name], tensor) for name, tensor in tensors().items())
    assert read_private_tensors(CheckpointReader(FOLDER), 1)["exchange/0"].tolist() == [1.5] * 3
    assert state_digest(FOLDER) == "3e27f804b9957bd25f9dcdc1021f744dec02be36252ff7dc290b8618cd180c09"


def test_a_checkpoint_of_0_6_fills_another_layout(kit):
    whole = [kit.shard(name, torch.zeros_like(tensor)) for name, tensor in tensors().items()]
    load_shards(FOLDER, whole)
    assert all(kit.same_bits(one.tensor, tensors()[one.name]) for one in whole)


def test_the_same_state_is_written_as_0_6_wrote_it(tmp_path):
    """Tensors and indexes byte for byte; the manifest too, but for the versions in it and so its digest."""
    for rank in (1, 0):
        meta = {"random": {"cpu": f"{rank:02x}" * 8}}
        path = save_checkpoint(
            tmp_path,
            step=100,
            attempt="a1.1",
            shards=shards(rank),
            meta=META,
            rank=rank,
            world=2,
            generation=3,
            rank_meta=meta,
        ).path
    assert {file.name for file in path.iterdir()} == {file.name for file in FOLDER.iterdir()}
    for file in FOLDER.glob("rank-*"):
        assert (path / file.name).read_bytes() == file.read_bytes(), file.name
    ours, theirs = (json.loads((folder / "manifest.json").read_bytes()) for folder in (path, FOLDER))
    for manifest in (ours, theirs):
        del manifest["code"], manifest["sha256"]
    assert ours == theirs
