"""Flip one bit, look whether anybody notices, put it back: a thousand times for each kind of file, and in live state.

python benchmarks/bit_flips.py [--flips 1000] [--seed 22]

Each flip is caught (refused with a message), harmless (whatever was read is the same, value for value), or silent.
Files are those that Phalanx writes: a dataset, a run folder, a checkpoint of two ranks, exported weights. State is a
rank's weights and moments, compared as they are before an update.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.errors import PhalanxError
from phalanx.io.checksums import CHECKSUMS, file_sha256, verify_checksums, write_checksums
from phalanx.record.run import SETTINGS, create_run
from phalanx.train.data.build import Origin, Recipe, build_dataset
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import Progress
from phalanx.train.guard.divergence import ReplicaGuard
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
        origins=(Origin(path=folder / "text.txt"),),
        vocab=300,
        heldout=0.1,
        reading=Reading(split_on="blank"),
        shard_tokens=3000,
    )
    build_dataset(recipe, folder / "data", lambda size: Progress(io.StringIO(), size))
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


def flip_state(what: str, *, flips: int, draw: random.Random) -> Tally:
    """Flip bits of a tensor between an update and the next, in steps of which the guard remembers the state."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_003, generator=generator)
    guard = ReplicaGuard(lambda: [shard("w", values, 0)], every=1)
    bits, caught = values.view(torch.int32), 0
    for step in range(1, flips + 1):
        assert guard.check(step) is None
        place, mask = draw.randrange(len(bits)), 1 << draw.randrange(31)
        bits[place] ^= mask
        caught += guard.before(step) is not None
        bits[place] ^= mask
    return Tally(what=what, caught=caught, harmless=0, silent=flips - caught)


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
    found += [flip_state(f"live state at rest: {what}", flips=args.flips, draw=draw) for what in ("weights", "moments")]
    print("| one flipped bit in | caught | harmless | silent |\n|---|---|---|---|")
    for one in found:
        print(f"| {one.what} | {one.caught:,} | {one.harmless:,} | {one.silent:,} |")


if __name__ == "__main__":
    main()
