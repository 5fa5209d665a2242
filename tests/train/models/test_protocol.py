"""A network of the user's own, from a real file named by a real job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.errors import UserError
from phalanx.job.load import load
from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.own_model import (
    build_outline,
    build_stage,
    differs_from_shape,
    refuse_network,
    tables_of,
)
from phalanx.train.models.protocol import Network, Staged, build_model
from phalanx.train.optim.muon import takes_muon
from phalanx.train.parallel.tensor_shard import TensorShard

CODE = """
import torch
from torch import nn

class Mixer(nn.Module):
    def __init__(self, shape, width, layers, first=True, last=True):
        super().__init__()
        self.shape, self.width = shape, width
        self.table = nn.Embedding(shape.vocab, width) if first else None
        self.layers = nn.ModuleDict({str(i): nn.Linear(width, width) for i in layers})
        self.head = nn.Linear(width, shape.vocab) if last else None

    def forward(self, x):
        x = x if self.table is None else self.table(x)
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return x if self.head is None else self.head(x)

    def blocks(self):
        return {f"layers.{i}": layer for i, layer in self.layers.items()}

class Cut(Mixer):
    def stage(self, layers, *, first, last):
        return Cut(self.shape, self.width, layers, first, last)

def build(shape, width=8):
    return Mixer(shape, width, range(shape.layers))

def cut(shape, width=8):
    return Cut(shape, width, range(shape.layers))

def misnamed(shape):
    model = build(shape)
    model.blocks = lambda: {"block0": model.layers["0"]}
    return model

def a_number(shape):
    return 3

def no_blocks(shape):
    return nn.Linear(2, 2)

def broken(shape):
    return shape.no_such_key

def scalar(shape):
    model = build(shape)
    model.gate = nn.Parameter(torch.tensor(0.5))
    return model

def shared(shape):
    model = build(shape)
    model.layers["1"].weight = model.layers["0"].weight
    model.layers["0"].bias = nn.Parameter(model.head.bias.detach()[:8])
    return model

def ends(shape):
    model = Cut(shape, 8, range(shape.layers))
    model.head.weight = model.table.weight
    return model

class Other(Cut):
    def stage(self, layers, *, first, last):
        return Shifted(self.shape, 8, layers, first, last)

class Shifted(Cut):
    def __init__(self, shape, width, layers, first, last):
        super().__init__(shape, width, layers, first, last)
        self.extra = nn.Parameter(torch.zeros(3))

def renamed(shape):
    return Other(shape, 8, range(shape.layers))

def odd(shape):
    model = build(shape)
    model.register_parameter("whole", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("a#b", nn.Parameter(torch.zeros(3)))
    model.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("angles", torch.zeros(2, dtype=torch.complex64), persistent=False)
    model.lazy = nn.LazyLinear(3)
    model.state = Extra()
    return model

class Extra(nn.Module):
    def get_extra_state(self):
        return {"count": 3}

def noisy(shape):
    model = build(shape)
    model.drop, model.quiet = nn.Dropout(0.1), nn.Dropout(0.0)
    model.gru = nn.GRU(8, 8, num_layers=2, dropout=0.2)
    model.norm, model.free = nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)
    return model
