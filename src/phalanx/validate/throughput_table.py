"""Tables of published training runs: read them, fill in missing settings, and state why a row cannot be predicted.

Columns are those of `throughput_public.csv`. Only layout columns are read here; measurements never enter a prediction.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.cluster_defaults import assemble_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.files import csv_columns, read_text
from phalanx.job.model import ModelShape, known_presets
from phalanx.job.parameter_counts import count_parameters

REQUIRED = ("id", "layers", "hidden", "seq", "gpu", "gpus", "global_batch")
OPTIONAL = (
    "source", "model_name", "heads", "kv_heads", "ffn", "vocab", "experts", "topk", "moe_ffn", "params_b", "nodes_gpu",
    "inter_link_gbps_per_gpu", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "recompute",
    "precision", "seq_parallel", "attention", "framework", "task", "date",
)  # fmt: skip
LARGEST_TABLE_BYTES = 256 * 2**20
MOST_ROWS = 2_000_000

_COUNTS = ("tp", "pp", "vpp", "cp", "ep", "dp", "heads", "kv_heads", "ffn", "vocab", "nodes_gpu")
_AMOUNTS = ("experts", "topk", "moe_ffn", "params_b", "inter_link_gbps_per_gpu", "zero_stage")

PublishedRun = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """The rows of a file as text, with their line numbers."""

    path: Path
    rows: tuple[PublishedRun, ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...]


def read_table(path: Path) -> PublishedTable:
    """Return the rows of a CSV file; raise UserError with the problem if it is not a valid table."""
    text = read_text(path, noun="CSV file", most_bytes=LARGEST_TABLE_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = tuple(name.strip() for name in csv_columns(reader, str(path)))
        reader.fieldnames = list(columns)
        _check_columns(path, columns)
        rows, lines = [], []
        for row in reader:
            rows.append({key: (value or "").strip() for key, value in row.items() if isinstance(key, str)})
            lines.append(reader.line_num)
            if len(rows) > MOST_ROWS:
                raise mistake(str(path), f"has more than {MOST_ROWS:,} rows", fix="split it")
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"is not CSV: {error}", fix="save the table as UTF-8 CSV") from error
    if not rows:
        raise mistake(str(path), "has a header but no rows", fix="add at least one run")
    _check_ids(path, rows, lines)
    return PublishedTable(path=path, rows=tuple(rows), lines=tuple(lines), columns=columns)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    if not missing:
        return
    if len(columns) < 2:
        raise mistake(str(path), "is not a table of training runs", why="its first line is not a CSV header",
                      fix=f"it needs at least the columns {', '.join(REQUIRED)}")  # fmt: skip
    extra = [name for name in columns if name not in REQUIRED and name not in OPTIONAL]
    problems = []
    for name in missing:
        near = nearest(name, extra)
        fix = f'rename the column "{near}"' if near else f"add it; required are {', '.join(REQUIRED)}"
        problems.append(Problem(where=f"{path}:1", what=f'has no column "{name}"', fix=fix))
    raise UserError(problems)


def _check_ids(path: Path, rows: Sequence[PublishedRun], lines: Sequence[int]) -> None:
    line_by_id: dict[str, int] = {}
    problems = []
    for row, line in zip(rows, lines, strict=True):
        name = row["id"]
        if not name:
            problems.append(Problem(where=f"{path}:{line}", what="has an empty id", fix="give every row its own id"))
        elif name in line_by_id:
            message = f'repeats the id "{name[:60]}" of line {line_by_id[name]}'
            problems.append(Problem(where=f"{path}:{line}", what=message, fix="give every row its own id"))
        line_by_id.setdefault(name, line)
    if problems:
        raise UserError(problems[:20])


def number(row: PublishedRun, name: str) -> float | None:
    """Return a finite number, or None if the cell is empty or invalid."""
    text = row.get(name, "")
    try:
        value = float(text)
    except ValueError:
        return None
    # Comparisons with NaN are false, and infinity exceeds the limit.
    return value if abs(value) < 1e18 else None


def why_not_priced(row: PublishedRun) -> str:
    """Return the reason why a row cannot be predicted, or an empty text."""
    for name in ("layers", "hidden", "seq", "gpus", "global_batch"):
        value = number(row, name)
        if value is None:
            text = row.get(name, "")
            return f"{name} is empty" if not text else f"{name} = {text[:40]!r} is not a number"
        if value < 1:
            return f"{name} = {value:g} is less than 1"
        if value > 1e9:
            return f"{name} = {value:g} is too large to be meant"
    for name in _COUNTS:
        value = number(row, name)
        if row.get(name) and (value is None or value < 1 or value != int(value)):
            return f"{name} = {row[name][:40]!r} is not a whole number of 1 or more"
    # A fraction if one sequence is split over devices (MaxText).
    micro = number(row, "micro_batch")
    if row.get("micro_batch") and (micro is None or micro <= 0):
        return f"micro_batch = {row['micro_batch'][:40]!r} is not a positive number"
    for name in _AMOUNTS:
        value = number(row, name)
        if row.get(name) and (value is None or value < 0):
            return f"{name} = {row[name][:40]!r} is not a number of 0 or more"
    if not row.get("gpu"):
        return "gpu is empty"
    split = [number(row, name) or 1.0 for name in ("tp", "pp", "cp", "dp")]
    product = split[0] * split[1] * split[2] * split[3]
    gpus = number(row, "gpus") or 0.0
    if row.get("dp") and abs(product - gpus) > 0.5:
        return f"tp x pp x cp x dp = {product:g} is not gpus = {gpus:g}"
    if gpus % product:
        return f"tp x pp x cp = {product:g} does not divide gpus = {gpus:g}"
    return _size_contradiction(row, split[0], gpus / (split[0] * split[1] * split[2]))


def _size_contradiction(row: PublishedRun, tp: float, dp: float) -> str:
    """Return a contradiction among the stated sizes, or an empty text."""
    heads, experts, ep = number(row, "heads"), number(row, "experts"), number(row, "ep") or 1.0
    if heads and heads % tp:
        return f"tp = {tp:g} does not divide heads = {heads:g}"
    if experts and experts % ep:
        return f"ep = {ep:g} does not divide experts = {experts:g}"
    micro, batch = number(row, "micro_batch"), number(row, "global_batch") or 0.0
    if micro and micro * dp > batch:
        return f"micro_batch = {micro:g} on {dp:g} data ranks exceeds global_batch = {batch:g}"
    return ""


# ---- the machine of a published row: an accelerator of the catalogue with the stated links ---------------------------


def published_cluster(row: PublishedRun) -> Cluster:
    """Return the cluster that a row ran on; raise UserError for an unknown accelerator."""
    gpus = int(number(row, "gpus") or 1)
    stated_domain = int(number(row, "nodes_gpu") or 0)
    nic_gbps = number(row, "inter_link_gbps_per_gpu") or 0.0
    return _row_cluster(row["gpu"], gpus, stated_domain, nic_gbps)


@lru_cache(maxsize=4096)
def _row_cluster(name: str, gpus: int, stated_domain: int, nic_gbps: float) -> Cluster:
    accelerator = find_accelerator(name)
    per_domain = stated_domain or accelerator.domain_devices
    if gpus > per_domain and gpus % per_domain:
        # A rack of 72 devices is used 64 at a time if the job is a power of two.
        per_domain = max(size for size in range(1, per_domain + 1) if gpus % size == 0)
    domains = max(1, -(-gpus // per_domain))
    nic = nic_gbps * 1e9 / 8.0
    return assemble_cluster(
        name=f"{name}:{gpus}",
        accelerator=accelerator,
        domain_devices=per_domain,
        domains=domains,
        source="published table",
        nic_bytes_per_s=nic,
    )


# ---- missing settings of published rows, filled by rules: the model's shape, and unstated options --------------------


# Padded GPT-2 vocabulary, used by Megatron's and vTrain's published configurations that name none.
USUAL_VOCAB = 51200
USUAL_HEAD_DIM = 128
# Families whose MLP is gated. Their names decide what a parameter count cannot: a tied gated model of 16 layers can
# have exactly the parameters of an untied plain one.
GATED_NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "kimi", "gemma", "olmo", "yi-", "gpt-oss", "phi3")
PLAIN_NAMES = ("gpt", "bloom", "mpt", "opt", "megatron", "nemotron", "falcon", "pythia", "bert")
# Weight of a name against a parameter count, as a share of the parameters.
DISAGREES = 0.05


def model_shape(row: PublishedRun) -> ModelShape:
    """Return the model shape that a row describes; a preset of the same name and size supplies missing values."""
    layers, hidden = (int(number(row, name) or 1) for name in ("layers", "hidden"))
    heads = int(number(row, "heads") or max(1, round(hidden / USUAL_HEAD_DIM)))
    preset = _row_preset(row.get("model_name", ""), layers, hidden)
    if preset is not None:
        vocab = int(number(row, "vocab") or preset.vocab)
        return replace(preset, vocab=vocab)
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


def _row_preset(name: str, layers: int, hidden: int) -> ModelShape | None:
    wanted_name = re.sub(r"[^a-z0-9]", "", name.lower())
    for preset_name, preset in known_presets().items():
        model = preset.model()
        same_name = re.sub(r"[^a-z0-9]", "", preset_name.lower())
        if wanted_name == same_name and (model.layers, model.hidden) == (layers, hidden):
            return model
    return None


def _by_parameters(shape: ModelShape, parameters: float) -> ModelShape:
    """Choose gating, tying and head width that best explain the stated parameter count."""
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


def attention_is_fused(row: PublishedRun) -> bool:
    """Return True for flash-style attention, as stated by the row, or by its year if it states nothing."""
    stated = row.get("attention", "").lower()
    if stated:
        return stated != "standard"
    year = re.match(r"20\d\d", row.get("date", ""))
    # FlashAttention reached training frameworks during 2022.
    return year is None or int(year.group()) >= 2023


def zero_stage(row: PublishedRun) -> int:
    """Return the stated ZeRO stage, or the framework's default."""
    stated = number(row, "zero_stage")
    if stated is not None:
        return min(3, max(0, int(stated)))
    return 3 if re.search(r"fsdp|zero-?3|titan|maxtext|levanter", row.get("framework", "").lower()) else 1


