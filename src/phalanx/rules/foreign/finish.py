"""Completion of a conversion once the world size is known.

Sizes per replica, steps and increments are converted to the job's units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from phalanx.errors import Problem, UserError
from phalanx.io.limits import MAX_RANKS
from phalanx.job.draft import Draft, apply_overrides
from phalanx.job.model import known_presets
from phalanx.job.schema import Data
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.foreign.conversion import MOST, Conversion, JobSetting, Leaf, is_number_literal, value_text
from phalanx.units import parse_count

NEEDED = ("layers", "hidden", "heads", "vocab", "ffn")
GIVE_CLUSTER = "give --cluster, as --cluster 8xH100:16"
GIVE_MODEL = "give --set model.preset=llama-3-8b, or --set model.hf_config=config.json"
STAND_IN = "a stand-in: the file does not say"
GIVE_BATCH = "give --set batch.global_sequences=512"
PAIRS = {"batch.global_tokens": "batch.global_sequences", "batch.global_sequences": "batch.global_tokens"}


def complete_job(config: Conversion, *, devices: int, settings: Sequence[str], habits: Practice) -> None:
    """Convert all intermediate settings; `devices` is 0 if neither the file nor the caller gives it."""
    _apply_overrides(config, settings)
    _drop_no_rate(config)
    _set_sequence(config)
    data = _data_ranks(config, devices)
    _set_batch(config, data)
    _set_fill(config, data)
    _set_steps(config)
    _set_ramp(config)
    _set_sharding(config, data)
    _set_bucket(config, data)
    _set_habits(config, habits)
    _set_model(config)
    _check_sizes(config)
    if "precision.compute" not in config.values:
        config.add_missing("does not say in which format it computes", "give --set precision.compute=bf16")


def _drop_no_rate(config: Conversion) -> None:
    """Drop a learning rate of 0 if no step is trained, or one: the file evaluates."""
    rate = config.values.get("optim.lr")
    if rate is None or rate.value not in (0, 0.0):
        return
    epochs, steps = config.read_number("num_train_epochs"), config.job_value("data.steps")
    if epochs == 0 or (isinstance(steps, int) and steps <= 1):
        del config.values["optim.lr"]
        config.unknown["optim.lr"] = f"{rate.key} is 0, and nothing is trained"


def _apply_overrides(config: Conversion, settings: Sequence[str]) -> None:
    """Apply --set, which overrides the file."""
    draft = Draft(path=Path(config.file), table={}, lines={})
    apply_overrides(draft, settings)
    if draft.problems:
        raise UserError(draft.problems)
    for section, table in draft.table.items():
        entries = table.items() if isinstance(table, dict) else [("", table)]
        for name, value in entries:
            key = f"{section}.{name}" if name else section
            config.values[key] = JobSetting(value=value, note=draft.settings.get(key, "--set"))
            if key == "checkpoint.interval_s":
                config.practice.pop("saves", None)
            if key in PAIRS:
                for replaced_key in (PAIRS[key], "batch.per_replica"):
                    config.values.pop(replaced_key, None)


def _set_sequence(config: Conversion) -> None:
    """Set the sequence length if it is not given: the preset's, or Phalanx's default, with a note."""
    if "data.sequence" in config.values:
        return
    name = config.job_value("model.preset")
    length = known_presets()[name].train.get("sequence") if isinstance(name, str) and name in known_presets() else None
    note = f"not said: that of {name}" if length else "not said: the default of Phalanx"
    max_positions = config.int_of("model.max_positions", -1)
    if not length and max_positions > 0:
        length, note = max_positions, "not said: as many as there are learned positions"
    config.values["data.sequence"] = JobSetting(value=length or Data().sequence, note=note)
    # Neither is given: a table as long as the sequence
    if max_positions == 0:
        config.values["model.max_positions"] = JobSetting(value=length or Data().sequence, note=note)


def _data_ranks(config: Conversion, devices: int) -> int:
    """Return the number of data ranks, or 0 if unknown."""
    data = config.job_value("parallel.data")
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    model_ranks = 1
    for name in ("tensor", "pipeline", "context"):
        if not _is_degree_known(config, f"parallel.{name}"):
            return 0
        model_ranks *= max(1, config.int_of(f"parallel.{name}"))
    return devices // model_ranks if devices and devices % model_ranks == 0 else 0


def _is_degree_known(config: Conversion, key: str) -> bool:
    """Return whether a degree is given, or left out and cannot be given elsewhere."""
    setting = config.values.get(key)
    if setting is not None and setting.note.startswith("--set"):
        return True
    return key not in config.unknown and not (config.open_why and (setting is None or not setting.key))


def _set_batch(config: Conversion, data: int) -> None:
    per_replica = config.values.pop("batch.per_replica", None)
    if (
        reason := config.unknown.get("batch.per_replica")
    ) is not None and "batch.global_sequences" not in config.values:
        config.unknown.setdefault("batch.global_sequences", reason)
        per_replica = None
    if per_replica is not None and isinstance(per_replica.value, int):
        if data:
            note = f"{per_replica.note} × {data} data ranks"
            config.values["batch.global_sequences"] = JobSetting(
                value=per_replica.value * data, key=per_replica.key, note=note, line=per_replica.line
            )
        elif per_replica.key:
            config.leave_unmapped(
                per_replica.key, "per data rank: the global batch follows once --cluster says how many there are"
            )
    for key, settled in list(config.settled.items()):
        if settled.text == "batch.per_replica":
            config.mark_used(key, by="batch.global_sequences")
    _set_accumulation(config, data)


def _set_accumulation(config: Conversion, data: int) -> None:
    """Use the passes per step to derive the micro-batch or the global batch from the other one."""
    passes = config.values.pop("batch.accumulation", None)
    if passes is None or not isinstance(passes.value, int):
        return
    total, micro = config.int_of("batch.global_sequences", 0), config.int_of("batch.micro", 0)
    share = passes.value * data
    if not share or not (total or micro):
        reason = "passes per step: --set batch.micro or batch.global_sequences, and --cluster, make a batch of them"
        return _list_unmapped(config, passes, reason)
    if not micro and total % share == 0:
        note = f"{total} / ({data} data ranks × {passes.value} passes)"
        config.values["batch.micro"] = JobSetting(value=total // share, key=passes.key, note=note, line=passes.line)
    elif not total:
        note = f"micro-batch {micro} × {passes.value} passes × {data} data ranks"
        config.values["batch.global_sequences"] = JobSetting(
            value=micro * share, key=passes.key, note=note, line=passes.line
        )
    elif total != micro * share:
        batch_text = f"micro-batch {micro}" if micro else "whole sequences"
        return _list_unmapped(
            config, passes, f"{total:,} sequences on {data} data ranks in {batch_text} are not {passes.value} passes"
        )
    config.mark_used(passes.key, by="batch.global_sequences / (micro × data)")


def _list_unmapped(config: Conversion, said: JobSetting, why: str) -> None:
    if said.key in config.settled and config.settled[said.key].text == "batch.accumulation":
        config.leave_unmapped(said.key, why)


def _set_fill(config: Conversion, data: int) -> None:
    """Record a pipeline that is drained before the step ends, unless one fill is the full step."""
    fill = config.values.pop("batch.fill", None)
    if fill is None or not isinstance(fill.value, int):
        return
    total, micro = config.int_of("batch.global_sequences", 0), config.int_of("batch.micro")
    if total and data and total <= fill.value * micro * data:
        config.mark_used(fill.key, by="batch.global_sequences")
        return
    config.practice["pipeline_fill"] = fill.value
    reason = (
        f"a pipeline is drained after {fill.value:,} micro-batches: BAT004 counts so, the plan's step drains it once"
    )
    config.leave_unmapped(fill.key, reason)


def _step_tokens(config: Conversion) -> int:
    """Return the tokens per step, or 0 if unknown."""
    sequence = config.int_of("data.sequence", 0)
    total = config.job_value("batch.global_tokens")
    if isinstance(total, str):
        try:
            total = int(parse_count(total))
        except (ValueError, OverflowError):
            total = 0
    return total if isinstance(total, int) and total else config.int_of("batch.global_sequences", 0) * sequence


def _set_steps(config: Conversion) -> None:
    step, sequence = _step_tokens(config), config.int_of("data.sequence", 0)
    for name, job_key, unit, tokens_each in (
        ("data.steps", "data.tokens", "steps", step),
        ("data.samples", "data.tokens", "sequences", sequence),
        ("optim.warmup_steps", "optim.warmup_tokens", "steps", step),
        ("optim.warmup_samples", "optim.warmup_tokens", "sequences", sequence),
    ):
        setting = config.values.pop(name, None)
        if setting is None or not isinstance(setting.value, int) or job_key in config.values:
            continue
        if tokens_each:
            note = f"{setting.value:,} {unit} × {tokens_each:,} tokens" + (f"; {setting.note}" if setting.note else "")
            config.values[job_key] = JobSetting(
                value=max(0, setting.value) * tokens_each, key=setting.key, note=note, line=setting.line
            )
            config.mark_used(setting.key, by=job_key)
        elif setting.key:
            config.leave_unmapped(setting.key, "in steps: tokens follow once the global batch is known")


def _set_ramp(config: Conversion) -> None:
    """Convert Megatron's start, increment and length to stages: each increment lasts equally many sequences."""
    ramp = config.values.pop("batch.ramp_of", None)
    if ramp is None or not isinstance(ramp.value, list):
        return
    total, sequence = config.int_of("batch.global_sequences", 0), config.int_of("data.sequence", 0)
    stages = _ramp_stages(ramp.value, total) if len(ramp.value) == 3 else []
    if not stages or not sequence:
        config.leave_unmapped(ramp.key, "not a start, an increment and a length that reach the global batch")
        return
    value = [
        {"until_tokens": until_sequences * sequence, "global_tokens": size * sequence}
        for until_sequences, size in stages
    ]
    count = (total - ramp.value[0]) // ramp.value[1]
    note = f"{count} increments" + (f" as {len(value)} stages" if len(value) < count else "")
    config.values["batch.ramp"] = JobSetting(value=value, key=ramp.key, note=note, line=ramp.line)
    config.mark_used(ramp.key, by="batch.ramp")


