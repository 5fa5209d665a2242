"""Flip one bit, look whether anybody notices, put it back: a thousand times for each kind of file, and in live state.

python benchmarks/bit_flips.py [--flips 1000] [--seed 22]

Each flip is caught (refused with a message), harmless (whatever was read is the same, value for value), or silent.
Files are those that Phalanx writes: a dataset, a run folder, a checkpoint of two ranks, exported weights. Live state is
weights and moments of four ranks under ZeRO-3 in a real run (`flip_callback.py`), by the sums that every step compares;
the run must end with the losses of a run without a flip.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from flip_callback import FLIPS

import phalanx
from phalanx.errors import PhalanxError
from phalanx.io.checksums import CHECKSUMS, file_sha256, verify_checksums, write_checksums
from phalanx.record.events import read_events
from phalanx.record.run import create_run
from phalanx.record.run_settings import SETTINGS
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress
from phalanx.train.data.token_samples import TokenDataset
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.restore import load_shards
from phalanx.train.state.save import save_checkpoint

Use = Callable[[], object]  # reads as training does; raises, or gives what it read


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What came of the flips."""

    what: str
    caught: int
    harmless: int
    silent: int


def flip_files(what: str, files: Sequence[Path], use: Use, *, flips: int, draw: random.Random) -> Tally:
    """Flip bits of files, one after the other, anywhere in them."""
    whole, counts = use(), {"caught": 0, "harmless": 0, "silent": 0}
    for number in range(flips):
        path = files[number % len(files)]
        data = path.read_bytes()
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            counts["harmless" if use() == whole else "silent"] += 1
        except PhalanxError:
            counts["caught"] += 1
        path.write_bytes(data)
    assert use() == whole
    return Tally(what=what, **counts)


def dataset(folder: Path) -> Path:
    """A few thousand tokens in several shards."""
    text = "\n\n".join(f"document {number} says that {number * 7} is not {number * 3}" for number in range(600))
    (folder / "text.txt").write_text(text)
    recipe = Recipe(
        origins=(TextOrigin(path=folder / "text.txt"),),
        vocab=300,
        heldout=0.1,
        reading=Reading(split_on="blank"),
        shard_tokens=3000,
    )
    build_dataset(recipe, folder / "data", lambda size: BuildProgress(io.StringIO(), size))
    return folder / "data"


def tokens(folder: Path) -> list[list[int]]:
    """Everything that training would read of it."""
    opened = TokenDataset.open(folder, "train", vocab=320)
    return [run.tolist() for run in opened.tokens(opened.num_tokens)]


def shard(name: str, values: torch.Tensor, rank: int) -> TensorShard:
    """Half of a tensor."""
    return TensorShard(
        name=name,
        tensor=values,
        shape=(2 * len(values),),
        start=(rank * len(values),),
        replicas=1,
        owner=True,
        groups={},
    )


def checkpoint(folder: Path) -> tuple[list[Path], Use]:
    """The files of a checkpoint of two ranks, and restoring it on one."""
    draw = torch.Generator().manual_seed(0)
    for rank in (1, 0):
        shards = [shard(name, torch.randn(64, generator=draw), rank) for name in ("w", "w#exp_avg")]
        saved = save_checkpoint(folder, step=1, attempt="a", shards=shards, meta={"data": "x"}, rank=rank, world=2)
    place = Path(str(saved.path))

    def restore() -> object:
        values = {name: torch.zeros(128) for name in ("w", "w#exp_avg")}
        targets = [
            TensorShard(name=name, tensor=one, shape=(128,), start=(0,), replicas=1, owner=True, groups={})
            for name, one in values.items()
        ]
        load_shards(place, targets)
        return {name: one.tolist() for name, one in values.items()}

    return sorted(place.iterdir()), restore


def weights(folder: Path) -> tuple[list[Path], Use]:
    """Files like those of an export, and comparing them before training starts from them."""
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2}\n')
    (folder / "model.safetensors").write_bytes(random.Random(1).randbytes(4096))
    write_checksums(folder, {path.name: file_sha256(path) for path in folder.iterdir()})

    def compare() -> object:
        _, problems = verify_checksums(folder, fix="")
        if problems:
            raise PhalanxError(problems)
        return [path.read_bytes() for path in sorted(folder.iterdir()) if path.name != CHECKSUMS]

    return sorted(folder.iterdir()), compare


JOB = """
name = "flips"
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 320
[data]
path = "data"
sequence = 32
[batch]
global_tokens = 512
micro = 2
[precision]
compute = "fp32"
[parallel]
tensor = 1
context = 1
pipeline = 1
shard = 4
zero = 3
[train]
samples = 0
[cluster]
spec = "local-cpu:4"
"""


def flip_live_state(root: Path, *, flips: int) -> list[Tally]:
    """Real runs whose live weights and moments are flipped bit by bit at the beginning of every step."""
    (root / "job.toml").write_text(JOB)
    steps = max(4, math.ceil(flips / (4 * FLIPS)) + 2)  # of four ranks; the first step has nothing to compare with
    code = f"{Path(__file__).with_name('flip_callback.py')}:FlipBits"
    whole = losses(train(root, steps))
    run = train(root, steps, callbacks=[code])
    counts: Counter[str] = Counter()
    for path in run.path.glob("flips-*.json"):
        counts.update(json.loads(path.read_text()))
    assert losses(run) == whole, "flips that were put back changed the run"
    return [
        Tally(
            what=f"live {what}, 4 ranks",
            caught=counts[f"{what}: caught"],
            harmless=0,
            silent=counts[f"{what}: silent"],
        )
        for what in ("weights", "moments")
    ]


def train(root: Path, steps: int, *, callbacks: Sequence[object] = ()) -> phalanx.Run:
    """A run of four ranks on this machine."""
    return phalanx.train(
        phalanx.load(root / "job.toml", overrides=["fault.digest_every=1000000"]),
        steps=steps,
        runs=root / "runs",
        callbacks=callbacks,
        allow_code=True,
        check=False,
        progress=False,
    )


def losses(run: phalanx.Run) -> list[float]:
    """Of every step."""
    return [event["loss"] for event in read_events(run.events(0))[0] if event["event"] == "step"]


def main() -> None:
    """Print a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=22)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = dataset(root)
        run = create_run(
            root, "flips", job_toml="[optim]\nlr = 0.003\n", job={"optim": {"lr": 0.003}}, plan_json='{"lr": 0.003}'
        )

        def settings() -> object:
            run.check_settings()
            return run.plan_text()

        kinds: list[tuple[str, Sequence[Path], Use]] = [
            ("dataset: manifest", [data / "manifest.json"], lambda: tokens(data)),
            ("dataset: tokens", sorted(data.glob("*-train-*.bin")), lambda: tokens(data)),
            ("dataset: block digests", sorted(data.glob("*-train-*.blocks")), lambda: tokens(data)),
            ("run: job, plan, id, SHA256SUMS", [run.path / one for one in (*SETTINGS, "run_id", CHECKSUMS)], settings),
            ("checkpoint: all files", *checkpoint(root / "checkpoints")),
            ("exported weights: all files", *weights(root / "out")),
        ]
        found = [flip_files(what, files, use, flips=args.flips, draw=draw) for what, files, use in kinds]
        found += flip_live_state(root, flips=args.flips)
    print("| one flipped bit in | caught | harmless | silent |\n|---|---|---|---|")
    for one in found:
        print(f"| {one.what} | {one.caught:,} | {one.harmless:,} | {one.silent:,} |")


if __name__ == "__main__":
    main()
