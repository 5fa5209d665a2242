"""Training speed on one GPU: Phalanx's engine beside eager `transformers`, same shape, batch and optimizer.

    python benchmarks/gpu_training.py [--vocab 32000] [--steps 8] [--variants ours,eager,fp8] [--micro-tokens 65536]
    python benchmarks/gpu_training.py --shape 8b-slice --sequence 8192 --variants ours,held,fp8 --micro-tokens 16384
    python benchmarks/gpu_training.py --shape qwen3-moe --sequence 4096 --variants rows-plain,rows-kernels,ours

The shape is a 1.1B Llama: 16 layers, 2048 wide, MLP 8192, 32 heads, 8 key/value heads; or, with --shape 8b-slice, eight
layers of Llama 3 8B with its head, 32,768 tokens a step; or layers of mixtures of experts, four of Qwen3-30B-A3B
(qwen3-moe) and two of Mixtral 8x7B (mixtral). `rows-plain` and `rows-kernels` bring tokens to experts by plain
operations and by our kernels, whatever the selector chose; `-eager` without compiling. `held` and `fp8-held` are
`ours` and `fp8` with `train.lean = false`: all logits and products of MLPs are held; `fp8-apart` never fuses norms and
SwiGLU with quantising, `fp8-head` has the output head in fp8 too. `loop` is the plain compiled loop: the same decoder
as one would train it by hand, torch.compile around model and loss, bf16 autocast over fp32 weights, PyTorch's fused
AdamW and clipping. MFU counts 6 × the parameters without the input embedding, plus causal attention (half the scores),
over 989 TFLOP/s (H200, dense bf16). `of_first` is over the variant `eager` or `loop` before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo
import torch.distributed as dist

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.kernels.engine_kernels import kernel_lines
from phalanx.train.kernels.expert_choice import use_expert_kernels
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.moe import Experts
from phalanx.train.parallel.float8_choice import fuse_layers
from phalanx.train.rank_settings import Settings

PEAK_FLOPS = 989e12
BATCH_TOKENS = 65536
MICRO_TOKENS = 32768  # eager takes 101 GB with it, and does not fit with twice as many


def shape_of(vocab: int, name: str = "1.2b") -> ModelShape:
    if name == "8b-slice":
        return ModelShape(
            name="llama-8b-slice", layers=8, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
        )  # fmt: skip
    if name == "qwen3-moe":
        return ModelShape(
            name="qwen3-30b-a3b-slice", layers=4, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144,
            vocab=vocab, qk_norm=True, experts=128, experts_per_token=8, expert_ffn=768,
        )  # fmt: skip
    if name == "mixtral":
        return ModelShape(
            name="mixtral-8x7b-slice", layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
            vocab=vocab, experts=8, experts_per_token=2, expert_ffn=14336,
        )  # fmt: skip
    return ModelShape(
        name="llama-1.2b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=vocab,
    )  # fmt: skip


def flops_per_token(shape: ModelShape, sequence: int) -> float:
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    width = shape.experts_per_token * shape.expert_ffn if shape.is_moe else shape.ffn
    weights = shape.layers * (attention + 3 * shape.hidden * width) + shape.vocab * shape.hidden
    return 6 * weights + 6 * shape.layers * sequence * shape.heads * shape.head_dim


def timed(step: Callable[[], object], steps: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def batch_tokens(shape: ModelShape) -> int:
    return BATCH_TOKENS // 2 if shape.name == "llama-8b-slice" else BATCH_TOKENS


def ours(
    shape: ModelShape, sequence: int, *, steps: int, compute: str, compiled: bool, micro_tokens: int,
    lean: bool | None = None, fused: bool | None = None, by_kernels: bool | None = None,
    fp8_head: bool = False,
) -> float:  # fmt: skip
    micro, batch = micro_tokens // sequence, batch_tokens(shape) // sequence
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=micro, accumulation=batch // micro, recompute="none", precision=compute, schedule="1f1b",
        offload="none", compression="none",
    )  # fmt: skip
    settings = Settings(
        layout=layout, sequence=sequence, compute=compute, compile=compiled, lean=lean, fp8_head=fp8_head
    )
    engine = Engine(shape, settings, Optim(), device=torch.device("cuda"))
    if fused is not None:
        for part in engine.parts:
            fuse_layers(list(part.model.layers.values()), fused=fused)
    if by_kernels is not None:
        for module in (one for part in engine.parts for one in part.model.modules() if isinstance(one, Experts)):
            use_expert_kernels(module, gather=by_kernels, combine=by_kernels)
    engine.initialise()
    print("  " + "; ".join(kernel_lines(engine)))
    torch.manual_seed(0)
    rows = torch.randint(0, shape.vocab, (batch, sequence + 1), device="cuda")
    step_s = timed(lambda: engine.step(rows[:, :-1], rows[:, 1:], lr=1e-4), steps)
    result = engine.step(rows[:, :-1], rows[:, 1:], lr=1e-4)
    print(f"  {compute}: loss {result.loss:.4f} after {steps + 4} steps on one batch", flush=True)
    promise = engine.kernels.promise(layers=shape.layers, micro_batches=batch // micro)
    if promise is not None:
        print(f"  {promise.compare(step_s)[0]}", flush=True)
    return step_s


def eager(shape: ModelShape, sequence: int, *, steps: int) -> float:
    """transformers as its users run it: fp32 weights, bf16 autocast, SDPA, fused AdamW, the same micro-batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    micro, batch = MICRO_TOKENS // sequence, BATCH_TOKENS // sequence
    rows = torch.randint(0, shape.vocab, (batch, sequence), device="cuda")

    def step() -> None:
        for part in rows.split(micro):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss
            (loss * micro / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps)


