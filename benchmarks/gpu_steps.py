"""Measure real training steps of plain PyTorch Llama models on one GPU, as a table `phalanx validate` reads.

    python benchmarks/gpu_steps.py OUT.csv [--gpu H200-141GB-SXM] [--seconds 420]

Models are Llama-shaped (RMSNorm, rotary, grouped-query SDPA attention, SwiGLU), weights and activations bf16, AdamW
with fp32 master weights and moments, random tokens. Every configuration runs until its step time settles; the median
of the last steps and the peak of reserved memory are written. None of these rows was used to fit anything.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

# B batch, S sequence, D model, N heads, K kv heads, H head width


@dataclass(frozen=True)
class Config:
    """One row of the table."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro: int
    accumulation: int
    recompute: str
    compiled: bool


SHAPES = {  # layers, hidden, heads, kv heads, ffn, vocab
    "125m": (12, 768, 12, 12, 2048, 32000),
    "350m": (24, 1024, 16, 16, 2816, 32000),
    "1b": (16, 2048, 32, 8, 8192, 128256),
    "3b": (28, 3072, 24, 8, 8192, 128256),
    "8b-half": (16, 4096, 32, 8, 14336, 128256),
}
RUNS = [  # shape, sequence, micro-batch, accumulation, recompute, compiled
    ("125m", 1024, 8, 1, "none", False),
    ("125m", 1024, 64, 1, "none", False),
    ("125m", 4096, 16, 2, "none", False),
    ("350m", 2048, 1, 4, "none", False),
    ("350m", 2048, 16, 1, "none", False),
    ("350m", 2048, 16, 1, "full", False),
    ("1b", 2048, 4, 1, "none", False),
    ("1b", 8192, 2, 1, "none", False),
    ("1b", 8192, 2, 2, "full", False),
    ("1b", 32768, 1, 1, "full", False),
    ("3b", 4096, 2, 1, "none", False),
    ("3b", 4096, 4, 1, "full", False),
    ("8b-half", 4096, 1, 1, "none", False),
    ("8b-half", 4096, 4, 1, "full", False),
    ("8b-half", 8192, 2, 2, "full", False),
    ("125m", 1024, 8, 1, "none", True),
    ("350m", 2048, 4, 1, "none", True),
    ("350m", 2048, 16, 1, "none", True),
    ("1b", 2048, 8, 1, "none", True),
    ("1b", 8192, 2, 1, "none", True),
    ("1b", 16384, 1, 2, "none", True),
    ("3b", 4096, 2, 1, "none", True),
    ("8b-half", 4096, 2, 1, "none", True),
]


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = c.heads, c.kv_heads, c.hidden // c.heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(c.hidden), nn.RMSNorm(c.hidden)
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * self.width, bias=False)
        self.out = nn.Linear(c.heads * self.width, c.hidden, bias=False)
        self.gate_up = nn.Linear(c.hidden, 2 * c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        batch, seq, _ = x_BSD.shape
        split = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        q, k, v = self.qkv(self.norm_attention(x_BSD)).split(split, dim=-1)
        q_BNSH, k_BKSH, v_BKSH = (t.view(batch, seq, -1, self.width).transpose(1, 2) for t in (q, k, v))
        q_BNSH, k_BKSH = rotate(q_BNSH, cos_SH, sin_SH), rotate(k_BKSH, cos_SH, sin_SH)
        mixed = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.gate_up(self.norm_mlp(x_BSD)).chunk(2, dim=-1)
        return x_BSD + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split layout."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Model(nn.Module):
    """A small Llama with an untied head and its loss."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.hidden), nn.Linear(c.hidden, c.vocab, bias=False)
        width = c.hidden // c.heads
        angle = torch.outer(torch.arange(c.seq), 500000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            if self.config.recompute == "full":
                x_BSD = torch.utils.checkpoint.checkpoint(block, x_BSD, self.cos, self.sin, use_reentrant=False)
            else:
                x_BSD = block(x_BSD, self.cos, self.sin)
        logits = self.head(self.norm(x_BSD))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def measure(c: Config, budget_s: float) -> tuple[float, float, int]:
    """(median step seconds, peak reserved bytes, parameters)."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = Model(c).to(device="cuda", dtype=torch.bfloat16)
    if c.compiled:
        for block in model.blocks:
            block.compile()
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    tokens = torch.randint(c.vocab, (c.accumulation, c.micro, c.seq), device="cuda")

    def step() -> None:
        for part in tokens:
            (model(part) / c.accumulation).backward()
        for master, p in zip(masters, params, strict=True):
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([p.data for p in params], [m.data for m in masters])

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.monotonic() + budget_s
    while len(times) < 6 or (len(times) < 20 and time.monotonic() < end):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), torch.cuda.max_memory_reserved(), sum(p.numel() for p in params)


COLUMNS = [
    "source", "id", "model_name", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "params_b", "gpu",
    "gpus", "nodes_gpu", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "global_batch", "recompute",
    "precision", "seq_parallel", "attention", "measured_mem_gb", "status", "tier", "framework", "task", "date",
    "step_s",
]  # fmt: skip


def main() -> None:
    """Run every configuration that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="H200-141GB-SXM")
    parser.add_argument("--kind", choices=("all", "eager", "compile"), default="all")
    parser.add_argument("--seconds", type=float, default=420.0)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    rows = []
    for index, (name, seq, micro, accumulation, recompute, compiled) in enumerate(RUNS):
        if args.kind != "all" and compiled != (args.kind == "compile"):
            continue
        if time.monotonic() > end:
            print("out of time before", RUNS[index:], flush=True)
            break
        config = Config(*SHAPES[name], seq, micro, accumulation, recompute, compiled)
        try:
            seconds, peak, parameters = measure(config, 8.0)
            status = "ok"
        except torch.cuda.OutOfMemoryError:
            seconds, peak, parameters, status = 0.0, 0, 0, "oom"
        torch.cuda.empty_cache()
        kind = "compile" if compiled else "eager"
        print(f"{name} seq {seq} micro {micro}x{accumulation} {recompute} {kind}: {seconds:.4f} s {peak / 1e9:.1f} GB "
              f"{status}", flush=True)  # fmt: skip
        rows.append({
            "source": f"phalanx-h200-{kind}", "id": f"h200-{index:02d}", "model_name": f"llama-{name}",
            "layers": config.layers, "hidden": config.hidden, "heads": config.heads, "kv_heads": config.kv_heads,
            "ffn": config.ffn, "vocab": config.vocab, "seq": seq, "params_b": round(parameters / 1e9, 4) or "",
            "gpu": args.gpu, "gpus": 1, "nodes_gpu": 8, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "dp": 1,
            "zero_stage": 0, "micro_batch": micro, "global_batch": micro * accumulation, "recompute": recompute,
            "precision": "bf16", "seq_parallel": "no", "attention": "flash",
            "measured_mem_gb": round(peak / 1e9, 2) or "", "status": status, "tier": "A",
            "framework": f"pytorch-{kind}", "task": "pretrain", "date": "2026-11", "step_s": round(seconds, 6) or "",
        })  # fmt: skip
        with args.out.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
