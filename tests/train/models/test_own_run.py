"""A network of the user's own as a person trains it: `phalanx train`, resumed on other ranks, and exported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_dataset import write_dataset

from phalanx.record.run import open_run
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.whole_tensors import read_state

JOB = """
name = "own"
[model]
module = "own_networks.py:batch_norm"
layers = 2
hidden = 32
heads = 4
ffn = 32
vocab = 300
[data]
path = "data"
sequence = 16
tokens = 256
seed = 5
[batch]
global_sequences = 4
micro = 1
[optim]
lr = 1e-9
weight_decay = 0
[precision]
compute = "fp32"
[parallel]
zero = 3
[cluster]
spec = "local-cpu:2"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("own_networks.py"), tmp_path)
    write_dataset(tmp_path, documents=300, heldout=0.01)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def phalanx(folder: Path, *arguments: str, packages: str = "") -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    if packages:
        environ["PYTHONPATH"] = os.pathsep.join([packages, *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "phalanx", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_trained_resumed_and_exported(folder: Path) -> None:
    said = phalanx(folder, "train", "job.toml", "--allow-code", "--no-check", "--no-probe")
    assert "own_networks.py:batch_norm built 25,900 parameters, the shape says" in said
    (run,) = (folder / "runs").iterdir()
    phalanx(folder, "train", "--resume", str(run), "--steps", "6", "--allow-code", "--cluster", "local-cpu:1")
    phalanx(folder, "export", str(run), "out", "--dtype", "bf16")

    sys.path.insert(0, str(folder))
    own = __import__("own_networks")
    torch.manual_seed(5)
    built = own.batch_norm(SimpleNamespace(vocab=300, hidden=32, layers=2)).state_dict()
    exported = load_file(folder / "out" / "model.safetensors")
    assert sorted(exported) == sorted(built)
    checkpoint = newest_checkpoint(open_run(str(run)).checkpoints)
    assert checkpoint is not None
    state = {name.removeprefix("network."): one for name, one in read_state(checkpoint.path).items()}
    for name, first in built.items():
        if "running" in name or "batches" in name:
            assert torch.equal(exported[name], state[name]), name  # not rounded to bf16
            assert not torch.equal(state[name], first), name
        else:  # steps of 1e-9 leave the first values, which are the constructor's own
            assert exported[name].dtype == torch.bfloat16
            assert torch.allclose(state[name], first, rtol=0, atol=1e-7), name
    assert state["layers.0.first.num_batches_tracked"] == 6 * 4
    told = json.loads((folder / "out" / "model.json").read_text())
    assert (told["step"], told["module"]) == (6, f"{folder / 'own_networks.py'}:batch_norm")


def test_a_network_of_an_installed_package_needs_no_consent(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    (folder / "own_networks.py").rename(site / "tiny_nets.py")
    info = site / "tiny_nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.models]\ntiny-net = tiny_nets:batch_norm\n")
    (folder / "job.toml").write_text(JOB.replace("own_networks.py:batch_norm", "tiny-net"))
    said = phalanx(folder, "train", "job.toml", "--no-check", "--no-probe", packages=str(site))
    assert "tiny-net built 25,900 parameters, the shape says" in said
    (run,) = (folder / "runs").iterdir()
    assert open_run(str(run)).status()["state"] == "done"
    phalanx(folder, "export", str(run), "out", packages=str(site))
    assert json.loads((folder / "out" / "model.json").read_text())["module"] == "tiny-net"