MOST_STAGES = (
    # GPT-3's 95 increments would be priced separately, which adds a second to the plan per 20 stages
    8
)


def _ramp_stages(ramp: list[int], total: int) -> list[tuple[int, int]]:
    """Return (sequences seen when it ends, sequences per step) of each stage.

    A stage that covers several increments has the size of the middle one.

    >>> _ramp_stages([16, 16, 90], 64)
    [(30, 16), (60, 32), (90, 48)]
    """
    start, step, length = ramp
    if step < 1 or start < 1 or length < 1 or total <= start or (total - start) % step:
        return []
    count = (total - start) // step
    number = min(count, MOST_STAGES)
    edges = [count * index // number for index in range(number + 1)]
    return [(length * last // count, start + (first + last - 1) // 2 * step) for first, last in pairwise(edges)]


def _set_sharding(config: Conversion, data: int) -> None:
    copies = config.values.pop("parallel.shard_copies", None)
    if copies is not None and isinstance(copies.value, int):
        if data and copies.value > 0 and data % copies.value == 0:
            config.values["parallel.shard"] = JobSetting(
                value=data // copies.value, key=copies.key, note=f"{data} data ranks / {copies.value}", line=copies.line
            )
            config.mark_used(copies.key, by="parallel.shard")
        else:
            config.leave_unmapped(
                copies.key, "the shard group follows once --cluster says how many data ranks there are"
            )
    _shard_group(config, data)
    if config.int_of("parallel.tensor") == 1 and config.job_value("parallel.sequence_parallel") is True:
        key = config.values.pop("parallel.sequence_parallel").key
        config.skip_leaf(key, "no effect without tensor parallelism")
    if config.int_of("parallel.context") == 1:
        config.values.pop("parallel.context_kind", None)


def _shard_group(config: Conversion, data: int) -> None:
    """Set the shard group, which in these trainers spans the context ranks too, and all data ranks by default."""
    shard, context = config.values.get("parallel.shard"), config.int_of("parallel.context")
    if config.int_of("parallel.zero", -1) == 0:
        config.values.pop("parallel.shard", None)
    elif shard is None and data:
        config.assume_default("parallel.shard", data * context, "over all data and context ranks")
    elif shard is not None and isinstance(shard.value, int) and context > 1 and not shard.note.startswith("--set"):
        note = f"{shard.value} data × {context} context ranks"
        config.values["parallel.shard"] = replace(shard, value=shard.value * context, note=note)
    group, data_degree = config.int_of("parallel.shard"), config.job_value("parallel.data")
    if isinstance(data_degree, int) and data_degree % max(
        1,
        group,
        # The schema counts groups within data ranks; the number of devices gives the degree
    ):
        config.values.pop("parallel.data")


# parameters: core/distributed/distributed_data_parallel.py
LEAST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000


def _set_bucket(config: Conversion, data: int) -> None:
    """Set Megatron Core's default bucket size, which grows with the data ranks."""
    width = config.values.pop("comm.bucket_width", None)
    if width is None or not isinstance(width.value, int):
        return
    ranks = data * config.int_of("parallel.context")
    size = max(LEAST_BUCKET, BUCKET_PER_RANK * ranks)
    note = f"max(40e6, 1e6 × {ranks or 'data'} ranks) parameters × {width.value} bytes"
    config.assume_default("comm.bucket_mib", round(min(65_536.0, size * width.value / 2**20), 1), note)


def _set_habits(config: Conversion, habits: Practice) -> None:
    """Set the job's keys for features of Phalanx that these trainers lack."""
    limit = config.job_value("train.timeout_s")
    config.assume_default("fault.detect_s", limit, "a rank that hangs is noticed by the timeout of a collective")
    # Otherwise the heartbeat determines how long a silent rank is tolerated
    if not config.practice.get("heartbeat_s"):
        note = "no heartbeat: a rank that hangs is noticed by the same timeout"
        config.assume_default("fault.dead_after_s", limit, note)
    # Not defaults of the trainer: none of its files determine whether and where it is restarted.
    note_on_restart = "not said: a lost rank ends the job, and the scheduler may start it again"
    config.values.setdefault("fault.recovery", JobSetting(value="stop", note=note_on_restart))
    config.values.setdefault(
        "fault.spares", JobSetting(value=0, note="not said: spare hosts are the scheduler's matter")
    )
    if habits.bounded_restarts is not None:
        config.assume_default(
            "fault.restarts", habits.bounded_restarts, (habits.sources or {}).get("bounded_restarts", "")
        )
    config.assume_default("checkpoint.memory_every", 0, "no copies in memory")
    config.assume_default("fault.digest_every", 0, "replicas are not compared")
    config.assume_default("telemetry.peers_every_s", 0, "peer latency is not measured")
    config.assume_default("telemetry.timeline_every", 0)


def _set_model(config: Conversion) -> None:
    missing_sizes = _missing_sizes(config)
    if missing_sizes == ["vocab"]:
        config.add_missing("does not say the size of the vocabulary", "give --set model.vocab=128256")
    elif missing_sizes:
        config.add_missing("does not say which model is trained", GIVE_MODEL)


# May be left out: a tokenizer gives it too
VOCABULARY = ("vocab_size", "padded_vocab_size")
# No trainer gives -1 or 0 a special meaning here
MODEL_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
DECISIVE = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "micro_batch_size": "batch.micro",
    "global_batch_size": "batch.global_sequences",
    "train_batch_size": "batch.global_sequences",
    "seq_length": "data.sequence",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "parallelism.tensor_parallel_degree": "parallel.tensor",
    "parallelism.pipeline_parallel_degree": "parallel.pipeline",
    "parallelism.context_parallel_degree": "parallel.context",
    "parallelism.expert_parallel_degree": "parallel.expert",
    "training.seq_len": "data.sequence",
    "zero_optimization.stage": "parallel.zero",
    "ds.zero_optimization.stage": "parallel.zero",
    "zero_stage": "parallel.zero",
    "deepspeed_config": "parallel.zero",
    "ds.zero_optimization.offload_optimizer.device": "parallel.offload",
    "use_distributed_optimizer": "parallel.zero",
    "use_megatron_fsdp": "parallel.zero",
    "use_torch_fsdp2": "parallel.zero",
    "no_pipeline_parallel": "parallel.pipeline",
    "num_layers_per_virtual_pipeline_stage": "parallel.virtual_pipeline",
    "recompute_granularity": "parallel.recompute",
    "recompute_activations": "parallel.recompute",
    "checkpoint_activations": "parallel.recompute",
    "sequence_parallel": "parallel.sequence_parallel",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "fp8_format": "precision.compute",
    "fp8": "precision.compute",
    "ffn_hidden_size": "model.ffn",
    "num_query_groups": "model.kv_heads",
    "num_experts": "model.experts",
    "swiglu": "model.gated",
}


def _check_sizes(config: Conversion) -> None:
    """Report sizes that cannot be read: with the trainer's default instead, the layout would be another one."""

    def is_set(key: str) -> bool:
        setting = config.values.get(key)
        return setting is not None and setting.note.startswith("--set")

    refused: list[Problem] = []
    for name in MODEL_SIZES:
        number, size_leaf = config.read_number(name), config.find_leaf(name)
        if number is not None and number < 1 and size_leaf is not None and not is_set(DECISIVE[name]):
            refused.append(_refused_number(config, size_leaf, "is below 1"))
    for name, leaf in config.unreadable.items():
        if name in VOCABULARY and not leaf.unknown and is_number_literal(leaf.value) and not is_set("model.vocab"):
            refused.append(_refused_number(config, leaf, f"is not a finite number below {MOST:.0e}"))
        key = DECISIVE.get(name, "")
        if not key or is_set(key):
            continue
        if leaf.unknown:
            config.unknown[key] = f"{leaf.key} {leaf.unknown}"
            line_text = f" (line {leaf.line})" if leaf.line else ""
            problem = f"{leaf.key} is not known: {leaf.unknown}{line_text}"
            variable = re.search(r"\$(\w+)", str(leaf.value))
            override = f"--set {variable.group(1)}=…, or --set {key}=…" if variable else f"--set {key}=…"
            config.add_missing(problem, f"give {override}")
        elif is_number_literal(leaf.value):
            refused.append(_refused_number(config, leaf, f"is not a finite number below {MOST:.0e}"))
        else:
            config.unknown[key] = f"{leaf.key} = {value_text(leaf.value)} is not a number"
            config.add_missing(f"{leaf.key} = {value_text(leaf.value)} is not a number", f"give --set {key}=…")
    for key in [
        unknown_key for unknown_key in config.unknown if unknown_key in DECISIVE.values() and not is_set(unknown_key)
    ]:
        if not any(leaf.unknown and DECISIVE.get(name) == key for name, leaf in config.unreadable.items()):
            config.add_missing(f"{key} is not known: {config.unknown[key]}", f"give --set {key}=…")
    if config.open_why:
        for key in sorted({*DECISIVE.values()}):
            setting = config.values.get(key)
            if setting is None or not (setting.key or is_set(key)):
                config.unknown[key] = config.open_why
        config.add_missing(f"may be given more arguments: {config.open_why}", "give it with --set")
    config.unknown = {key: reason for key, reason in config.unknown.items() if not is_set(key)}
    if refused:
        raise UserError(refused)


def _refused_number(config: Conversion, leaf: Leaf, why: str) -> Problem:
    location = f"{config.file}:{leaf.line}" if leaf.line else config.file
    return Problem(where=location, what=f"{leaf.key} = {value_text(leaf.value)} {why}", fix="correct the number")


def check_machines(config: Conversion) -> None:
    """Raise UserError for more ranks than a job may have."""
    hosts, devices_each = config.machines
    if hosts * devices_each > MAX_RANKS:
        problem = f"{hosts:,} hosts × {devices_each:,} devices are more than {MAX_RANKS:,} ranks"
        raise UserError(
            Problem(where=config.file, what=problem, fix="correct the number of hosts, or of devices of each")
        )


def _missing_sizes(config: Conversion) -> list[str]:
    """Return the model sizes that are not set."""
    if config.job_value("model.preset") or config.job_value("model.hf_config"):
        return []
    return [name for name in NEEDED if f"model.{name}" not in config.values]


def add_stand_ins(config: Conversion) -> None:
    """Fill in stand-ins for missing values, so that the others can be loaded as a job; they must not be planned."""
    tensor, stages = config.int_of("parallel.tensor"), config.int_of("parallel.pipeline")
    chunks = config.int_of("parallel.virtual_pipeline")
    heads = config.int_of("model.heads", max(1, tensor))
    model = {"name": "unknown", "layers": max(1, stages * chunks), "heads": heads, "hidden": 64 * heads, "vocab": 1}
    missing_sizes = _missing_sizes(config)
    if missing_sizes:
        for name, value in ({"ffn": 64 * heads, "kv_heads": heads, "head_dim": 64} | model).items():
            config.values.setdefault(f"model.{name}", JobSetting(value=value, note=STAND_IN))
    experts, has_experts = config.int_of("parallel.expert"), "model.experts" in config.values
    if experts > 1 and not has_experts and (missing_sizes or "num_experts" in config.unreadable):
        for name, value in {"experts": experts, "experts_per_token": 1, "expert_ffn": 64}.items():
            config.values.setdefault(f"model.{name}", JobSetting(value=value, note=STAND_IN))
    if not config.values.keys() & {"batch.global_sequences", "batch.global_tokens"}:
        size = config.int_of("batch.micro") * config.int_of("parallel.data")
        config.values["batch.global_sequences"] = JobSetting(value=size, note=STAND_IN)
