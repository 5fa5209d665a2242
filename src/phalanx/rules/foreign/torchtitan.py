"""torchtitan's TOML job configuration.

Keys and defaults: torchtitan/config/job_config.py, from v0.1 (`training.batch_size`) to the last TOML editions
(`training.local_batch_size`, `compile.enable`). Newer editions are configured in Python; a TOML of theirs, or the flags
on the command line, are what is read here.
"""

from __future__ import annotations

from phalanx.rules.foreign.conversion import NEVER, Conversion

# Flavours with a preset of ours: torchtitan/models/*/__init__.py
PRESETS = {
    ("llama3", "8b"): "llama-3-8b",
    ("llama3", "70b"): "llama-3-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
}
DEBUG = {"layers": 6, "hidden": 256, "heads": 16, "kv_heads": 16, "ffn": 768, "vocab": 2048, "rope_theta": 500_000.0}

IRRELEVANT = {
    "job.": "names and folders",
    "metrics.": "which logger writes the metrics; telemetry rules look at the run itself",
    "profiling.": "profiler traces",
    "model.tokenizer_path": "the tokenizer does not change the work of a step",
    "model.hf_assets_path": "the tokenizer does not change the work of a step",
    "model.tokenizer_": "the tokenizer does not change the work of a step",
    "model.print_after_conversion": "printing",
    "training.dataset": "which text is read does not change the work of a step",
    "training.dataset_path": "which text is read does not change the work of a step",
    "training.gc_freq": "Python's garbage collection",
    "training.gc_debug": "Python's garbage collection",
    "optimizer.implementation": "the same update, another kernel",
    "checkpoint.export_dtype": "format of the exported weights",
    "checkpoint.last_save_model_only": "the last save only",
    "checkpoint.last_save_in_hf": "the last save only",
    "checkpoint.model_weights_only": "the last save only",
    "checkpoint.load_step": "where a run goes on",
    "checkpoint.initial_load_": "where a run starts",
    "checkpoint.exclude_from_loading": "where a run starts",
    "checkpoint.enable_first_step_checkpoint": "one extra save",
    "checkpoint.create_seed_checkpoint": "where a run starts",
    "comm.trace_buf_size": "flight recorder",
    "comm.save_traces_": "flight recorder",
    "memory_estimation.": "an estimate before the run; the plan makes one",
    "validation.": "evaluation",
    "debug.": "debugging",
    "compile.components": "what is compiled",
    "activation_checkpoint.per_op_sac_": "a detail of selective recomputation",
    "float8.force_recompute_fp8_weight_in_bwd": "memory against time within fp8",
    "float8.emulate": "for tests without the hardware",
}
CONVERTERS = ("float8.", "quantize.", "mx.")
UNMAPPED = {
    "float8.enable_fsdp_float8_all_gather": "weights travel in fp8; the job schema has a word for gradients only",
    "float8.precompute_": "weights travel in fp8; the job schema has a word for gradients only",
    "parallelism.enable_async_tensor_parallel": "overlap within the tensor group is the efficiency profile's matter",
    "parallelism.enable_compiled_autograd": "the planner knows no compiled autograd",
    "parallelism.pipeline_parallel_split_points": "the planner splits layers evenly",
    "parallelism.pipeline_parallel_layers_per_stage": "the planner splits layers evenly",
    "fault_tolerance.": "torchft has no word in the job schema",
    "parallelism.expert_tensor_parallel_degree": "the planner splits experts whole",
    "experimental.": "code of your own is not read",
}