def sequence_parallel(row: PublishedRun) -> bool:
    """Return True if norms are split along the sequence; since 2022 Megatron's default with tensor parallelism."""
    stated = row.get("seq_parallel", "").lower()
    if stated in ("yes", "true", "1"):
        return True
    return stated == "" and (number(row, "tp") or 1.0) > 1


def micro_batches(row: PublishedRun, data_ranks: int) -> list[float]:
    """Return the stated micro-batch, or each of 1, 2, 4 and 8 that divides the batch per data rank."""
    stated = number(row, "micro_batch")
    if stated is not None and stated > 0:
        return [stated]
    share = (number(row, "global_batch") or 1.0) / data_ranks
    return [size for size in (1.0, 2.0, 4.0, 8.0) if size <= share and share % size == 0] or [1.0]


def recomputes(row: PublishedRun) -> list[str]:
    """Return the stated recompute, or all settings, least first.

    Published runs were tuned, so the fastest setting that fits is meant.
    """
    stated = row.get("recompute", "").lower()
    return [stated] if stated in ("none", "selective", "full") else ["none", "selective", "full"]


def precision(row: PublishedRun) -> str:
    """Return the compute format, by its name in published tables."""
    stated = row.get("precision", "").lower()
    if "fp4" in stated:
        return "fp4"
    if "8" in stated:
        return "fp8"
    return {"fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32", "tf32": "fp32"}.get(stated, "bf16")
