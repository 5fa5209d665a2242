"""DeepSpeed's JSON. It says how a model is trained, never which one: --set model.preset=… adds that.

Keys and defaults: deepspeed/runtime/constants.py, runtime/zero/config.py, docs/_pages/config-json.md. "auto" is filled
in by Hugging Face's Trainer from its own arguments.
"""

from __future__ import annotations

from phalanx.rules.foreign.book import Book

BYTES = {"fp32": 4, "bf16": 2}
ELEMENTS = 500_000_000  # reduce_bucket_size by default
TIMEOUT_S = 1_800  # DEEPSPEED_TIMEOUT, 30 minutes: deepspeed/constants.py

IRRELEVANT = {
    "_": "a comment",
    "comment": "a comment",
    "steps_per_print": "logging",
    "wall_clock_breakdown": "logging",
    "memory_breakdown": "logging",
    "dump_state": "logging",
    "log_level": "logging",
    "comms_logger.": "logging",
    "tensorboard.": "logging",
    "wandb.": "logging",
    "comet.": "logging",
    "csv_monitor.": "logging",
    "monitor_config.": "logging",
    "flops_profiler.": "profiler traces",
    "autotuning.": "a search before the run",
    "zero_allow_untested_optimizer": "a permission",
    "zero_force_ds_cpu_optimizer": "a permission",
    "dataloader_drop_last": "data loading",
    "fp16.initial_scale_power": "where dynamic loss scaling starts",
    "fp16.loss_scale_window": "how dynamic loss scaling moves",
    "fp16.hysteresis": "how dynamic loss scaling moves",
    "fp16.consecutive_hysteresis": "how dynamic loss scaling moves",
    "fp16.min_loss_scale": "how low dynamic loss scaling goes",
    "fp16.auto_cast": "inputs are cast",
    "fp16.fused_mode": "which kernels",
    "fp16.": "fp16 is off, or a detail of it",
    "bf16.": "a detail of bf16",
    "amp.": "Apex AMP",
    "zero_optimization.contiguous_gradients": "memory layout",
    "zero_optimization.round_robin_gradients": "memory layout",
    "zero_optimization.ignore_unused_parameters": "a permission",
    "zero_optimization.allgather_partitions": "which collective gathers the weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the exported weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the exported weights",
    "zero_optimization.load_from_fp32_weights": "where a run starts",
    "zero_optimization.offload_optimizer.pin_memory": "a detail of offloading",
    "zero_optimization.offload_param.pin_memory": "a detail of offloading",
    "zero_optimization.offload_optimizer.": "a detail of offloading",
    "zero_optimization.offload_param.": "a detail of offloading",
    "zero_optimization.log_trace_cache_warnings": "logging",
    "activation_checkpointing.cpu_checkpointing": "off, or said by parallel.offload",
    "activation_checkpointing.profile": "logging",
    "aio.": "NVMe offloading's disk settings",
    "checkpoint.tag_validation": "checkpoint names",
    "optimizer.params.torch_adam": "which kernels",
    "optimizer.legacy_fusion": "which kernels",
    "scheduler.params.warmup_type": "the shape of the warm-up",
    "scheduler.params.warmup_min_lr": "where the warm-up starts",
    "prescale_gradients": "the same sum, scaled before",
    "gradient_predivide_factor": "the same sum, scaled before",
}
UNMAPPED = {
    "zero_optimization.allgather_bucket_size": "the job schema has one bucket size, that of the gradients",
    "zero_optimization.stage3_": "how far ZeRO-3 gathers ahead is the memory profile's matter",
    "zero_optimization.sub_group_size": "how far ZeRO-3 gathers ahead is the memory profile's matter",
    "zero_optimization.reduce_scatter": "which collective sums the gradients is the planner's choice",
    "zero_optimization.overlap_comm": "overlap is part of the efficiency profile, not of the job",
    "zero_optimization.zero_quantized_weights": "weights travel in int8; the job schema has a word for gradients only",
    "activation_checkpointing.": "how recomputed activations are stored; --set parallel.recompute says whether",
    "sparse_attention.": "the planner knows dense attention only",
    "moe": "experts are part of the model",
    "curriculum_learning.": "the sequence length changes during the run",
    "data_efficiency.": "the sequence length changes during the run",
    "elasticity.": "the batch follows the number of devices",
    "compression_training.": "the model is compressed while it is trained",
    "progressive_layer_drop.": "the model changes during the run",
    "tensor_parallel.": "AutoTP; --set parallel.tensor says how far",
    "pipeline.": "the stages are set where the model is built: --set parallel.pipeline says how many",
}


