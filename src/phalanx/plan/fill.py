"""What published rows leave out, filled by named rules: the model's shape, and settings nobody stated."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

from phalanx.job.model import ModelShape, known_presets
from phalanx.plan.parameter_counts import count_parameters
from phalanx.plan.published import Row, number

# Padded GPT-2 vocabulary, which Megatron's and vTrain's published configurations use when they name none.
USUAL_VOCAB = 51200
USUAL_HEAD_DIM = 128
# Families whose MLP is gated; their names settle what a parameter count cannot (a tied gated model of 16 layers can
# have exactly the parameters of an untied plain one).
GATED_NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "kimi", "gemma", "olmo", "yi-", "gpt-oss", "phi3")
PLAIN_NAMES = ("gpt", "bloom", "mpt", "opt", "megatron", "nemotron", "falcon", "pythia", "bert")
DISAGREES = 0.05  # weight of a name's word against a parameter count, as a share of the parameters


def model_shape(row: Row) -> ModelShape:
    """The shape a row describes; a preset of the same name and size supplies what the columns cannot say."""
    layers, hidden = (int(number(row, name) or 1) for name in ("layers", "hidden"))
    heads = int(number(row, "heads") or max(1, round(hidden / USUAL_HEAD_DIM)))
    known = _preset(row.get("model_name", ""), layers, hidden)
    if known is not None:
        vocab = int(number(row, "vocab") or known.vocab)
        return replace(known, vocab=vocab)
    experts = int(number(row, "experts") or 0)
    head_dim = max(1, hidden // heads)
    shape = ModelShape(
        name=row.get("model_name", "") or "model",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(number(row, "kv_heads") or heads),
        head_dim=head_dim,
        ffn=int(number(row, "ffn") or 4 * hidden),
        vocab=int(number(row, "vocab") or USUAL_VOCAB),
        experts=experts,
        experts_per_token=int(number(row, "topk") or (2 if experts else 0)),
        expert_ffn=int(number(row, "moe_ffn") or number(row, "ffn") or 4 * hidden) if experts else 0,
    )
    return _by_parameters(shape, (number(row, "params_b") or 0.0) * 1e9)


def _preset(name: str, layers: int, hidden: int) -> ModelShape | None:
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    for known, preset in known_presets().items():
        model = preset.model()
        same_name = re.sub(r"[^a-z0-9]", "", known.lower())
        if wanted == same_name and (model.layers, model.hidden) == (layers, hidden):
            return model
    return None


def _by_parameters(shape: ModelShape, parameters: float) -> ModelShape:
    """Gate, tying and head width that best explain the stated parameter count."""
    says_gated = _says_gated(shape)
    if parameters <= 0:
        return replace(shape, gated=says_gated, tied=not says_gated)
    widths = [shape.head_dim] + [width for width in (64, 128) if shape.is_moe and width != shape.head_dim]

    def distance(choice: tuple[bool, bool, int]) -> float:
        gated, tied, width = choice
        total = count_parameters(replace(shape, gated=gated, tied=tied, head_dim=width)).total
        doubts = (gated != says_gated) + (width != shape.head_dim) * 0.1
        return abs(total / parameters - 1.0) + DISAGREES * doubts

    gated, tied, width = min(product((True, False), (False, True), widths), key=distance)
    return replace(shape, gated=gated, tied=tied, head_dim=width)


def _says_gated(shape: ModelShape) -> bool:
    name = shape.name.lower()
    if any(word in name for word in GATED_NAMES):
        return True
    if any(word in name for word in PLAIN_NAMES):
        return False
    return shape.is_moe or shape.ffn < 3.9 * shape.hidden


def attention_is_fused(row: Row) -> bool:
    """Flash-style attention unless the row says otherwise; unstated, it follows the year."""
    stated = row.get("attention", "").lower()
    if stated:
        return stated != "standard"
    year = re.match(r"20\d\d", row.get("date", ""))
    return year is None or int(year.group()) >= 2023  # FlashAttention reached the trainers during 2022


def zero_stage(row: Row) -> int:
    """The stated ZeRO stage, else what the framework does by default."""
    stated = number(row, "zero_stage")
    if stated is not None:
        return min(3, max(0, int(stated)))
    return 3 if re.search(r"fsdp|zero-?3|titan|maxtext|levanter", row.get("framework", "").lower()) else 1


def sequence_parallel(row: Row) -> bool:
    """Whether norms are split along the sequence; Megatron's default beside tensor parallelism since 2022."""
    stated = row.get("seq_parallel", "").lower()
    if stated in ("yes", "true", "1"):
        return True
    return stated == "" and (number(row, "tp") or 1.0) > 1


def micro_batches(row: Row, data_ranks: int) -> list[float]:
    """The stated micro-batch, else every power of two that divides the batch."""
    stated = number(row, "micro_batch")
    if stated is not None and stated > 0:
        return [stated]
    share = (number(row, "global_batch") or 1.0) / data_ranks
    return [size for size in (1.0, 2.0, 4.0, 8.0) if size <= share and share % size == 0] or [1.0]


def recomputes(row: Row) -> list[str]:
    """The stated recompute, else all, least first: published runs were tuned, so the fastest that fits is meant."""
    stated = row.get("recompute", "").lower()
    return [stated] if stated in ("none", "selective", "full") else ["none", "selective", "full"]


def precision(row: Row) -> str:
    """The compute format, by the names tables use."""
    stated = row.get("precision", "").lower()
    if "fp4" in stated:
        return "fp4"
    if "8" in stated:
        return "fp8"
    return {"fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32", "tf32": "fp32"}.get(stated, "bf16")
