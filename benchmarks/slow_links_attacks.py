"""What liars among invited peers do to the loss, with each aggregation of updates: a small byte model, real text.

python benchmarks/slow_links_attacks.py [--seeds 0,1,2] [--steps 300] [--peers 6] [--liars 2]
                                        [--codecs fp32,int8,topk-2bit] [--kinds clipped-mean,median] [--out FILE.json]

All peers train in one process. What lies between them is the product's own: `screen_ready` (limits on norms and
weights), the codecs with what they lose (`Sender`), `mean_factors` and `aggregate`, and the defaults of the outer step;
sockets, owners of shares and the screening by loss are left out. A fifth of the steps is synchronous and honest, then
peers exchange updates of weights every H = 10 steps. Every liar claims 90 times the tokens that it was dealt.

    reversed       -3 times its honest update            random   noise with the norm of its honest update
    scaled         9 times its honest update             copied   the update of the first honest peer
    reversed x9    -9 times its honest update            stale    always the update of its first round
    label-flipped  trained to predict 255 - b for each byte b

`claimed` is the weighted mean with weights as peers claim them, as in version 0.7. Each number is the held-out loss at
the end, in nats per byte, less that of honest training: all peers honest, the mean, the same codec and seed; the mean
over seeds, and the one farthest from zero. `absent`
is the mean without the liars' updates: what is lost because fewer peers learn.

The model predicts a byte from the eight before it: embeddings of 16, a hidden layer of 128, 54,000 weights; AdamW. The
text is that of docs/, the last twentieth held out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from phalanx.job.sync_section import SyncSettings
from phalanx.peers.aggregation import AGGREGATIONS, BY_VALUE, aggregate, choose_aggregation, mean_factors
from phalanx.peers.attempt import segment_values
from phalanx.peers.codecs import Sender, decode, encode
from phalanx.peers.messages import Ready
from phalanx.peers.screening import screen_ready

CONTEXT, EMBED, HIDDEN = 8, 16, 128
BATCH, INNER_STEPS, SYNCHRONOUS = 64, 10, 0.2
LEARNING_RATE, CLAIM = 4e-3, 90.0
HELD_OUT = 20_000
DIVERGED = 5.0  # nats above honest training: worse than guessing
ATTACKS = ("reversed", "reversed x9", "scaled", "random", "copied", "stale", "label-flipped")
KINDS = ("claimed", *AGGREGATIONS)
SHAPES = {
    "embed": (256, EMBED),
    "in": (CONTEXT * EMBED, HIDDEN),
    "bias": (1, HIDDEN),
    "out": (HIDDEN, 256),
    "out_bias": (1, 256),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]


def first_weights(seed: int) -> torch.Tensor:
    """One flat vector."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(shape, generator=generator) * (0.3 if name == "embed" else shape[0] ** -0.5)
        if "bias" not in name
        else torch.zeros(shape)
        for name, shape in SHAPES.items()
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def losses(weights: torch.Tensor, contexts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of each peer, whose weights are one row; all peers in one pass."""
    peers = len(weights)
    flat = weights.split(SIZES, dim=1)
    embed, w_in, b_in, w_out, b_out = (
        part.view(peers, *shape) for part, shape in zip(flat, SHAPES.values(), strict=True)
    )
    rows = contexts.reshape(peers, -1)
    looked_up = torch.stack([table[row] for table, row in zip(embed, rows, strict=True)])
    hidden = functional.gelu(looked_up.view(peers, -1, CONTEXT * EMBED) @ w_in + b_in)
    logits = hidden @ w_out + b_out
    each = functional.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1), reduction="none")
    return each.view(peers, -1).mean(dim=1)


class Corpus:
    """Bytes of the documentation."""

    def __init__(self, folder: Path) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.md")))
        data = np.frombuffer(text, dtype=np.uint8)
        edge = len(data) * 19 // 20
        self._train, self._held, self.bytes = data[:edge], data[edge:], len(data)

    def batches(self, seed: int, step: int, peers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts and targets of every peer in one step; the same for every case."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self._train) - CONTEXT - 1, (peers, BATCH))
        return self._cut(self._train, starts)

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What every case is scored on."""
        starts = np.random.default_rng(7).integers(0, len(self._held) - CONTEXT - 1, (1, HELD_OUT))
        return self._cut(self._held, starts)

    def _cut(self, data: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = data[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int64)
        return torch.from_numpy(rows[..., :-1]), torch.from_numpy(rows[..., -1])


class Adam:
    """AdamW without decay, for all peers at once."""

    def __init__(self, moments: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
        self.first, self.second, self.count = moments[0].clone(), moments[1].clone(), count

    def step(self, weights: torch.Tensor, grads: torch.Tensor, rate: float) -> None:
        """In place."""
        self.count += 1
        self.first.mul_(0.9).add_(grads, alpha=0.1)
        self.second.mul_(0.95).addcmul_(grads, grads, value=0.05)
        first, second = self.first / (1 - 0.9**self.count), self.second / (1 - 0.95**self.count)
        weights.addcdiv_(first, second.sqrt().add_(1e-8), value=-rate)


def gradients(weights: torch.Tensor, contexts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of every peer's own loss."""
    leaf = weights.clone().requires_grad_()
    losses(leaf, contexts, targets).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    return LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * float(np.cos(np.pi * step / steps)))


def warm_up(corpus: Corpus, seed: int, steps: int, peers: int) -> tuple[torch.Tensor, Adam]:
    """The honest synchronous steps, which all cases of a seed share."""
    weights = first_weights(seed)[None]
    adam = Adam((torch.zeros_like(weights), torch.zeros_like(weights)), 0)
    for step in range(round(SYNCHRONOUS * steps)):
        grads = gradients(weights.expand(peers, -1), *corpus.batches(seed, step, peers)).mean(dim=0, keepdim=True)
        adam.step(weights, grads, rate_at(step, steps))
    return weights[0], adam


class Peers:
    """The group's rounds: limits, codec and aggregation as in the product."""

    def __init__(self, kind: str, codec: str, peers: int, seed: int) -> None:
        self.kind, self.codec = kind, codec
        self.settings = SyncSettings(mode="diloco", codec=codec, inner_steps=INNER_STEPS, peers=peers)
        self.share = self.settings.sent_share()
        self.senders = [Sender(codec, top_share=self.share) for _ in range(peers)]
        self.noise, self.first_updates = np.random.default_rng([seed, 99]), dict[int, np.ndarray]()
        self.named: set[int] = set()

    def round(self, updates: list[np.ndarray], liars: Sequence[int], attack: str) -> tuple[np.ndarray, int]:
        """The aggregate that all peers apply, and of how many updates it is."""
        honest_weight = float(BATCH * INNER_STEPS)
        for liar in liars:
            updates[liar] = self._spoil(liar, updates, attack, first_honest=len(liars))
        ready, sent = {}, {}
        for peer, update in enumerate(updates):
            if attack == "absent" and peer in liars:
                continue
            outgoing = self.senders[peer].outgoing(update)
            data = encode(self.codec, outgoing, self.share)
            sent[str(peer)] = decode(self.codec, data, outgoing.size, self.share)
            self.senders[peer].settle(outgoing - sent[str(peer)], np.zeros_like(outgoing))
            weight = honest_weight * (CLAIM if peer in liars else 1.0)
            ready[str(peer)] = stated(weight, float(np.linalg.norm(outgoing)), outgoing.size, self.codec, self.share)
        limits = dict.fromkeys(ready, honest_weight)
        screened = screen_ready(ready, 10.0, limits)
        self.named |= {int(peer) for peer in (*screened.dropped, *screened.capped)}
        counted = sorted(set(ready) - set(screened.dropped))
        claims = {peer: ready[peer].weight for peer in counted}
        weights = claims if self.kind == "claimed" else {peer: screened.weights[peer] for peer in counted}
        kind = "mean" if self.kind == "claimed" else self.kind
        kind, _ = choose_aggregation(kind, codec=self.codec, counted=len(counted))
        factors = mean_factors(kind, weights, {peer: ready[peer].norm or 0.0 for peer in counted})
        used, piece = [factors[peer] for peer in counted], segment_values(self.codec, self.share)
        parts = [
            aggregate(kind, [sent[peer][start : start + piece] for peer in counted], used)
            for start in range(0, len(updates[0]), piece)
        ]
        result = np.concatenate(parts).astype(np.float32)
        if self.codec != "topk-2bit":
            result = decode(self.codec, encode(self.codec, result, self.share), result.size, self.share)
        return result, len(counted)

    def _spoil(self, liar: int, updates: list[np.ndarray], attack: str, *, first_honest: int) -> np.ndarray:
        update = updates[liar]
        self.first_updates.setdefault(liar, update)
        match attack:
            case "reversed":
                return -3.0 * update
            case "reversed x9":
                return -9.0 * update
            case "scaled":
                return 9.0 * update
            case "random":
                noise = self.noise.standard_normal(update.size).astype(np.float32)
                return noise * np.float32(np.linalg.norm(update) / np.linalg.norm(noise))
            case "copied":
                return updates[first_honest]
            case "stale":
                return self.first_updates[liar]
            case _:
                return update


def stated(weight: float, norm: float, values: int, codec: str, share: float) -> Ready:
    """What a peer sends when it is ready."""
    return Ready(
        view_number=1,
        round_number=0,
        weight=weight,
        norm=norm,
        values=values,
        codec=codec,
        top_share=share,
        quorum=0,
        grace_s=0.0,
        timeout_s=60.0,
        call=0,
    )


def train(
    corpus: Corpus, seed: int, start: tuple[torch.Tensor, Adam], steps: int, group: Peers, liars: int, attack: str
) -> float:
    """Held-out loss of the shared weights at the end; the first peers are the liars."""
    shared, peers = start[0].clone(), len(group.senders)
    moments = (start[1].first.expand(peers, -1), start[1].second.expand(peers, -1))
    adam, weights = Adam(moments, start[1].count), shared.repeat(peers, 1)
    rate, momentum = group.settings.outer_step(steps)
    velocity, first = torch.zeros_like(shared), round(SYNCHRONOUS * steps)
    for step in range(first, steps):
        contexts, targets = corpus.batches(seed, step, peers)
        if attack == "label-flipped":
            targets[:liars] = 255 - targets[:liars]
        adam.step(weights, gradients(weights, contexts, targets), rate_at(step, steps))
        if (step + 1 - first) % INNER_STEPS and step + 1 < steps:
            continue
        updates = list((shared - weights).numpy())
        result, counted = group.round(updates, range(liars) if attack else (), attack)
        pseudo_gradient = torch.from_numpy(result) * group.settings.update_scale(counted)
        velocity = momentum * velocity + pseudo_gradient
        shared = shared - rate * (pseudo_gradient + momentum * velocity)
        weights = shared.repeat(peers, 1)
    with torch.no_grad():
        return float(losses(shared[None], *corpus.held_out())[0])


def main() -> None:
    """Print a table for each codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--codecs", default="fp32,int8,topk-2bit")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus, began = Corpus(Path(__file__).parents[1] / "docs"), time.monotonic()
    seeds, rows = [int(seed) for seed in options.seeds.split(",")], []
    starts = {seed: warm_up(corpus, seed, options.steps, options.peers) for seed in seeds}
    print(f"{corpus.bytes:,} bytes of text, {options.peers} peers, {options.liars} liars, seeds {options.seeds}")
    for codec in options.codecs.split(","):
        honest: dict[int, float] = {}
        kinds = [kind for kind in options.kinds.split(",") if codec != "topk-2bit" or kind not in BY_VALUE]
        for seed in seeds:
            group = Peers("mean", codec, options.peers, seed)
            honest[seed] = train(corpus, seed, starts[seed], options.steps, group, 0, "")
        print(f"\n{codec:<14}" + "".join(f"{kind:>20}" for kind in kinds), flush=True)
        for attack in ("", "absent", *ATTACKS):
            cells = []
            for kind in kinds:
                found = []
                for seed in seeds:
                    group = Peers(kind, codec, options.peers, seed)
                    loss = train(corpus, seed, starts[seed], options.steps, group, options.liars, attack)
                    found.append(loss - honest[seed])
                    row = {"codec": codec, "kind": kind, "attack": attack or "none", "seed": seed, "loss": loss}
                    rows.append(row | {"named": sorted(group.named)})
                worst = max(found, key=abs)
                is_trained = abs(worst) < DIVERGED
                cells.append((f"{statistics.fmean(found):+.4f} ({worst:+.4f})" if is_trained else "diverged").rjust(20))
            print(f"{attack or 'none':<14}" + "".join(cells), flush=True)
        print(f"honest loss {statistics.fmean(honest.values()):.4f} nats per byte, {time.monotonic() - began:,.0f} s")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