"""
JOB = """
[model]
module = "my_model.py:build"
layers = 2
hidden = 16
heads = 2
ffn = 16
vocab = 50
[model.arguments]
width = 12
[batch]
global_sequences = 8
"""
SHAPE = ModelShape(
    name="mine", layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=50, module="my_model.py:build"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_model.py").write_text(CODE)
    (tmp_path / "job.toml").write_text(JOB)
    yield tmp_path
    sys.modules.pop("phalanx_module_my_model", None)


def complaint(shape: ModelShape, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        build_model(shape, allow_code=True, folder=folder)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_a_job_names_a_network_and_its_arguments(folder: Path) -> None:
    shape = load(folder / "job.toml").job.model
    assert shape.arguments == '{"width": 12}'
    model = build_model(shape, allow_code=True, folder=folder, seed=4)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 50)
    assert model.table.embedding_dim == 12  # type: ignore[union-attr]
    twin = build_model(shape, allow_code=True, folder=folder, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_code_is_not_run_unless_allowed(folder: Path) -> None:
    (folder / "my_model.py").write_text("open('ran', 'w')")
    with pytest.raises(UserError) as caught:
        build_model(SHAPE, folder=folder)
    assert str(caught.value).splitlines() == [
        'model mine: model.module = "my_model.py:build" names code to run',
        "  a job file somebody else wrote could do anything that way",
        "  read that code, then give --allow-code (allow_code=True in Python)",
    ]
    assert not Path("ran").exists()


def test_an_entry_point_needs_no_consent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = folder / "tiny_nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-nets\nVersion: 1.0\n")
    points = {"tiny-net": "tiny_nets:build", "number": "tiny_nets:COUNT", "gone": "tiny_gone:build"}
    lines = "\n".join(f"{name} = {target}" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[phalanx.models]\n{lines}\n")
    (folder / "tiny_nets.py").write_text(CODE + "\nCOUNT = 3\n")
    monkeypatch.syspath_prepend(str(folder))
    model = build_model(replace(SHAPE, module="tiny-net"), seed=4)
    same = build_model(SHAPE, allow_code=True, folder=folder, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))

    def said(name: str) -> str:
        return complaint(replace(SHAPE, module=name), folder)

    assert said("tiny-nte").splitlines() == [
        "model.module: no installed package offers 'tiny-nte' as an entry point of phalanx.models",
        "  did you mean tiny-net?",
    ]
    assert "the entry point 'number' of phalanx.models is of type int, which cannot be called" in said("number")
    assert "gone cannot be imported: ModuleNotFoundError: No module named 'tiny_gone'" in said("gone")
    sys.modules.pop("tiny_nets", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_model.py:biuld", "my_model.py:biuld: my_model.py has no function biuld\n  did you mean build?"),
        ("mymodel.py:build", "FOLDER/mymodel.py: there is no such file"),
        ("no_such_package.x:build", "cannot be imported: ModuleNotFoundError"),
        ("my_model.py:a_number", "my_model.py:a_number: returned int, not a torch.nn.Module"),
        ("my_model.py:no_blocks", "my_model.py:no_blocks: Linear has no blocks()"),
        ("my_model.py:misnamed", 'blocks() calls a part "block0", which is not its name in the module'),
        ("my_model.py:broken", "FOLDER/my_model.py:44: my_model.py:broken raised: AttributeError: "),
    ],
)
def test_what_is_wrong_with_the_code_is_said(folder: Path, name: str, message: str) -> None:
    assert message in complaint(replace(SHAPE, module=name), folder)


def test_code_that_does_not_run_and_arguments_that_do_not_fit(folder: Path) -> None:
    wrong = replace(SHAPE, arguments='{"depth": 2}')
    assert "model.arguments: do not fit my_model.py:build: got an unexpected" in complaint(wrong, folder)
    (folder / "my_model.py").write_text("import math\nmath.no_such_function()\n")
    assert "FOLDER/my_model.py:2: my_model.py:build cannot be run: AttributeError" in complaint(SHAPE, folder)


def test_a_package_of_the_python_path_can_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    model = build_model(replace(SHAPE, module="my_model:build"), allow_code=True)
    assert isinstance(model, Network)
    sys.modules.pop("my_model")


ONE = Layout(
    data=1,
    shard=1,
    tensor=1,
    context=1,
    pipeline=1,
    virtual_pipeline=1,
    expert=1,
    zero=0,
    sequence_parallel=False,
    micro_batch=1,
    accumulation=1,
    recompute="none",
    precision="fp32",
    schedule="1f1b",
    offload="none",
    compression="none",
)


def test_layouts_it_cannot_have_and_sizes_it_has_not(folder: Path) -> None:
    model = build_model(SHAPE, allow_code=True, folder=folder)
    refuse_network(SHAPE, model, replace(ONE, data=4, shard=4, zero=3))
    with pytest.raises(UserError) as caught:
        refuse_network(SHAPE, model, replace(ONE, pipeline=4, tensor=2, context=2))
    assert [problem.where for problem in caught.value.problems] == [
        "parallel.pipeline",
        "parallel.tensor",
        "parallel.context",
    ]
    warning = differs_from_shape(model, SHAPE)
    assert warning is not None
    assert "my_model.py:build built 994 parameters, the shape says" in warning.what


def test_stages_of_an_own_network(folder: Path) -> None:
    shape = replace(SHAPE, module="my_model.py:cut")
    whole, first, last = (
        build_stage(shape, layers=layers, first=begins, last=ends, allow_code=True, folder=folder).to_empty(
            device="cpu"
        )
        for layers, begins, ends in ((range(2), True, True), (range(1), True, False), (range(1, 2), False, True))
    )
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    refuse_network(shape, build_model(shape, allow_code=True, folder=folder), replace(ONE, pipeline=2))
    state = whole.state_dict()
    assert all(name.startswith("network.") for name in state)
    for part in (first, last):
        part.load_state_dict({name: state[name] for name in part.state_dict()})
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(last(first(tokens)), whole(tokens))
    assert [dict(whole.named_modules())[name] for name in whole.blocks()] == list(whole.layers.values())
    assert (first.head, last.head is not None) == (None, True)


def test_an_own_network_is_never_mistaken_for_the_decoder() -> None:
    with pytest.raises(UserError) as caught:
        Decoder(SHAPE)
    assert 'module = "my_model.py:build" is a network of your own' in str(caught.value)


def test_the_decoder_is_a_network_too() -> None:
    shape = replace(SHAPE, module="")
    model = build_model(shape)
    assert isinstance(model, Decoder)
    assert isinstance(model, Network)
    assert isinstance(model, Staged)
    refuse_network(shape, model, replace(ONE, tensor=2, pipeline=2))
    assert differs_from_shape(model, shape) is None
    stage = build_stage(shape, layers=range(1, 2), first=False, last=True)
    assert list(stage.blocks()) == ["layers.1"]


# ---- what would be lost or changed unnoticed is refused by name ------------------------------------------------------


def refused(name: str, folder: Path, layout: Layout = ONE, **settings: object) -> dict[str, str]:
    shape = replace(SHAPE, module=f"my_model.py:{name}")
    with pytest.raises(UserError) as caught:
        refuse_network(shape, build_outline(shape, allow_code=True, folder=folder), layout, **settings)
    return {problem.where: problem.what for problem in caught.value.problems}


def test_parameters_that_cannot_be_sharded(folder: Path) -> None:
    sharded = replace(ONE, data=2, shard=2, zero=3)
    assert refused("scalar", folder, sharded) == {
        "gate": "is a parameter without dimensions, and zero = 3 cuts along the first"
    }
    assert refused("shared", folder, sharded) == {"layers.0.weight": "is one parameter in layers.0, layers.1"}
    for name in ("scalar", "shared"):
        shape = replace(SHAPE, module=f"my_model.py:{name}")
        refuse_network(shape, build_outline(shape, allow_code=True, folder=folder), ONE)


def test_tensors_that_could_not_be_kept(folder: Path) -> None:
    assert refused("odd", folder) == {
        "whole": "is a parameter of int64",
        "'a#b'": 'a name with "#" or an unprintable character',
        "turns": "is a buffer of complex64, which checkpoints cannot hold",
        "lazy.weight": "is a lazy parameter: its size is not known before the first forward",
        "lazy.bias": "is a lazy parameter: its size is not known before the first forward",
        "state": "Extra keeps extra state (get_extra_state)",
    }


def test_random_numbers_and_statistics_under_promises_they_break(folder: Path) -> None:
    assert refused("noisy", folder, reproducible=True) == {
        "drop": "Dropout with numerics.reproducible",
        "gru": "GRU with numerics.reproducible",
        "norm": "BatchNorm1d with numerics.reproducible",
    }
    assert refused("noisy", folder, compute="bf16") == {"norm": "BatchNorm1d with precision.compute = 'bf16'"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ends", "holds one of table.weight and head.weight, which are one tensor in the whole network"),
        ("renamed", "holds extra of [3], and the whole network has no tensor of that name"),
    ],
)
def test_stages_that_would_part_from_the_whole(folder: Path, name: str, message: str) -> None:
    shape = replace(SHAPE, module=f"my_model.py:{name}")
    with pytest.raises(UserError) as caught:
        build_stage(shape, layers=range(1), first=True, last=False, allow_code=True, folder=folder)
    assert message in str(caught.value)


def test_muon_leaves_tables_and_convolutions_of_an_own_network_to_adamw(folder: Path) -> None:
    network = build_model(SHAPE, allow_code=True, folder=folder)
    assert tables_of(network, SHAPE.vocab) == {"table.weight", "head.weight", "head.bias"}
    tables = {f"network.{name}" for name in tables_of(network, SHAPE.vocab)}

    def shard(name: str, *shape: int) -> TensorShard:
        zeros = torch.zeros(shape)
        return TensorShard(
            name=name, tensor=zeros, shape=shape, start=(0,) * len(shape), replicas=1, owner=True, groups={}
        )

    by_muon = {"network.table.weight": (50, 8), "network.layers.0.weight": (8, 8), "network.conv.weight": (8, 8, 3)}
    assert [name for name, size in by_muon.items() if takes_muon(shard(name, *size), tables)] == [
        "network.layers.0.weight"
    ]