def translate(book: Book) -> None:
    """Fill the book."""
    for key, leaf in book.leaves.items():
        if leaf.value == "auto":
            book.lacks(key, "auto: Hugging Face's Trainer fills it in from its own arguments")
            book.read_as[key] = type(leaf)(key=key, value=None, line=leaf.line)
    _zero(book)
    _precision(book)
    _buckets(book)
    _batch(book)
    _optimizer(book)
    _pipeline(book)
    book.put("checkpoint.async", False, note="default of DeepSpeed: save_checkpoint stands still")
    book.theirs |= dict.fromkeys(("comm.init_timeout_s", "train.timeout_s"), "DEEPSPEED_TIMEOUT of the environment")
    book.assume("comm.init_timeout_s", TIMEOUT_S, "DEEPSPEED_TIMEOUT, 30 minutes")
    book.assume("train.timeout_s", TIMEOUT_S, "DEEPSPEED_TIMEOUT, 30 minutes")
    book.close(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _auto(book: Book, key: str) -> bool:
    """Whether a key is left to the Trainer."""
    return key in book.leaves and book.leaves[key].value == "auto"


def _zero(book: Book) -> None:
    z = "zero_optimization."
    book.put("parallel.mode", "fixed", note="DeepSpeed searches nothing")
    if (plain := book.flag("zero_optimization")) is not None:  # an old spelling: true is stage 1
        book.put("parallel.zero", int(plain), "zero_optimization")
    else:
        book.put("parallel.zero", book.whole(f"{z}stage") or 0, f"{z}stage")
    if (part := book.whole(f"{z}mics_shard_size")) is not None and part > 0:
        book.put("parallel.shard", part, f"{z}mics_shard_size", note="MiCS")
    elif book.has(f"{z}mics_shard_size"):
        book.used(f"{z}mics_shard_size", by="parallel.shard = auto: all data ranks")
    if (part := book.whole(f"{z}zero_hpz_partition_size")) is not None and part > 1:
        book.lacks(f"{z}zero_hpz_partition_size", "a second copy of the weights per host has no word in the job schema")
    elif book.has(f"{z}zero_hpz_partition_size"):
        book.used(f"{z}zero_hpz_partition_size", by="parallel.shard")
    for what, ours, old in (("optimizer", "optimizer", "cpu_offload"), ("param", "parameters", "cpu_offload_param")):
        device = book.text(f"{z}offload_{what}.device")
        if device in ("cpu", "nvme") or book.flag(f"{z}{old}"):
            note = "on NVMe: the planner counts host memory" if device == "nvme" else ""
            book.put("parallel.offload", ours, f"{z}offload_{what}.device", f"{z}{old}", note=note)
        else:
            book.used(f"{z}offload_{what}.device", f"{z}{old}", by="parallel.offload")


def _precision(book: Book) -> None:
    brain = book.flag("bf16.enabled") or book.flag("bfloat16.enabled")
    half = book.flag("fp16.enabled")
    names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    compute = "bf16" if brain else "fp16" if half else "fp32"
    if compute == "fp32" and any(_auto(book, name) for name in names):
        compute = "what it computes in"  # nobody knows yet: `finish` asks for it
    else:
        book.put("precision.compute", compute, *sorted(names, key=lambda name: not book.flag(name)))
    scale = book.number("fp16.loss_scale")
    if compute == "fp16" and scale:
        book.put("precision.loss_scale", scale, "fp16.loss_scale", note="static")
    elif compute == "fp16":
        book.put("precision.loss_scale", "auto", "fp16.loss_scale", note="0 is dynamic")
    wire = book.text("communication_data_type") or book.text("data_types.grad_accum_dtype")
    wide = wire == "fp32" if wire else compute == "fp32"
    note = "" if wire else f"default of DeepSpeed: gradients travel as {compute}"
    if not wide and (wire == "fp16" or (not wire and compute == "fp16")):
        book.practice["sums_in"] = "fp16"
        note = f"{note or 'fp16'}: the nearest word is bf16"
    book.put("precision.grad_reduce", "fp32" if wide else "bf16", "communication_data_type", note=note)
    if (accumulate := book.text("data_types.grad_accum_dtype")) and book.has("communication_data_type"):
        book.lacks("data_types.grad_accum_dtype", f"{accumulate[:8]}: the job has one format for summing")
    elif accumulate:
        book.used("data_types.grad_accum_dtype", by="precision.grad_reduce")
    for key in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if (short := book.flag(key)) is not None:
            book.put("precision.master_weights", not short, key)
    book.assume("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
    if book.value("precision.master_weights") is True:
        book.assume("precision.optimizer_state", "fp32", "moments in the format of the weights that are updated")
    if book.flag("zero_optimization.zero_quantized_gradients"):
        book.put("parallel.compression", "int8", "zero_optimization.zero_quantized_gradients", note="ZeRO++ qgZ")
    elif book.has("zero_optimization.zero_quantized_gradients"):
        book.used("zero_optimization.zero_quantized_gradients", by="parallel.compression")


def _buckets(book: Book) -> None:
    width = BYTES[str(book.value("precision.grad_reduce"))]
    key = "zero_optimization.reduce_bucket_size"
    size = book.number(key)
    if size:
        mib = min(65_536.0, size * width / 2**20)
        book.put("comm.bucket_mib", round(mib, 1), key, note=f"{size:,.0f} elements × {width} bytes")
    elif not _auto(book, key):
        book.assume("comm.bucket_mib", round(ELEMENTS * width / 2**20, 1), f"5e8 elements × {width} bytes")


def _batch(book: Book) -> None:
    micro = book.whole("train_micro_batch_size_per_gpu")
    if micro:
        book.put("batch.micro", micro, "train_micro_batch_size_per_gpu")
    passes = book.whole("gradient_accumulation_steps") or 1
    if total := book.whole("train_batch_size"):
        book.put("batch.global_sequences", total, "train_batch_size")
        book.used("gradient_accumulation_steps", by="batch.global_sequences / (micro × data)")
        if not micro and book.has("gradient_accumulation_steps"):
            book.put("batch.accumulation", passes, "gradient_accumulation_steps")
    elif micro:
        note = f"{micro} × {passes} passes per data rank"
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        book.put("batch.per_replica", micro * passes, *names, note=note)


def _optimizer(book: Book) -> None:
    name = book.text("optimizer.type")
    if name in ("adam", "adamw"):
        book.put("optim.name", "adamw", "optimizer.type")
    elif name == "muon":
        book.put("optim.name", "muon", "optimizer.type")
    elif name:
        why = "compressed updates with error feedback" if "onebit" in name or "zeroone" in name else "another optimizer"
        book.lacks("optimizer.type", f"{why}: not one of the job schema's")
    book.copy(
        {
            "optimizer.params.lr": ("optim.lr", Book.number),
            "optimizer.params.eps": ("optim.eps", Book.number),
            "optimizer.params.weight_decay": ("optim.weight_decay", Book.number),
            "gradient_clipping": ("optim.clip", Book.number),
        }
    )
    if _auto(book, "gradient_clipping"):
        book.put(
            "optim.clip", 1.0, note="auto: max_grad_norm of Hugging Face's Trainer, 1.0 unless it is told otherwise"
        )
    book.assume("optim.clip", 0.0, "no clipping")
    betas = book.leaf("optimizer.params.betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        book.put("optim.betas", betas.value, "optimizer.params.betas")
    book.used("optimizer.params.adam_w_mode", by="optim.name")
    _scheduler(book)


def _scheduler(book: Book) -> None:
    kind = book.text("scheduler.type")
    if not kind:
        return
    if "cosine" in kind:
        book.put("optim.schedule", "cosine", "scheduler.type")
    elif kind in ("warmuplr", "warmupdecaylr"):
        book.put("optim.schedule", "wsd", "scheduler.type", note=kind)
        book.put("optim.decay", 1.0 if kind == "warmupdecaylr" else 0.0, "scheduler.type", note=kind)
    else:
        book.lacks("scheduler.type", "the job schema knows wsd and cosine")
    if (steps := book.whole("scheduler.params.warmup_num_steps")) is not None:
        book.put("optim.warmup_steps", steps, "scheduler.params.warmup_num_steps")
    if steps := book.whole("scheduler.params.total_num_steps"):
        book.put("data.steps", steps, "scheduler.params.total_num_steps")
    if (peak := book.number("scheduler.params.warmup_max_lr")) is not None and peak > 0:
        book.put("optim.lr", peak, "scheduler.params.warmup_max_lr")


def _pipeline(book: Book) -> None:
    if (degree := book.whole("tensor_parallel.autotp_size")) is not None and degree > 0:
        book.put("parallel.tensor", degree, "tensor_parallel.autotp_size")
    for key in ("sequence_parallel_size", "sequence_parallelism.size"):
        if degree := book.whole(key):
            book.put("parallel.context", degree, key)
            book.put("parallel.context_kind", "ulysses", key)
    every = book.whole("pipeline.activation_checkpoint_interval")
    if every is not None:
        book.put("parallel.recompute", "full" if every else "none", "pipeline.activation_checkpoint_interval")
    else:
        book.put("parallel.recompute", "auto", note="not said: the model's own code recomputes or not")
