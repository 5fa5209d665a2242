"""Does the best learning rate stay where it is when the model grows wider? Standard parametrization against muP.

    python benchmarks/mup_transfer.py --widths 64,128,256,512 --out benchmarks [--corpus]

One-layer decoders of each width learn the same batches at each learning rate of a grid of powers of two; the loss is
the mean over the last fifth of the steps. The best rate is the lowest point of a parabola in the logarithm of the rate
through the lowest point of the grid and its neighbours.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from phalanx.io.files import replace_text
from phalanx.io.svg import PlotLine, line_plot
from phalanx.io.tables import markdown_table
from phalanx.job.model import ModelShape
from phalanx.job.schema import Data, Optim, Scale
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.leave import forget_groups
from phalanx.train.rank_settings import Settings

HEAD, VOCAB = 16, 512
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")
SVG_HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="720" '
STYLE = (
    "<style>.plot{font:11px sans-serif}.line{fill:none;stroke-width:2}.dot{stroke:none}.grid{stroke:#ddd}"
    + "".join(f".line.s{n}{{stroke:{colour}}}.dot.s{n}{{fill:{colour}}}" for n, colour in enumerate(COLOURS, start=1))
    + "</style>"
)


@contextmanager
def lone_group() -> Iterator[None]:
    """A process group of this process alone, as the engine wants one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        forget_groups()


def make_engine(
    width: int, scale: Scale, *, layers: int = 1, batch: int = 8, sequence: int = 32, vocab: int = VOCAB
) -> Engine:
    """A small decoder of this width, on this process alone."""
    shape = ModelShape(
        name="m",
        layers=layers,
        hidden=width,
        heads=width // HEAD,
        kv_heads=width // HEAD,
        head_dim=HEAD,
        ffn=3 * width,
        vocab=vocab,
    )
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=batch, accumulation=1, recompute="none", precision="fp32", schedule="1f1b", offload="none",
        compression="none",
    )  # fmt: skip
    settings = Settings(layout=layout, sequence=sequence, scale=scale, seed=0)
    engine = Engine(shape, settings, Optim(weight_decay=0.0), device=torch.device("cpu"))
    engine.initialise()
    return engine


def made_up_batches(steps: int, *, batch: int, sequence: int, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Sequences where a token mostly follows from the one before: something to learn in a few steps."""
    random = np.random.default_rng(seed)
    follower = random.permutation(vocab)
    rows = []
    for _ in range(steps):
        tokens = np.empty((batch, sequence + 1), dtype=np.int64)
        tokens[:, 0] = random.integers(vocab, size=batch)
        for place in range(sequence):
            jumps = random.random(batch) < 0.1
            tokens[:, place + 1] = np.where(jumps, random.integers(vocab, size=batch), follower[tokens[:, place]])
        rows.append(tokens)
    return rows


def corpus_batches(steps: int, *, batch: int, sequence: int) -> list[np.ndarray]:
    """The offline corpus, which is built first if it is not there."""
    from phalanx.train.data.corpus import ensure_dataset
    from phalanx.train.data.token_samples import TokenDataset

    data = TokenDataset.open(list(ensure_dataset(Data(corpus="offline-english"), Path(), vocab=VOCAB)), "train")
    chosen = np.random.default_rng(0).permutation(data.num_samples(sequence))[: steps * batch]
    rows = np.ascontiguousarray(data.samples(chosen, sequence)).astype(np.int64)
    return list(rows.reshape(steps, batch, sequence + 1))


def final_loss(width: int, lr: float, scale: Scale, batches: Sequence[np.ndarray], *, vocab: int = VOCAB) -> float:
    """Mean loss of the last fifth of the steps; infinite where training broke down."""
    engine = make_engine(width, scale, batch=len(batches[0]), sequence=batches[0].shape[1] - 1, vocab=vocab)
    losses = []
    for step, rows in enumerate(batches):
        warm = min(1.0, (step + 1) / (0.1 * len(batches)))
        tokens = torch.from_numpy(rows)
        losses.append(engine.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), lr=lr * warm).loss)
    last = losses[-max(1, len(losses) // 5) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """log2 of the best rate: where a parabola through the lowest point and its neighbours is lowest."""
    place = min(max(int(np.argmin(losses)), 1), len(rates) - 2)
    near = slice(place - 1, place + 2)
    x, y = np.log2(rates[near]), np.asarray(losses[near])
    if not np.isfinite(y).all():
        return float(np.log2(rates[int(np.argmin(losses))]))
    a, b, _ = np.polyfit(x, y, 2)
    return float(np.clip(-b / (2 * a), x[0], x[-1])) if a > 0 else float(x[int(np.argmin(y))])


def main() -> None:
    """Measure, print the table, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--rates", default="-10..-3", help="exponents of two")
    parser.add_argument("--kinds", default="standard,mup", help="parametrizations, between commas")
    parser.add_argument("--corpus", action="store_true", help="the offline corpus instead of made-up sequences")
    parser.add_argument("--out", type=Path, help="folder for the result and the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    widths = [int(one) for one in options.widths.split(",")]
    low, high = (int(one) for one in options.rates.split(".."))
    rates = [2.0**power for power in range(low, high + 1)]
    sizes = {"batch": options.batch, "sequence": options.sequence}
    vocab = VOCAB if options.corpus else 64
    batches = (
        corpus_batches(options.steps, **sizes)
        if options.corpus
        else made_up_batches(options.steps, vocab=vocab, **sizes)
    )
    began, rows, pictures = time.monotonic(), [], []
    with lone_group():
        for kind in options.kinds.split(","):
            lines, best = [], []
            for width in widths:
                scale = Scale(parametrization=kind, base_width=widths[0] if kind == "mup" else 0, base_head_dim=HEAD)
                losses = [final_loss(width, rate, scale, batches, vocab=vocab) for rate in rates]
                best.append(best_rate(rates, losses))
                rows.append([kind, str(width), *(f"{loss:.3f}" for loss in losses), f"2^{best[-1]:.2f}"])
                print(*rows[-1], file=sys.stderr, flush=True)
                xs = tuple(float(power) for power in range(low, high + 1))
                lines.append(PlotLine(label=f"width {width}", x=xs, mean=losses, style=str(len(lines) + 1)))
            rows.append([kind, "moved", *("" for _ in rates), f"{best[-1] - best[0]:+.2f}"])
            pictures.append((kind, lines))
    head = ["parametrization", "width", *(f"2^{power}" for power in range(low, high + 1)), "best"]
    table = markdown_table(head, rows)
    print(table)
    if options.out:
        command = " ".join(["python", *sys.argv])
        took = f"{date.today()}, {time.monotonic() - began:.0f} s"
        text = f"# Learning rates over width\n\n`{command}`, {took}.\n\n{table}\n"
        for kind, lines in pictures:
            name = f"mup-transfer-{kind}.svg"
            drawn = line_plot(f"{kind}: loss over log2(learning rate)", lines, show="{:.2f}".format)
            legend = "".join(
                f'<text x="{90 + 110 * place}" y="12" fill="{COLOURS[place % len(COLOURS)]}">{line.label}</text>'
                for place, line in enumerate(lines)
            )
            drawn = drawn.replace("<svg ", SVG_HEAD, 1).replace(">", f">{STYLE}{legend}", 1)
            replace_text(options.out / name, drawn)
            text += f"\n![{kind}: loss over the learning rate, a line per width]({name})\n"
        replace_text(options.out / f"{date.today()}-mup-transfer.md", text)


if __name__ == "__main__":
    main()