def plain_loop(shape: ModelShape, sequence: int, *, steps: int, micro_tokens: int) -> float:
    """A training loop of a page, compiled: what a user has without a trainer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    micro, batch = micro_tokens // sequence, batch_tokens(shape) // sequence
    rows = torch.randint(0, shape.vocab, (batch, sequence + 1), device="cuda")

    @torch.compile
    def loss_of(part: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(part[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())

    def step() -> None:
        for part in rows.split(micro):
            (loss_of(part) * micro / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000])
    parser.add_argument("--shape", choices=("1.2b", "8b-slice", "qwen3-moe", "mixtral"), default="1.2b")
    parser.add_argument("--sequence", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variants", default="eager,ours")
    parser.add_argument("--micro-tokens", type=int, default=MICRO_TOKENS, help="of Phalanx; eager keeps 32,768")
    args = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {BATCH_TOKENS} tokens per step")
        for vocab in args.vocab:
            for sequence in args.sequence:
                base = None
                for variant in args.variants.split(","):
                    base = measure(variant, shape_of(vocab, args.shape), sequence, args.steps, base, args.micro_tokens)
        dist.destroy_process_group()


def measure(
    variant: str, shape: ModelShape, sequence: int, steps: int, base: float | None, micro_tokens: int
) -> float | None:
    kinds: dict[str, Callable[[], float]] = {
        "eager": lambda: eager(shape, sequence, steps=steps),
        "loop": lambda: plain_loop(shape, sequence, steps=steps, micro_tokens=micro_tokens),
        "ours": lambda: ours(shape, sequence, steps=steps, compute="bf16", compiled=True, micro_tokens=micro_tokens),
        "plain": lambda: ours(shape, sequence, steps=steps, compute="bf16", compiled=False, micro_tokens=micro_tokens),
        "fp8": lambda: ours(shape, sequence, steps=steps, compute="fp8", compiled=True, micro_tokens=micro_tokens),
        "fp8-apart": lambda: ours(
            shape, sequence, steps=steps, compute="fp8", compiled=True, micro_tokens=micro_tokens, fused=False
        ),
        "held": lambda: ours(
            shape, sequence, steps=steps, compute="bf16", compiled=True, micro_tokens=micro_tokens, lean=False
        ),
        "fp8-head": lambda: ours(
            shape, sequence, steps=steps, compute="fp8", compiled=True, micro_tokens=micro_tokens, fp8_head=True
        ),
        "fp8-held": lambda: ours(
            shape, sequence, steps=steps, compute="fp8", compiled=True, micro_tokens=micro_tokens, lean=False
        ),
    }
    for name, compiled in (("", True), ("-eager", False)):
        for by_kernels in (False, True):
            kinds[f"rows-{'kernels' if by_kernels else 'plain'}{name}"] = partial(
                ours, shape, sequence, steps=steps, compute="bf16", compiled=compiled, micro_tokens=micro_tokens,
                by_kernels=by_kernels,
            )  # fmt: skip
    torch._dynamo.reset()  # compiled code of the last variant holds its model
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        step_s = kinds[variant]()
    except Exception as error:
        print(
            f"{variant:6} vocab {shape.vocab} sequence {sequence}: FAILED {type(error).__name__}: {str(error)[:600]}",
            flush=True,
        )
        return base
    rate = batch_tokens(shape) / step_s
    row = {
        "variant": variant, "vocab": shape.vocab, "sequence": sequence, "step_ms": round(step_s * 1e3, 1),
        "tokens_per_s": round(rate), "mfu": round(rate * flops_per_token(shape, sequence) / PEAK_FLOPS, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "of_first": round(rate / base, 3) if base else None,
        "setup_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return rate if variant in ("eager", "loop") else base


if __name__ == "__main__":
    main()
