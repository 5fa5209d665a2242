"""The job file that `phalanx init` writes: one page, commented, and valid without changes."""

from __future__ import annotations

import json

from phalanx.job.model import TOKENS_PER_PARAMETER, VOCAB, Preset
from phalanx.units import format_count

# 4 Mi, Llama 2's batch (arXiv:2307.09288), for models whose batch is unpublished.
DEFAULT_BATCH_TOKENS = 4_194_304
DEFAULT_SEQUENCE = 4096

TINY = "phalanx-tiny"
DATA = "data/tokens"  # folder of the dataset, relative to the job file
# Of the steps; 2,000 were Llama 2's (arXiv:2307.09288).
WARM_UP_SHARE, LEAST_WARM_UP, MOST_WARM_UP = 0.01, 10, 2000

_PAGE = """\
#:schema ./job.schema.json
# A Phalanx job: what to train, on what, and what you insist on. The planner chooses the rest.
#   phalanx show {file}     every value and where it comes from
#   phalanx plan {file}     the layout, and what it takes in time, memory, money and failures
#   phalanx check {file}    what the training specification says of it
spec = "2026.1"
name = "{name}"

[model]
preset = "{model}"
vocab = {vocab}  # {vocab_note}
# Any other key of the shape may be written over the preset too: layers, hidden, heads, kv_heads, ffn ...
# Or take it from a Hugging Face file: hf_config = "config.json"

[data]
path = "{data}"  # phalanx data build makes it, beside this file; a list of folders mixes several
# corpus = "offline-english"  # instead of path: film reviews, fetched and built by the first run
sequence = {sequence}  # tokens per sequence
tokens = {tokens}  # in all, {steps:,} steps; "auto" is 20 per parameter

[batch]
global_tokens = {batch_tokens}  # per optimizer step: {batch_sequences:,} sequences
micro = "auto"  # sequences per device and pass

[optim]
name = "adamw"  # adamw, adafactor, adamw8bit or muon
lr = {lr}
schedule = "wsd"  # warm up, stay, decay over the last fifth; or cosine
warmup_tokens = {warmup_tokens}  # {warmup_steps:,} steps

[precision]
compute = "{compute}"  # bf16, fp16, fp8, fp4 or fp32
grad_reduce = "fp32"

[parallel]
mode = "auto"  # "fixed" searches nothing
# Fix any of these and the planner works around it:
# data, shard, zero, tensor, sequence_parallel, context, pipeline, virtual_pipeline, schedule, expert, recompute
# tensor = 8
# recompute = "selective"

[checkpoint]
interval_s = "auto"  # Daly's optimum for this cluster's failures
keep = 3
async = true

[fault]
detect_s = 30
restart_s = 300
spares = "auto"

[telemetry]
interval_s = 10  # between samples of utilization, memory and energy
# timeline_every = 200  # steps between two that are recorded collective by collective
# peers_every_s = 30  # between reports of the latency to the next rank on every axis

[cluster]
{cluster_key} = {cluster}  # {cluster_note}

# [cost]
# usd_per_device_hour = 2.5  # left out, a range from the price table is used

# [[waiver]]  # a rule of the training specification that this job breaks on purpose
# rule = "CKP001"
# reason = "the store is rationed until the new array arrives"
# expires = 2027-03-31
"""


def render_template(*, file: str, name: str, preset: Preset, cluster: str, cores: int, parameters: int) -> str:
    """Return the text of a new job file; `parameters` of the model determine the number of steps."""
    sequence = preset.train.get("sequence", DEFAULT_SEQUENCE)
    batch_tokens = preset.train.get("global_tokens", DEFAULT_BATCH_TOKENS)
    is_local = cluster == "local"
    tokens = preset.train.get("tokens", TOKENS_PER_PARAMETER * parameters)
    steps = -(-tokens // batch_tokens)
    warmup_steps = warm_up_steps(steps)
    return _PAGE.format(
        file=file if file.isprintable() else "job.toml",
        name=name,
        model=preset.name,
        vocab=vocab_of(preset),
        vocab_note="tokens; as many as phalanx data build makes, unless told otherwise"
        if preset.name == TINY
        else "the model's own tokenizer: phalanx data build --tokenizer its tokenizer.json",
        data=DATA,
        sequence=sequence,
        tokens=_tokens_text(preset.train.get("tokens")),
        steps=steps,
        batch_tokens=f"{batch_tokens:_}",
        batch_sequences=batch_tokens // sequence,
        warmup_tokens=f"{warmup_steps * batch_tokens:_}",
        warmup_steps=warmup_steps,
        lr="1e-3" if is_local else "3e-4",
        compute="fp32" if is_local else "bf16",
        cluster_key="file" if cluster.endswith(".toml") else "spec",
        cluster=json.dumps(cluster, ensure_ascii=False),  # a JSON string is a TOML string
        cluster_note=f'this machine, {cores} CPU cores; elsewhere "8xH100:16"'
        if is_local
        else "devices per host x type : hosts",
    )


def vocab_of(preset: Preset) -> int:
    """Return the vocabulary of a model; the tiny one has that of the default tokenizer of `phalanx data build`."""
    return VOCAB if preset.name == TINY else int(preset.shape["vocab"])


def warm_up_steps(steps: int) -> int:
    """Return the steps of linear warm-up in a run of `steps` steps: at least one, and at most a tenth.

    >>> [warm_up_steps(steps) for steps in (5, 500, 30_000, 10**6)]
    [1, 10, 300, 2000]
    """
    target = min(MOST_WARM_UP, max(LEAST_WARM_UP, round(WARM_UP_SHARE * steps)))
    return max(1, min(target, steps // 10))


def _tokens_text(tokens: int | None) -> str:
    if tokens is None:
        return '"auto"'
    return f'"{format_count(tokens)}"' if tokens >= 10**9 else f"{tokens:_}"
