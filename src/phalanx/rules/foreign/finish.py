"""What a reader leaves open: sizes per replica, steps and increments in the job's units, once the world is known."""

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
    """Settle the open ends; `devices` is 0 where neither the file nor the caller says."""
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
    """A learning rate of 0 where no step is trained, or one: the file evaluates."""
    rate = config.values.get("optim.lr")
    if rate is None or rate.value not in (0, 0.0):
        return
    epochs, steps = config.read_number("num_train_epochs"), config.job_value("data.steps")
    if epochs == 0 or (isinstance(steps, int) and steps <= 1):
        del config.values["optim.lr"]
        config.unknown["optim.lr"] = f"{rate.key} is 0, and nothing is trained"


def _apply_overrides(config: Conversion, settings: Sequence[str]) -> None:
    """--set goes before everything the file says."""
    draft = Draft(path=Path(config.file), table={}, lines={})
    apply_overrides(draft, settings)
    if draft.problems:
        raise UserError(draft.problems)
    for section, table in draft.table.items():
        inner = table.items() if isinstance(table, dict) else [("", table)]
        for name, value in inner:
            key = f"{section}.{name}" if name else section
            config.values[key] = JobSetting(value=value, note=draft.settings.get(key, "--set"))
            if key == "checkpoint.interval_s":
                config.practice.pop("saves", None)
            if key in PAIRS:
                for other in (PAIRS[key], "batch.per_replica"):
                    config.values.pop(other, None)


def _set_sequence(config: Conversion) -> None:
    """Said, or published with the model, or our default: never silently."""
    if "data.sequence" in config.values:
        return
    name = config.job_value("model.preset")
    known = known_presets()[name].train.get("sequence") if isinstance(name, str) and name in known_presets() else None
    note = f"not said: that of {name}" if known else "not said: the default of Phalanx"
    reach = config.int_of("model.max_positions", -1)
    if not known and reach > 0:
        known, note = reach, "not said: as many as there are learned positions"
    config.values["data.sequence"] = JobSetting(value=known or Data().sequence, note=note)
    if reach == 0:  # neither is said: a table that holds the sequence
        config.values["model.max_positions"] = JobSetting(value=known or Data().sequence, note=note)


def _data_ranks(config: Conversion, devices: int) -> int:
    """Data ranks, or 0."""
    data = config.job_value("parallel.data")
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    apart = 1
    for name in ("tensor", "pipeline", "context"):
        if not _is_degree_known(config, f"parallel.{name}"):
            return 0
        apart *= max(1, config.int_of(f"parallel.{name}"))
    return devices // apart if devices and devices % apart == 0 else 0


def _is_degree_known(config: Conversion, key: str) -> bool:
    """Whether a degree is said, or left out where nothing else may say it."""
    said = config.values.get(key)
    if said is not None and said.note.startswith("--set"):
        return True
    return key not in config.unknown and not (config.open_why and (said is None or not said.key))


def _set_batch(config: Conversion, data: int) -> None:
    said = config.values.pop("batch.per_replica", None)
    if (why := config.unknown.get("batch.per_replica")) is not None and "batch.global_sequences" not in config.values:
        config.unknown.setdefault("batch.global_sequences", why)
        said = None
    if said is not None and isinstance(said.value, int):
        if data:
            note = f"{said.note} × {data} data ranks"
            config.values["batch.global_sequences"] = JobSetting(
                value=said.value * data, key=said.key, note=note, line=said.line
            )
        elif said.key:
            config.leave_unmapped(
                said.key, "per data rank: the global batch follows once --cluster says how many there are"
            )
    for key, settled in list(config.settled.items()):
        if settled.text == "batch.per_replica":
            config.mark_used(key, by="batch.global_sequences")
    _set_accumulation(config, data)


