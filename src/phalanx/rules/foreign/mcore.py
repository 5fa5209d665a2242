"""What Megatron-LM, NeMo and Megatron-Bridge share: Megatron Core's words for the model, its split and its training.

Names are Megatron-LM's arguments with underscores (megatron/training/arguments.py); readers map their spelling to them.
"""

from __future__ import annotations

from phalanx.rules.foreign import mcore_shape as shape
from phalanx.rules.foreign.book import NEVER, UNSET, Book
from phalanx.rules.foreign.habits import MEGATRON

DTYPES = {"bf16": 2, "fp32": 4, "fp16": 2}


def translate(book: Book, *, whole: bool = True) -> None:
    """Fill the book with all that Megatron Core has words for; a file that is not `whole` may leave them to code."""
    shape.translate(book)
    _degrees(book)
    _sharding(book)
    _recompute(book)
    _batch(book)
    _precision(book)
    _optimizer(book)
    _learning_rate(book)
    _checkpoint(book, whole)
    _resume(book)
    _timeouts(book)
    _telemetry(book)


def _degrees(book: Book) -> None:
    book.put("parallel.mode", "fixed", note=f"{book.title} searches nothing")
    for name, ours in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
    ):
        if (degree := book.whole(name)) is not None and degree > 0:
            book.put(f"parallel.{ours}", degree, name)
    if (split := book.flag("sequence_parallel")) is not None:
        book.put("parallel.sequence_parallel", split, "sequence_parallel")
    kinds = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "ring"}
    if (kind := book.text("cp_comm_type")) in kinds:
        book.put("parallel.context_kind", kinds[kind], "cp_comm_type")
    if (own := book.whole("expert_tensor_parallel_size")) is not None:
        same = own == book.int_of("parallel.tensor") or not book.int_of("model.experts", 0)
        why = "experts split over tensor ranks as the rest" if same else "the planner splits experts whole"
        book.skip("expert_tensor_parallel_size", why) if same else book.lacks("expert_tensor_parallel_size", why)
    _virtual(book)