def translate(config: Conversion) -> None:
    """Fill the conversion."""
    _model(config)
    _degrees(config)
    _batch(config)
    _precision(config)
    _optimizer(config)
    _checkpoint(config)
    _faults(config)
    _converters(config)
    config.close(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _converters(config: Conversion) -> None:
    """How a converter scales; where none is named its settings are dead."""
    used = config.value("precision.compute") == "fp8"
    for key in (key for key in config.leaves if key not in config.settled):
        if not used and key.startswith(CONVERTERS):
            config.skip(key, "no converter of model.converters reads it")
        elif key.startswith(("quantize.", "mx.")) or key == "float8.recipe_name":
            config.skip(key, "how fp8 is scaled: precision.compute is fp8 either way")


def _model(config: Conversion) -> None:
    name, flavor = config.text("model.name") or "llama3", config.text("model.flavor") or "debugmodel"
    if preset := PRESETS.get((name, flavor)):
        config.put("model.preset", preset, "model.flavor", "model.name", note=f"{name} {flavor}")
    elif (name, flavor) == ("llama3", "debugmodel"):
        for key, value in DEBUG.items():
            config.put(f"model.{key}", value, "model.flavor", "model.name", note="llama3 debugmodel")
        config.put("model.name", "llama3-debugmodel", "model.flavor", "model.name")
    else:
        for key in ("model.name", "model.flavor"):
            config.lacks(key, "the shape of this flavour is code of torchtitan's, which is not read")


def _degrees(config: Conversion) -> None:
    p = "parallelism."
    config.put("parallel.mode", "fixed", note="torchtitan searches nothing")
    for theirs, ours in (("tensor", "tensor"), ("pipeline", "pipeline"), ("context", "context"), ("expert", "expert")):
        if (degree := config.whole(f"{p}{theirs}_parallel_degree")) is not None:
            config.put(f"parallel.{ours}", max(1, degree), f"{p}{theirs}_parallel_degree")
    _sharding(config, p)
    tensor, pipeline = config.int_of("parallel.tensor"), config.int_of("parallel.pipeline")
    config.assume("parallel.sequence_parallel", tensor > 1, "its tensor parallelism always splits norms too")
    if (off := config.flag(f"{p}disable_loss_parallel")) is not None:
        config.put("parallel.loss_parallel", not off, f"{p}disable_loss_parallel")
    rotate = config.text(f"{p}context_parallel_rotate_method") or "allgather"
    kinds = {"allgather": "allgather", "alltoall": "ring"}
    config.put("parallel.context_kind", kinds.get(rotate, "allgather"), f"{p}context_parallel_rotate_method")
    _schedule(config, p, pipeline)
    _recompute(config)


def _sharding(config: Conversion, p: str) -> None:
    replicas, shard = config.whole(f"{p}data_parallel_replicate_degree"), config.whole(f"{p}data_parallel_shard_degree")
    replicas, shard = 1 if replicas is None else replicas, -1 if shard is None else shard
    policy = config.text(f"{p}fsdp_reshard_after_forward") or "default"
    keeps = policy == "never" or (policy == "default" and (config.whole(f"{p}pipeline_parallel_degree") or 1) > 1)
    names = (f"{p}data_parallel_shard_degree", f"{p}fsdp_reshard_after_forward")
    if shard == 1:
        config.put("parallel.zero", 0, *names, note="no sharding: DDP")
    else:
        config.put(
            "parallel.zero", 2 if keeps else 3, *names, note="FSDP" + (" that keeps the weights" if keeps else "")
        )
    if shard > 0:
        config.put(
            "parallel.data", replicas * shard, f"{p}data_parallel_replicate_degree", names[0], note="both degrees"
        )
        config.put("parallel.shard", shard, names[0])
    elif replicas > 1:
        config.put("parallel.shard_copies", replicas, f"{p}data_parallel_replicate_degree")
        config.used(names[0], by="parallel.shard: the devices that are left")
    else:
        config.used(
            f"{p}data_parallel_replicate_degree", names[0], by="parallel.data = auto: the devices that are left"
        )
    if shard == 1:
        config.assume("comm.bucket_mib", 100, "bucket_cap_mb of its replicate()")


def _schedule(config: Conversion, p: str, pipeline: int) -> None:
    name = config.text(f"{p}pipeline_parallel_schedule") or "1f1b"
    known = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleavedzerobubble": "zero-bubble"}
    if name not in known:
        config.lacks(f"{p}pipeline_parallel_schedule", "the planner knows 1F1B, GPipe, Interleaved1F1B, zero bubble")
    if pipeline == 1:
        config.skip(f"{p}pipeline_parallel_schedule", "no effect with one stage")
        return
    config.put("parallel.schedule", known.get(name, "1f1b"), f"{p}pipeline_parallel_schedule")
    if known.get(name) == "interleaved":
        config.assume("parallel.virtual_pipeline", 2, "two stages per rank for looped schedules")


def _recompute(config: Conversion) -> None:
    mode = config.text("activation_checkpoint.mode") or "selective"
    option = config.text("activation_checkpoint.selective_ac_option")
    if mode == "selective" and option.isdigit() and int(option) >= 1:
        note = f"every layer of {option}, whole"
        config.put("parallel.recompute", "full", "activation_checkpoint.mode", note=note)
        config.lacks("activation_checkpoint.selective_ac_option", "the job counts layers per stage, not every n-th")
    else:
        words = {"full": "full", "none": "none", "selective": "selective", "memory_budget": "selective"}
        config.put("parallel.recompute", words.get(mode, "selective"), "activation_checkpoint.mode")
        config.used("activation_checkpoint.selective_ac_option", by="parallel.recompute")


def _batch(config: Conversion) -> None:
    sequence = config.whole("training.seq_len") or 2048
    config.put("data.sequence", sequence, "training.seq_len")
    local = "training.local_batch_size" if config.has("training.local_batch_size") else "training.batch_size"
    size = config.whole(local) or 8
    pipeline = config.int_of("parallel.pipeline")
    micro = (config.whole("parallelism.pipeline_parallel_microbatch_size") or 1) if pipeline > 1 else size
    name = "parallelism.pipeline_parallel_microbatch_size" if pipeline > 1 else local
    config.put("batch.micro", micro, name)
    if pipeline == 1:
        config.skip("parallelism.pipeline_parallel_microbatch_size", "no effect with one stage")
    total = config.whole("training.global_batch_size")
    if total is not None and total > 0:
        config.put("batch.global_sequences", total, "training.global_batch_size")
        config.used(local, by="batch.micro")
        if (
            pipeline > 1
        ):  # distributed/pipeline_parallel.py: a schedule runs over the local batch, again for each of them
            config.put("batch.fill", max(1, size // max(1, micro)), local)
    else:
        config.put("batch.per_replica", size, local, "training.global_batch_size", note=f"{size} per data rank")
    steps = config.whole("training.steps")
    config.put("data.steps", steps or 10_000, "training.steps")
    if (seed := config.whole("training.seed")) is not None or (seed := config.whole("debug.seed")) is not None:
        config.put("data.seed", abs(seed), "training.seed" if config.has("training.seed") else "debug.seed")
    for key in ("training.deterministic", "debug.deterministic"):
        config.lacks(key, "the same bits on the same ranks; numerics.reproducible means on any number of ranks")


def _precision(config: Conversion) -> None:
    formats = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    compute = formats.get(config.text("training.mixed_precision_param") or "bfloat16", "bf16")
    converters = config.text("model.converters")
    if any(word in converters for word in ("float8", "mx", "quantize")):
        config.put("precision.compute", "fp8", "model.converters", note=converters[:60])
        _spared(config)
        config.used("training.mixed_precision_param", by="precision.compute: what is not fp8")
    else:
        config.put("precision.compute", compute, "training.mixed_precision_param")
        if config.has("model.converters"):
            config.skip("model.converters", "no converter that changes the number format")
    reduce = formats.get(config.text("training.mixed_precision_reduce") or "float32", "fp32")
    config.put("precision.grad_reduce", "bf16" if reduce != "fp32" else "fp32", "training.mixed_precision_reduce")
    if config.text("training.dtype") == "bfloat16":
        config.put("precision.master_weights", False, "training.dtype")
        config.put("precision.optimizer_state", "bf16", "training.dtype")
    else:
        config.put("precision.master_weights", True, "training.dtype", note="weights are fp32, cast for each use")
        config.put("precision.optimizer_state", "fp32", "training.dtype", note="moments in the format of the weights")
    for key in ("training.compile", "compile.enable"):
        if (compiled := config.flag(key)) is not None:
            config.put("train.compile", compiled, key)
    if offload := config.flag("training.enable_cpu_offload"):
        config.put("parallel.offload", "parameters", "training.enable_cpu_offload")
    elif offload is not None:
        config.used("training.enable_cpu_offload", by="parallel.offload")


def _spared(config: Conversion) -> None:
    """Linears alone are converted; the head is one, unless it is named (mx leaves it out by default)."""
    filters = [key for key in config.leaves if key.endswith("float8.filter_fqns")]
    named = any(word in config.text(key) for key in filters for word in ("output", "lm_head"))
    config.practice["fp8_spares_sensitive"] = named or "float8" not in config.text("model.converters")
    config.used(*filters, by="practice: fp8_spares_sensitive")


def _optimizer(config: Conversion) -> None:
    name = config.text("optimizer.name") or "adamw"
    if name in ("adamw", "adam"):
        config.put("optim.name", "adamw", "optimizer.name")
    elif name == "muon":
        config.put("optim.name", "muon", "optimizer.name")
    else:
        config.lacks("optimizer.name", "not an optimizer of the job schema")
    config.put("optim.lr", config.number("optimizer.lr") or 8e-4, "optimizer.lr")
    betas = [config.number("optimizer.beta1"), config.number("optimizer.beta2")]
    if any(one is not None for one in betas):
        values = [0.9 if betas[0] is None else betas[0], 0.95 if betas[1] is None else betas[1]]
        config.put("optim.betas", values, "optimizer.beta1", "optimizer.beta2")
    config.copy(
        {
            "optimizer.eps": ("optim.eps", Conversion.number),
            "optimizer.weight_decay": ("optim.weight_decay", Conversion.number),
            "training.max_norm": ("optim.clip", Conversion.number),
        }
    )
    if config.has("optimizer.early_step_in_backward"):
        config.lacks("optimizer.early_step_in_backward", "the planner updates after the backward pass")
    _schedule_of_lr(config)


def _schedule_of_lr(config: Conversion) -> None:
    s = "lr_scheduler."
    warmup = config.whole(f"{s}warmup_steps")
    config.put("optim.warmup_steps", 200 if warmup is None else warmup, f"{s}warmup_steps")
    kind, ratio = config.text(f"{s}decay_type") or "linear", config.number(f"{s}decay_ratio")
    if kind == "cosine" and ratio is None:
        config.put("optim.schedule", "cosine", f"{s}decay_type")
    else:
        config.put("optim.schedule", "wsd", f"{s}decay_type", f"{s}decay_ratio", note=f"warm-up, then {kind} decay")
        config.put("optim.decay", 1.0 if ratio is None else ratio, f"{s}decay_ratio", f"{s}decay_type")
    for key in (f"{s}lr_min", f"{s}min_lr_factor"):
        if (last := config.number(key)) is not None:
            config.put("optim.final_lr", last, key)
    config.assume("optim.final_lr", 0.0)


def _checkpoint(config: Conversion) -> None:
    c = "checkpoint."
    switch = f"{c}enable_checkpoint" if config.has(f"{c}enable_checkpoint") else f"{c}enable"
    on = bool(config.flag(switch))
    steps = config.whole(f"{c}interval")
    if on:
        config.put("checkpoint.steps", steps or 500, f"{c}interval", switch)
    else:
        config.put("checkpoint.steps", NEVER, switch, note="checkpoints are off")
        config.practice["saves"] = False
        config.skip(f"{c}interval", "checkpoints are off")
    config.copy({f"{c}folder": ("checkpoint.path", _path)})
    keep = config.whole(f"{c}keep_latest_k")
    note = "0 keeps all" if keep == 0 else ""
    config.put("checkpoint.keep", 10**6 if keep == 0 else keep or 10, f"{c}keep_latest_k", note=note)
    mode = config.text(f"{c}async_mode") or "disabled"
    config.put("checkpoint.async", mode != "disabled", f"{c}async_mode")


def _path(config: Conversion, name: str) -> str:
    leaf = config.leaf(name)
    text = str(leaf.value) if leaf is not None else ""
    return text if text.isprintable() and len(text) < 1000 else ""


def _faults(config: Conversion) -> None:
    config.copy(
        {
            "comm.init_timeout_seconds": ("comm.init_timeout_s", Conversion.number),
            "comm.train_timeout_seconds": ("train.timeout_s", Conversion.number),
        }
    )
    config.assume("comm.init_timeout_s", 300)
    config.assume("train.timeout_s", 100)
    if config.flag("fault_tolerance.enable"):
        config.put("fault.recovery", "shrink", "fault_tolerance.enable", note="torchft: replica groups come and go")
        config.practice |= {"step_transaction": True}
    elif config.has("fault_tolerance.enable"):
        config.used("fault_tolerance.enable", by="fault.recovery")
