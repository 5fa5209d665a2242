"""What comparing blocks of tokens costs: reading samples with digests and without, and beside a training step.

python benchmarks/data_blocks.py [--megatokens 64] [--samples 20000] [--rounds 5]

Samples of 256, 1,024 and 4,096 tokens are read in the order of the sampler from a dataset larger than the blocks that a
rank keeps, from the page cache: nothing waits for a disk, so that the share of the digest is the largest it can be.
Rounds take turns; the median counts.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.job.dataset import BLOCK_BYTES, DatasetManifest, Source, digest_blocks
from phalanx.job.dataset import Shard as TokenFile
from phalanx.train.data.token_samples import TokenDataset


def build(folder: Path, tokens: int) -> DatasetManifest:
    """One shard of random tokens."""
    np.random.default_rng(0).integers(0, 8192, tokens).astype("<u2").tofile(folder / "a.bin")
    (folder / "a.idx").write_bytes(bytes(16))
    (folder / "tokenizer.json").write_text("{}")
    whole, blocks = digest_blocks(folder / "a.bin", BLOCK_BYTES)
    (folder / "a.blocks").write_bytes(blocks)
    file = TokenFile(
        file="a.bin",
        split="train",
        tokens=tokens,
        documents=1,
        text_bytes=4 * tokens,
        sha256=whole,
        index_sha256="",
        blocks_sha256=hashlib.sha256(blocks).hexdigest(),
    )
    return DatasetManifest(
        phalanx="benchmark",
        vocab=8192,
        dtype="uint16",
        end_of_text=0,
        tokenizer_sha256="",
        heldout=0.0,
        split_on="file",
        sources=(Source(name="a", path="", weight=1.0, shards=(file,)),),
        block_bytes=BLOCK_BYTES,
    )


def seconds_per_sample(folder: Path, manifest: DatasetManifest, length: int, samples: int) -> float:
    """Reading in the order of the sampler, blocks kept as a rank keeps them."""
    dataset = TokenDataset([(folder, manifest)], "train")
    order = dataset.sampler(length, 0).indices(0, samples)
    began_s = time.thread_time()
    for first in range(0, samples, 8):
        dataset.samples(order[first : first + 8], length)
    return (time.thread_time() - began_s) / samples


def main() -> None:
    """Print a row per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sound = build(folder, args.megatokens * 10**6)
        (source,) = sound.sources
        bare = replace(
            sound,
            sources=(replace(source, shards=tuple(replace(one, blocks_sha256="") for one in source.shards)),),
        )
        print("| tokens of a sample | without digests | with digests | digests alone |\n|---|---|---|---|")
        for length in (256, 1024, 4096):
            found = [
                [seconds_per_sample(folder, one, length, args.samples) for one in (bare, sound)]
                for _ in range(args.rounds)
            ]
            without, checked = (statistics.median(row[place] for row in found) * 1e6 for place in (0, 1))
            print(f"| {length:,} | {without:.1f} µs | {checked:.1f} µs | {checked - without:.1f} µs |")


if __name__ == "__main__":
    main()