def _virtual(book: Book) -> None:
    layers, stages = book.int_of("model.layers", 0), book.int_of("parallel.pipeline")
    chunks, name = 1, ""
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if (found := book.whole(name)) is not None:
            chunks = found
            break
    else:
        name = "num_layers_per_virtual_pipeline_stage"
        each = book.whole(name)
        chunks = max(1, layers // stages // each) if each and layers else 1
    if stages > 1 and chunks > 1:
        book.put("parallel.virtual_pipeline", chunks, name)
        book.put("parallel.schedule", "interleaved", name)
    elif book.has(name):
        book.skip(name, "one chunk per stage, or one stage")


STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _sharding(book: Book) -> None:
    own, torch = bool(book.flag("use_megatron_fsdp") or book.flag("use_custom_fsdp")), book.flag("use_torch_fsdp2")
    flags = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    strategy = book.text("data_parallel_sharding_strategy")
    if own or torch:
        stage = STRATEGIES.get(strategy, 3) if own and strategy else 3
        book.put("parallel.zero", stage, "data_parallel_sharding_strategy", *flags, note="FSDP")
        book.used("use_distributed_optimizer", by="parallel.zero")
    else:
        on = bool(book.flag("use_distributed_optimizer"))
        note = "distributed optimizer" if on else "no distributed optimizer"
        book.put("parallel.zero", int(on), "use_distributed_optimizer", note=note)
        book.skip("data_parallel_sharding_strategy", "no effect without Megatron-FSDP")
        for name in flags:
            book.used(name, by="parallel.zero")
    if book.flag("optimizer_cpu_offload"):
        book.put("parallel.offload", "optimizer", "optimizer_cpu_offload")
    elif book.has("optimizer_cpu_offload"):
        book.used("optimizer_cpu_offload", by="parallel.offload")
    if (copies := book.whole("num_distributed_optimizer_instances")) is not None:
        if copies == 1:
            book.used("num_distributed_optimizer_instances", by="parallel.shard = auto: all data ranks")
        else:
            book.put("parallel.shard_copies", copies, "num_distributed_optimizer_instances")


def _recompute(book: Book) -> None:
    kind = book.text("recompute_granularity")
    if not kind and (book.flag("recompute_activations") or book.flag("checkpoint_activations")):
        kind = "selective" if book.flag("recompute_activations") else "full"
    names = ("recompute_granularity", "recompute_activations", "checkpoint_activations")
    if kind in ("selective", "full"):
        book.put("parallel.recompute", kind, *names)
    else:
        book.put("parallel.recompute", "none", *names)
    count = book.whole("recompute_num_layers")
    if kind == "full" and book.text("recompute_method") == "block" and count:
        book.put("parallel.recompute_layers", count, "recompute_num_layers", "recompute_method")
    else:
        for name in ("recompute_num_layers", "recompute_method"):
            book.skip(name, "uniform recomputation covers every layer; only its chunks differ")


def _batch(book: Book) -> None:
    sequence = book.whole("seq_length")
    if sequence:
        book.put("data.sequence", sequence, "seq_length")
    book.put("batch.micro", book.whole("micro_batch_size") or 1, "micro_batch_size")
    if (total := book.whole("global_batch_size")) is not None and total > 0:
        book.put("batch.global_sequences", total, "global_batch_size")
    else:
        book.put("batch.per_replica", book.int_of("batch.micro"), "micro_batch_size", note="one micro-batch each")
    if samples := book.whole("train_samples"):
        book.put("data.samples", samples, "train_samples")
    elif steps := book.whole("train_iters"):
        book.put("data.steps", steps, "train_iters")
    if (seed := book.whole("seed")) is not None:
        book.put("data.seed", abs(seed), "seed")
    book.put("batch.ramp_of", _ramp(book), "rampup_batch_size") if book.has("rampup_batch_size") else None
    if (per_token := book.flag("calculate_per_token_loss")) is not None:
        book.practice["token_weighted_loss"] = per_token
        book.used("calculate_per_token_loss", by="practice: token_weighted_loss")


def _ramp(book: Book) -> list[int]:
    """[first batch, increment, sequences over which it grows], or nothing usable."""
    leaf = book.leaf("rampup_batch_size")
    parts = leaf.value if leaf is not None and isinstance(leaf.value, list) else []
    numbers = [int(str(one)) for one in parts if str(one).isdigit() and len(str(one)) < 16]
    return numbers if len(numbers) == 3 else []


def _precision(book: Book) -> None:
    base = "bf16" if book.flag("bf16") else "fp16" if book.flag("fp16") else "fp32"
    flags = [name for name in ("bf16", "fp16") if book.has(name)]
    eight = next((name for name in ("fp8_format", "fp8") if book.text(name) not in ("", "none", "false")), "")
    four = next((name for name in ("fp4_format", "fp4") if book.text(name) not in ("", "none", "false")), "")
    if four or eight:
        book.put("precision.compute", "fp4" if four else "fp8", four or eight)
        book.used(*flags, by="precision.compute: what is not in few bits")
    else:
        book.put("precision.compute", base, *flags, note="" if flags else "neither --bf16 nor --fp16")
    wide = book.flag("accumulate_allreduce_grads_in_fp32")
    wide = book.flag("grad_reduce_in_fp32") if wide is None else wide
    if wide is None:
        wide = base != "fp16" and not book.flag("grad_reduce_in_bf16")
    names = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32", "grad_reduce_in_bf16")
    note = "" if any(book.has(name) for name in names) else "bf16 sums in fp32"
    if base == "fp16" and not wide:
        book.practice["sums_in"] = "fp16"
        note = "summed in fp16: the nearest word is bf16"
    book.put("precision.grad_reduce", "fp32" if wide else "bf16", *names, note=note)
    if (scale := book.number("loss_scale")) is not None and base == "fp16" and scale > 0:
        book.put("precision.loss_scale", scale, "loss_scale", note="static")
    elif base == "fp16":
        book.assume("precision.loss_scale", "auto", "dynamic for fp16")
    _state(book)


def _state(book: Book) -> None:
    """What the optimizer updates; formats other than fp32 are for its precision-aware one."""
    kept = book.text("main_params_dtype")
    if kept:
        book.put("precision.master_weights", "32" in kept, "main_params_dtype")
    book.assume("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
    moments = next((book.text(n) for n in ("exp_avg_dtype", "exp_avg_dtype._target_") if book.has(n)), "")
    if "bfloat16" in moments or moments == "bf16":
        book.put("precision.optimizer_state", "bf16", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif "float32" in moments or moments == "fp32":
        book.put("precision.optimizer_state", "fp32", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif not moments:
        book.assume("precision.optimizer_state", "fp32")


def _optimizer(book: Book) -> None:
    name = book.text("optimizer") or "adam"
    if "adam" in name:
        book.put("optim.name", "adamw", "optimizer", note="decoupled weight decay")
    elif "muon" in name:
        book.put("optim.name", "muon", "optimizer")
    else:
        book.lacks("optimizer", "not an optimizer of the job schema")
    book.copy(
        {
            "lr": ("optim.lr", Book.number),
            "weight_decay": ("optim.weight_decay", Book.number),
            "clip_grad": ("optim.clip", Book.number),
            "adam_eps": ("optim.eps", Book.number),
        }
    )
    book.assume("optim.weight_decay", 0.01)
    first, second = book.number("adam_beta1"), book.number("adam_beta2")
    betas = [0.9 if first is None else first, 0.999 if second is None else second]
    book.put("optim.betas", betas, "adam_beta1", "adam_beta2")


def _learning_rate(book: Book) -> None:
    style = book.text("lr_decay_style") or "linear"
    if style == "cosine":
        book.put("optim.schedule", "cosine", "lr_decay_style")
    else:
        book.put("optim.schedule", "wsd", "lr_decay_style", note=style)
        whole, tail = book.number("lr_decay_iters"), book.number("lr_wsd_decay_iters")
        part = tail / whole if style == "wsd" and tail and whole else {"constant": 0.0}.get(style, 1.0)
        book.put("optim.decay", min(1.0, max(0.0, part)), "lr_wsd_decay_iters", "lr_decay_style")
    least, peak = book.number("min_lr"), book.number("lr")
    if least is not None and peak:
        book.put("optim.final_lr", min(1.0, least / peak), "min_lr", note=f"{least:g} / {peak:g}")
    book.assume("optim.final_lr", 0.0)
    if (steps := book.whole("lr_warmup_iters")) is not None:
        book.put("optim.warmup_steps", steps, "lr_warmup_iters")
    elif samples := book.whole("lr_warmup_samples"):
        book.put("optim.warmup_samples", samples, "lr_warmup_samples")
    elif (share := book.number("lr_warmup_fraction")) is not None and (steps := book.whole("lr_decay_iters")):
        book.put("optim.warmup_steps", round(share * steps), "lr_warmup_fraction", note=f"{share:g} of {steps:,} steps")
    for name in ("lr_decay_iters", "lr_decay_samples"):
        book.skip(name, "the job decays over all its tokens")


def _checkpoint(book: Book, whole: bool) -> None:
    save, every = book.leaf("save"), book.whole("save_interval")
    if save is not None and every:
        book.put("checkpoint.steps", every, "save_interval")
    elif save is None and (whole or "checkpoint.save" in book.leaves):  # null says it as well
        book.put("checkpoint.steps", NEVER, "save_interval", note="nothing is saved")
        book.theirs["checkpoint.steps"] = "save"
        book.practice["saves"] = False
    if save is not None:
        text = str(save.value)
        good = text.isprintable() and 0 < len(text) < 1000 and "$" not in text
        book.put("checkpoint.path", text, "save") if good else book.lacks("save", UNSET)
    keep = book.whole("most_recent_k")
    book.put("checkpoint.keep", keep if keep and keep > 0 else 10**6, "most_recent_k", note="" if keep else "keeps all")
    book.put("checkpoint.async", bool(book.flag("async_save")), "async_save")
    kinds = {"torch_dist": "dcp", "torch_dcp": "dcp", "fsdp_dtensor": "dcp", "torch": "torch-pickle", "zarr": "zarr"}
    if (kind := book.text("ckpt_format")) in kinds:
        book.practice["checkpoint_format"] = kinds[kind]
        book.used("ckpt_format", by="practice: checkpoint_format")
    if book.flag("replication") and book.text("non_persistent_ckpt_type") == "local":
        book.practice["memory_copies"] = "other host"
        book.used("replication", "non_persistent_ckpt_type", by="practice: memory_copies")
        if every_local := book.whole("non_persistent_save_interval"):
            book.put("checkpoint.memory_every", every_local, "non_persistent_save_interval")


# Megatron's checkpointing.py: what is left out of a file, or of a resume. The loss scale is part of the optimizer.
LEFT_OUT = {"optim": ("moments", "scheduler", "scaler"), "rng": ("rng",)}


def _resume(book: Book) -> None:
    """`--no-load-optim` of the arguments, `load_optim: false` of Megatron-Bridge."""
    lost: set[str] = set()
    for part, states in LEFT_OUT.items():
        for verb in ("load", "save"):
            off, on = f"no_{verb}_{part}", f"{verb}_{part}"
            if book.flag(off) or book.flag(on) is False:
                lost |= {*states}
            book.used(off, on, by="practice: resumes_exactly")
    if lost:
        book.practice["resumes_exactly"] = tuple(one for one in MEGATRON.resumes_exactly or () if one not in lost)


def _timeouts(book: Book) -> None:
    minutes = book.number("distributed_timeout_minutes")
    limit = 600.0 if minutes is None else 60 * minutes
    note = f"{minutes:g} minutes" if minutes is not None else f"default of {book.title}: 10 minutes"
    book.put("comm.init_timeout_s", limit, "distributed_timeout_minutes", note=note)
    if (after := book.number("distributed_timeout_seconds_after_init")) is not None:
        book.put("train.timeout_s", after, "distributed_timeout_seconds_after_init")
    else:
        book.put("train.timeout_s", limit, "distributed_timeout_minutes", note=note)
        book.theirs["train.timeout_s"] = "distributed_timeout_seconds_after_init"
    _buckets(book)
    if every := book.whole("check_weight_hash_across_dp_replicas_interval"):
        book.put("fault.digest_every", every, "check_weight_hash_across_dp_replicas_interval")
    elif book.has("check_weight_hash_across_dp_replicas_interval"):
        book.used("check_weight_hash_across_dp_replicas_interval", by="fault.digest_every")


def _buckets(book: Book) -> None:
    width = DTYPES[str(book.value("precision.grad_reduce") or "fp32")]
    overlap = book.flag("overlap_grad_reduce")
    book.theirs["comm.bucket_mib"] = "ddp_bucket_size" if overlap else "overlap_grad_reduce"
    size = book.whole("bucket_size")
    if size is not None and size > 0:
        mib = size * width / 2**20
        book.put("comm.bucket_mib", min(65_536.0, mib), "bucket_size", note=f"{size:,} parameters × {width} bytes")
    elif overlap:
        book.put("comm.bucket_width", width)  # its size follows from the number of data ranks
    else:
        book.assume("comm.bucket_mib", 65_536.0, "without overlap of the reduction all gradients are one bucket")
    book.used("overlap_grad_reduce", by="comm.bucket_mib")


def _telemetry(book: Book) -> None:
    written = ["steps"]
    for name, series in (("log_throughput", "utilization"), ("log_energy", "energy")):
        if book.flag(name):
            written.append(series)
            book.used(name, by="practice: telemetry")
    if len(written) > 1:
        book.practice["telemetry"] = tuple(written)
