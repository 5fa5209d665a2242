"""torchtitan's TOML job configuration.

Keys and defaults: torchtitan/config/job_config.py, from v0.1 (`training.batch_size`) to the last TOML editions
(`training.local_batch_size`, `compile.enable`). Newer editions are configured in Python; a TOML of theirs, or the flags
on the command line, are what is read here.
"""

from __future__ import annotations

from phalanx.rules.foreign.book import NEVER, Book

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


def translate(book: Book) -> None:
    """Fill the book."""
    _model(book)
    _degrees(book)
    _batch(book)
    _precision(book)
    _optimizer(book)
    _checkpoint(book)
    _faults(book)
    _converters(book)
    book.close(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _converters(book: Book) -> None:
    """How a converter scales; where none is named its settings are dead."""
    used = book.value("precision.compute") == "fp8"
    for key in (key for key in book.leaves if key not in book.settled):
        if not used and key.startswith(CONVERTERS):
            book.skip(key, "no converter of model.converters reads it")
        elif key.startswith(("quantize.", "mx.")) or key == "float8.recipe_name":
            book.skip(key, "how fp8 is scaled: precision.compute is fp8 either way")


def _model(book: Book) -> None:
    name, flavor = book.text("model.name") or "llama3", book.text("model.flavor") or "debugmodel"
    if preset := PRESETS.get((name, flavor)):
        book.put("model.preset", preset, "model.flavor", "model.name", note=f"{name} {flavor}")
    elif (name, flavor) == ("llama3", "debugmodel"):
        for key, value in DEBUG.items():
            book.put(f"model.{key}", value, "model.flavor", "model.name", note="llama3 debugmodel")
        book.put("model.name", "llama3-debugmodel", "model.flavor", "model.name")
    else:
        for key in ("model.name", "model.flavor"):
            book.lacks(key, "the shape of this flavour is code of torchtitan's, which is not read")


def _degrees(book: Book) -> None:
    p = "parallelism."
    book.put("parallel.mode", "fixed", note="torchtitan searches nothing")
    for theirs, ours in (("tensor", "tensor"), ("pipeline", "pipeline"), ("context", "context"), ("expert", "expert")):
        if (degree := book.whole(f"{p}{theirs}_parallel_degree")) is not None:
            book.put(f"parallel.{ours}", max(1, degree), f"{p}{theirs}_parallel_degree")
    _sharding(book, p)
    tensor, pipeline = book.int_of("parallel.tensor"), book.int_of("parallel.pipeline")
    book.assume("parallel.sequence_parallel", tensor > 1, "its tensor parallelism always splits norms too")
    if (off := book.flag(f"{p}disable_loss_parallel")) is not None:
        book.put("parallel.loss_parallel", not off, f"{p}disable_loss_parallel")
    rotate = book.text(f"{p}context_parallel_rotate_method") or "allgather"
    kinds = {"allgather": "allgather", "alltoall": "ring"}
    book.put("parallel.context_kind", kinds.get(rotate, "allgather"), f"{p}context_parallel_rotate_method")
    _schedule(book, p, pipeline)
    _recompute(book)


def _sharding(book: Book, p: str) -> None:
    replicas, shard = book.whole(f"{p}data_parallel_replicate_degree"), book.whole(f"{p}data_parallel_shard_degree")
    replicas, shard = 1 if replicas is None else replicas, -1 if shard is None else shard
    policy = book.text(f"{p}fsdp_reshard_after_forward") or "default"
    keeps = policy == "never" or (policy == "default" and (book.whole(f"{p}pipeline_parallel_degree") or 1) > 1)
    names = (f"{p}data_parallel_shard_degree", f"{p}fsdp_reshard_after_forward")
    if shard == 1:
        book.put("parallel.zero", 0, *names, note="no sharding: DDP")
    else:
        book.put("parallel.zero", 2 if keeps else 3, *names, note="FSDP" + (" that keeps the weights" if keeps else ""))
    if shard > 0:
        book.put("parallel.data", replicas * shard, f"{p}data_parallel_replicate_degree", names[0], note="both degrees")
        book.put("parallel.shard", shard, names[0])
    elif replicas > 1:
        book.put("parallel.shard_copies", replicas, f"{p}data_parallel_replicate_degree")
        book.used(names[0], by="parallel.shard: the devices that are left")
    else:
        book.used(f"{p}data_parallel_replicate_degree", names[0], by="parallel.data = auto: the devices that are left")
    if shard == 1:
        book.assume("comm.bucket_mib", 100, "bucket_cap_mb of its replicate()")


def _schedule(book: Book, p: str, pipeline: int) -> None:
    name = book.text(f"{p}pipeline_parallel_schedule") or "1f1b"
    known = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleavedzerobubble": "zero-bubble"}
    if name not in known:
        book.lacks(f"{p}pipeline_parallel_schedule", "the planner knows 1F1B, GPipe, Interleaved1F1B, zero bubble")
    if pipeline == 1:
        book.skip(f"{p}pipeline_parallel_schedule", "no effect with one stage")
        return
    book.put("parallel.schedule", known.get(name, "1f1b"), f"{p}pipeline_parallel_schedule")
    if known.get(name) == "interleaved":
        book.assume("parallel.virtual_pipeline", 2, "two stages per rank for looped schedules")


def _recompute(book: Book) -> None:
    mode = book.text("activation_checkpoint.mode") or "selective"
    option = book.text("activation_checkpoint.selective_ac_option")
    if mode == "selective" and option.isdigit() and int(option) >= 1:
        note = f"every layer of {option}, whole"
        book.put("parallel.recompute", "full", "activation_checkpoint.mode", note=note)
        book.lacks("activation_checkpoint.selective_ac_option", "the job counts layers per stage, not every n-th")
    else:
        words = {"full": "full", "none": "none", "selective": "selective", "memory_budget": "selective"}
        book.put("parallel.recompute", words.get(mode, "selective"), "activation_checkpoint.mode")
        book.used("activation_checkpoint.selective_ac_option", by="parallel.recompute")


def _batch(book: Book) -> None:
    sequence = book.whole("training.seq_len") or 2048
    book.put("data.sequence", sequence, "training.seq_len")
    local = "training.local_batch_size" if book.has("training.local_batch_size") else "training.batch_size"
    size = book.whole(local) or 8
    pipeline = book.int_of("parallel.pipeline")
    micro = (book.whole("parallelism.pipeline_parallel_microbatch_size") or 1) if pipeline > 1 else size
    name = "parallelism.pipeline_parallel_microbatch_size" if pipeline > 1 else local
    book.put("batch.micro", micro, name)
    if pipeline == 1:
        book.skip("parallelism.pipeline_parallel_microbatch_size", "no effect with one stage")
    total = book.whole("training.global_batch_size")
    if total is not None and total > 0:
        book.put("batch.global_sequences", total, "training.global_batch_size")
        book.used(local, by="batch.micro")
        if (
            pipeline > 1
        ):  # distributed/pipeline_parallel.py: a schedule runs over the local batch, again for each of them
            book.put("batch.fill", max(1, size // max(1, micro)), local)
    else:
        book.put("batch.per_replica", size, local, "training.global_batch_size", note=f"{size} per data rank")
    steps = book.whole("training.steps")
    book.put("data.steps", steps or 10_000, "training.steps")
    if (seed := book.whole("training.seed")) is not None or (seed := book.whole("debug.seed")) is not None:
        book.put("data.seed", abs(seed), "training.seed" if book.has("training.seed") else "debug.seed")
    for key in ("training.deterministic", "debug.deterministic"):
        book.lacks(key, "the same bits on the same ranks; numerics.reproducible means on any number of ranks")


def _precision(book: Book) -> None:
    formats = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    compute = formats.get(book.text("training.mixed_precision_param") or "bfloat16", "bf16")
    converters = book.text("model.converters")
    if any(word in converters for word in ("float8", "mx", "quantize")):
        book.put("precision.compute", "fp8", "model.converters", note=converters[:60])
        _spared(book)
        book.used("training.mixed_precision_param", by="precision.compute: what is not fp8")
    else:
        book.put("precision.compute", compute, "training.mixed_precision_param")
        if book.has("model.converters"):
            book.skip("model.converters", "no converter that changes the number format")
    reduce = formats.get(book.text("training.mixed_precision_reduce") or "float32", "fp32")
    book.put("precision.grad_reduce", "bf16" if reduce != "fp32" else "fp32", "training.mixed_precision_reduce")
    if book.text("training.dtype") == "bfloat16":
        book.put("precision.master_weights", False, "training.dtype")
        book.put("precision.optimizer_state", "bf16", "training.dtype")
    else:
        book.put("precision.master_weights", True, "training.dtype", note="weights are fp32, cast for each use")
        book.put("precision.optimizer_state", "fp32", "training.dtype", note="moments in the format of the weights")
    for key in ("training.compile", "compile.enable"):
        if (compiled := book.flag(key)) is not None:
            book.put("train.compile", compiled, key)
    if offload := book.flag("training.enable_cpu_offload"):
        book.put("parallel.offload", "parameters", "training.enable_cpu_offload")
    elif offload is not None:
        book.used("training.enable_cpu_offload", by="parallel.offload")


def _spared(book: Book) -> None:
    """Linears alone are converted; the head is one, unless it is named (mx leaves it out by default)."""
    filters = [key for key in book.leaves if key.endswith("float8.filter_fqns")]
    named = any(word in book.text(key) for key in filters for word in ("output", "lm_head"))
    book.practice["fp8_spares_sensitive"] = named or "float8" not in book.text("model.converters")
    book.used(*filters, by="practice: fp8_spares_sensitive")


def _optimizer(book: Book) -> None:
    name = book.text("optimizer.name") or "adamw"
    if name in ("adamw", "adam"):
        book.put("optim.name", "adamw", "optimizer.name")
    elif name == "muon":
        book.put("optim.name", "muon", "optimizer.name")
    else:
        book.lacks("optimizer.name", "not an optimizer of the job schema")
    book.put("optim.lr", book.number("optimizer.lr") or 8e-4, "optimizer.lr")
    betas = [book.number("optimizer.beta1"), book.number("optimizer.beta2")]
    if any(one is not None for one in betas):
        values = [0.9 if betas[0] is None else betas[0], 0.95 if betas[1] is None else betas[1]]
        book.put("optim.betas", values, "optimizer.beta1", "optimizer.beta2")
    book.copy(
        {
            "optimizer.eps": ("optim.eps", Book.number),
            "optimizer.weight_decay": ("optim.weight_decay", Book.number),
            "training.max_norm": ("optim.clip", Book.number),
        }
    )
    if book.has("optimizer.early_step_in_backward"):
        book.lacks("optimizer.early_step_in_backward", "the planner updates after the backward pass")
    _schedule_of_lr(book)


def _schedule_of_lr(book: Book) -> None:
    s = "lr_scheduler."
    warmup = book.whole(f"{s}warmup_steps")
    book.put("optim.warmup_steps", 200 if warmup is None else warmup, f"{s}warmup_steps")
    kind, ratio = book.text(f"{s}decay_type") or "linear", book.number(f"{s}decay_ratio")
    if kind == "cosine" and ratio is None:
        book.put("optim.schedule", "cosine", f"{s}decay_type")
    else:
        book.put("optim.schedule", "wsd", f"{s}decay_type", f"{s}decay_ratio", note=f"warm-up, then {kind} decay")
        book.put("optim.decay", 1.0 if ratio is None else ratio, f"{s}decay_ratio", f"{s}decay_type")
    for key in (f"{s}lr_min", f"{s}min_lr_factor"):
        if (last := book.number(key)) is not None:
            book.put("optim.final_lr", last, key)
    book.assume("optim.final_lr", 0.0)


def _checkpoint(book: Book) -> None:
    c = "checkpoint."
    switch = f"{c}enable_checkpoint" if book.has(f"{c}enable_checkpoint") else f"{c}enable"
    on = bool(book.flag(switch))
    steps = book.whole(f"{c}interval")
    if on:
        book.put("checkpoint.steps", steps or 500, f"{c}interval", switch)
    else:
        book.put("checkpoint.steps", NEVER, switch, note="checkpoints are off")
        book.practice["saves"] = False
        book.skip(f"{c}interval", "checkpoints are off")
    book.copy({f"{c}folder": ("checkpoint.path", _path)})
    keep = book.whole(f"{c}keep_latest_k")
    note = "0 keeps all" if keep == 0 else ""
    book.put("checkpoint.keep", 10**6 if keep == 0 else keep or 10, f"{c}keep_latest_k", note=note)
    mode = book.text(f"{c}async_mode") or "disabled"
    book.put("checkpoint.async", mode != "disabled", f"{c}async_mode")


def _path(book: Book, name: str) -> str:
    leaf = book.leaf(name)
    text = str(leaf.value) if leaf is not None else ""
    return text if text.isprintable() and len(text) < 1000 else ""


def _faults(book: Book) -> None:
    book.copy(
        {
            "comm.init_timeout_seconds": ("comm.init_timeout_s", Book.number),
            "comm.train_timeout_seconds": ("train.timeout_s", Book.number),
        }
    )
    book.assume("comm.init_timeout_s", 300)
    book.assume("train.timeout_s", 100)
    if book.flag("fault_tolerance.enable"):
        book.put("fault.recovery", "shrink", "fault_tolerance.enable", note="torchft: replica groups come and go")
        book.practice |= {"step_transaction": True}
    elif book.has("fault_tolerance.enable"):
        book.used("fault_tolerance.enable", by="fault.recovery")