def _set_accumulation(config: Conversion, data: int) -> None:
    """Passes of a step: with the global batch they say the micro-batch, with the micro-batch the global one."""
    said = config.values.pop("batch.accumulation", None)
    if said is None or not isinstance(said.value, int):
        return
    total, micro = config.int_of("batch.global_sequences", 0), config.int_of("batch.micro", 0)
    share = said.value * data
    if not share or not (total or micro):
        why = "passes per step: --set batch.micro or batch.global_sequences, and --cluster, make a batch of them"
        return _list_unmapped(config, said, why)
    if not micro and total % share == 0:
        note = f"{total} / ({data} data ranks × {said.value} passes)"
        config.values["batch.micro"] = JobSetting(value=total // share, key=said.key, note=note, line=said.line)
    elif not total:
        note = f"micro-batch {micro} × {said.value} passes × {data} data ranks"
        config.values["batch.global_sequences"] = JobSetting(
            value=micro * share, key=said.key, note=note, line=said.line
        )
    elif total != micro * share:
        had = f"micro-batch {micro}" if micro else "whole sequences"
        return _list_unmapped(
            config, said, f"{total:,} sequences on {data} data ranks in {had} are not {said.value} passes"
        )
    config.mark_used(said.key, by="batch.global_sequences / (micro × data)")


def _list_unmapped(config: Conversion, said: JobSetting, why: str) -> None:
    if said.key in config.settled and config.settled[said.key].text == "batch.accumulation":
        config.leave_unmapped(said.key, why)


def _set_fill(config: Conversion, data: int) -> None:
    """A pipeline that is drained before the step ends; where one fill is the whole step there is nothing to say."""
    said = config.values.pop("batch.fill", None)
    if said is None or not isinstance(said.value, int):
        return
    total, micro = config.int_of("batch.global_sequences", 0), config.int_of("batch.micro")
    if total and data and total <= said.value * micro * data:
        config.mark_used(said.key, by="batch.global_sequences")
        return
    config.practice["pipeline_fill"] = said.value
    why = f"a pipeline is drained after {said.value:,} micro-batches: BAT004 counts so, the plan's step drains it once"
    config.leave_unmapped(said.key, why)


def _step_tokens(config: Conversion) -> int:
    """Tokens per step, or 0."""
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
    for name, ours, unit, each in (
        ("data.steps", "data.tokens", "steps", step),
        ("data.samples", "data.tokens", "sequences", sequence),
        ("optim.warmup_steps", "optim.warmup_tokens", "steps", step),
        ("optim.warmup_samples", "optim.warmup_tokens", "sequences", sequence),
    ):
        said = config.values.pop(name, None)
        if said is None or not isinstance(said.value, int) or ours in config.values:
            continue
        if each:
            note = f"{said.value:,} {unit} × {each:,} tokens" + (f"; {said.note}" if said.note else "")
            config.values[ours] = JobSetting(value=max(0, said.value) * each, key=said.key, note=note, line=said.line)
            config.mark_used(said.key, by=ours)
        elif said.key:
            config.leave_unmapped(said.key, "in steps: tokens follow once the global batch is known")


def _set_ramp(config: Conversion) -> None:
    """Megatron's start, increment and length as stages: each increment lasts equally many sequences."""
    said = config.values.pop("batch.ramp_of", None)
    if said is None or not isinstance(said.value, list):
        return
    total, sequence = config.int_of("batch.global_sequences", 0), config.int_of("data.sequence", 0)
    stages = _ramp_stages(said.value, total) if len(said.value) == 3 else []
    if not stages or not sequence:
        config.leave_unmapped(said.key, "not a start, an increment and a length that reach the global batch")
        return
    value = [{"until_tokens": until * sequence, "global_tokens": size * sequence} for until, size in stages]
    count = (total - said.value[0]) // said.value[1]
    note = f"{count} increments" + (f" as {len(value)} stages" if len(value) < count else "")
    config.values["batch.ramp"] = JobSetting(value=value, key=said.key, note=note, line=said.line)
    config.mark_used(said.key, by="batch.ramp")


MOST_STAGES = (
    8  # GPT-3's 95 increments would be priced one by one: each stage is, and the plan takes a second more per 20
)


def _ramp_stages(ramp: list[int], total: int) -> list[tuple[int, int]]:
    """(sequences seen when it ends, sequences per step) of each stage; the middle one stands for many increments.

    >>> _ramp_stages([16, 16, 90], 64)
    [(30, 16), (60, 32), (90, 48)]
    """
    start, step, length = ramp
    if step < 1 or start < 1 or length < 1 or total <= start or (total - start) % step:
        return []
    count = (total - start) // step
    number = min(count, MOST_STAGES)
    edges = [count * index // number for index in range(number + 1)]
    return [(length * after // count, start + (before + after - 1) // 2 * step) for before, after in pairwise(edges)]


def _set_sharding(config: Conversion, data: int) -> None:
    said = config.values.pop("parallel.shard_copies", None)
    if said is not None and isinstance(said.value, int):
        if data and said.value > 0 and data % said.value == 0:
            config.values["parallel.shard"] = JobSetting(
                value=data // said.value, key=said.key, note=f"{data} data ranks / {said.value}", line=said.line
            )
            config.mark_used(said.key, by="parallel.shard")
        else:
            config.leave_unmapped(said.key, "the shard group follows once --cluster says how many data ranks there are")
    _shard_group(config, data)
    if config.int_of("parallel.tensor") == 1 and config.job_value("parallel.sequence_parallel") is True:
        key = config.values.pop("parallel.sequence_parallel").key
        config.skip_leaf(key, "no effect without tensor parallelism")
    if config.int_of("parallel.context") == 1:
        config.values.pop("parallel.context_kind", None)


def _shard_group(config: Conversion, data: int) -> None:
    """Their shard group spans the context ranks too, and all data ranks unless they say otherwise."""
    said, context = config.values.get("parallel.shard"), config.int_of("parallel.context")
    if config.int_of("parallel.zero", -1) == 0:
        config.values.pop("parallel.shard", None)
    elif said is None and data:
        config.assume_default("parallel.shard", data * context, "over all data and context ranks")
    elif said is not None and isinstance(said.value, int) and context > 1 and not said.note.startswith("--set"):
        note = f"{said.value} data × {context} context ranks"
        config.values["parallel.shard"] = replace(said, value=said.value * context, note=note)
    group, fixed = config.int_of("parallel.shard"), config.job_value("parallel.data")
    if isinstance(fixed, int) and fixed % max(
        1, group
    ):  # the schema counts groups within data; the devices say the rest
        config.values.pop("parallel.data")


LEAST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # parameters: core/distributed/distributed_data_parallel.py


def _set_bucket(config: Conversion, data: int) -> None:
    """Megatron Core's default, which grows with the data ranks."""
    said = config.values.pop("comm.bucket_width", None)
    if said is None or not isinstance(said.value, int):
        return
    ranks = data * config.int_of("parallel.context")
    size = max(LEAST_BUCKET, BUCKET_PER_RANK * ranks)
    note = f"max(40e6, 1e6 × {ranks or 'data'} ranks) parameters × {said.value} bytes"
    config.assume_default("comm.bucket_mib", round(min(65_536.0, size * said.value / 2**20), 1), note)


def _set_habits(config: Conversion, habits: Practice) -> None:
    """What Phalanx does by itself and these trainers do not, said in the job's own keys."""
    limit = config.job_value("train.timeout_s")
    config.assume_default("fault.detect_s", limit, "a rank that hangs is noticed by the timeout of a collective")
    if not config.practice.get("heartbeat_s"):  # else the patience with a silent rank is the heartbeat's own matter
        note = "no heartbeat: a rank that hangs is noticed by the same timeout"
        config.assume_default("fault.dead_after_s", limit, note)
    # No defaults of the trainer's: whether something starts it again, and on what, no file of theirs says.
    again = "not said: a lost rank ends the job, and the scheduler may start it again"
    config.values.setdefault("fault.recovery", JobSetting(value="stop", note=again))
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
    lacking = _missing_sizes(config)
    if lacking == ["vocab"]:
        config.add_missing("does not say the size of the vocabulary", "give --set model.vocab=128256")
    elif lacking:
        config.add_missing("does not say which model is trained", GIVE_MODEL)


MODEL_SIZES = ("num_layers", "hidden_size", "num_attention_heads")  # no trainer gives -1 or 0 a meaning here
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
    """A size that cannot be read must not become the trainer's default: the layout would be another one."""

    def is_set(key: str) -> bool:
        said = config.values.get(key)
        return said is not None and said.note.startswith("--set")

    refused: list[Problem] = []
    for name in MODEL_SIZES:
        number, sized = config.read_number(name), config.find_leaf(name)
        if number is not None and number < 1 and sized is not None and not is_set(DECISIVE[name]):
            refused.append(_refused_number(config, sized, "is below 1"))
    for name, leaf in config.unreadable.items():
        key = DECISIVE.get(name, "")
        if not key or is_set(key):
            continue
        if leaf.unknown:
            config.unknown[key] = f"{leaf.key} {leaf.unknown}"
            where = f" (line {leaf.line})" if leaf.line else ""
            what = f"{leaf.key} is not known: {leaf.unknown}{where}"
            variable = re.search(r"\$(\w+)", str(leaf.value))
            give = f"--set {variable.group(1)}=…, or --set {key}=…" if variable else f"--set {key}=…"
            config.add_missing(what, f"give {give}")
        elif is_number_literal(leaf.value):
            refused.append(_refused_number(config, leaf, f"is not a finite number below {MOST:.0e}"))
        else:
            config.unknown[key] = f"{leaf.key} = {value_text(leaf.value)} is not a number"
            config.add_missing(f"{leaf.key} = {value_text(leaf.value)} is not a number", f"give --set {key}=…")
    for key in [one for one in config.unknown if one in DECISIVE.values() and not is_set(one)]:
        if not any(leaf.unknown and DECISIVE.get(name) == key for name, leaf in config.unreadable.items()):
            config.add_missing(f"{key} is not known: {config.unknown[key]}", f"give --set {key}=…")
    if config.open_why:
        for key in sorted({*DECISIVE.values()}):
            said = config.values.get(key)
            if said is None or not (said.key or is_set(key)):
                config.unknown[key] = config.open_why
        config.add_missing(f"may be given more arguments: {config.open_why}", "give it with --set")
    config.unknown = {key: why for key, why in config.unknown.items() if not is_set(key)}
    if refused:
        raise UserError(refused)


def _refused_number(config: Conversion, leaf: Leaf, why: str) -> Problem:
    where = f"{config.file}:{leaf.line}" if leaf.line else config.file
    return Problem(where=where, what=f"{leaf.key} = {value_text(leaf.value)} {why}", fix="correct the number")


def check_machines(config: Conversion) -> None:
    """Refuse a cluster that no job may have: hosts and devices are multiplied, and ranks are counted."""
    hosts, each = config.machines
    if hosts * each > MAX_RANKS:
        what = f"{hosts:,} hosts × {each:,} devices are more than {MAX_RANKS:,} ranks"
        raise UserError(Problem(where=config.file, what=what, fix="correct the number of hosts, or of devices of each"))


def _missing_sizes(config: Conversion) -> list[str]:
    """Sizes of the model that nothing says."""
    if config.job_value("model.preset") or config.job_value("model.hf_config"):
        return []
    return [name for name in NEEDED if f"model.{name}" not in config.values]


def add_stand_ins(config: Conversion) -> None:
    """Numbers in place of what is missing, so that the rest can be read as a job; nothing is planned from them."""
    tensor, stages = config.int_of("parallel.tensor"), config.int_of("parallel.pipeline")
    chunks = config.int_of("parallel.virtual_pipeline")
    heads = config.int_of("model.heads", max(1, tensor))
    model = {"name": "unknown", "layers": max(1, stages * chunks), "heads": heads, "hidden": 64 * heads, "vocab": 1}
    lacking = _missing_sizes(config)
    if lacking:
        for name, value in ({"ffn": 64 * heads, "kv_heads": heads, "head_dim": 64} | model).items():
            config.values.setdefault(f"model.{name}", JobSetting(value=value, note=STAND_IN))
    experts, known = config.int_of("parallel.expert"), "model.experts" in config.values
    if experts > 1 and not known and (lacking or "num_experts" in config.unreadable):
        for name, value in {"experts": experts, "experts_per_token": 1, "expert_ffn": 64}.items():
            config.values.setdefault(f"model.{name}", JobSetting(value=value, note=STAND_IN))
    if not config.values.keys() & {"batch.global_sequences", "batch.global_tokens"}:
        size = config.int_of("batch.micro") * config.int_of("parallel.data")
        config.values["batch.global_sequences"] = JobSetting(value=size, note=STAND_IN)
