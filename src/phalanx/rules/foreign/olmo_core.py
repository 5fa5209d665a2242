"""OLMo-core's experiment configurations as job settings: scripts whose `build_config` returns an ExperimentConfig."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import NEVER, SEEDS, Conversion
from phalanx.rules.foreign.olmo_factories import read_olmo_model

M, T = "train_module.", "trainer."
IRRELEVANT = {
    "_target_": "which class is built; the values beside it are read",
    "dataset": "which text is read, and how",
    "dataset.": "which text is read, and how",
    "data_loader.": "data loading",
    "trainer.callbacks.": "callbacks for logging and evaluation",
    "trainer.save_folder": "where checkpoints go",
    "trainer.": "logging, and how the loop is driven",
    "launch": "where it is launched",
    "launch.": "where it is launched",
    "run_name": "a name",
    "init_seed": "initial weights do not change the work of a step",
    "load_path": "where a run starts",
    "load_trainer_state": "where a run starts",
    "backend": "how processes are started",
    "model.": "the shape is that of the factory",
    "train_module.z_loss_multiplier": "a term of the loss",
    "train_module.optim.group_overrides": "groups of parameters",
    "train_module.optim.group_overrides.": "groups of parameters",
    "train_module.dp_config.wrapping_strategy": "how blocks are grouped for FSDP",
    "train_module.dp_config.prefetch_factor": "overlap is part of the efficiency profile, not of the job",
    "train_module.scheduler.": "the shape of the schedule",
}
UNMAPPED = {
    "trainer.hard_stop": "the run is stopped before its schedule ends",
    "train_module.ac_config.": "the job counts layers per stage",
    "train_module.float8_config.": "how fp8 is scaled",
}


def translate_config(config: Conversion) -> None:
    """Translate an OLMo-core configuration into job settings."""
    for section in ("train_module", "trainer", "data_loader"):
        leaf = config.leaves.get(section)
        if leaf is not None and leaf.unknown:
            config.open_why = config.open_why or leaf.unknown
    read_olmo_model(config)
    _read_layout(config)
    _read_batch(config)
    _read_precision(config)
    _read_optimizer(config)
    _read_checkpoint(config)
    config.settle_rest(
        irrelevant=IRRELEVANT,
        unmapped=UNMAPPED,
        seen=lambda key: "_target_" if key.endswith("_target_") else key,
    )


def _read_layout(config: Conversion) -> None:
    config.set_value("parallel.mode", "fixed", note="OLMo-core searches nothing")
    for name, axis in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        section_leaf = config.leaves.get(f"{M}{name}_config")
        key = f"{M}{name}_config.degree"
        if section_leaf is not None and section_leaf.unknown:
            config.read_as[key] = section_leaf
        degree = config.read_whole(key)
        config.set_value(f"parallel.{axis}", max(1, degree or 1), key)
        # distributed/parallel/__init__.py: -1 means all available ranks
        if degree is not None and degree < 1:
            config.unknown[f"parallel.{axis}"] = f"{key} = {degree} is as many ranks as there are"
    kind = config.read_word(f"{M}dp_config.name")
    names = (f"{M}dp_config.name", f"{M}dp_config")
    pipeline = config.int_of("parallel.pipeline") > 1
    if kind in ("fsdp", "hsdp"):
        # train_module/transformer/common.py: with a pipeline, weights are not resharded after forward
        config.set_value("parallel.zero", 2 if pipeline else 3, *names, note=kind)
    else:
        config.set_value("parallel.zero", 0, *names, note=kind or "no data parallel configuration")
    if kind == "hsdp":
        shard, copies = config.read_whole(f"{M}dp_config.shard_degree"), config.read_whole(f"{M}dp_config.num_replicas")
        if shard:
            config.set_value("parallel.shard", shard, f"{M}dp_config.shard_degree")
        elif copies:
            config.set_value("parallel.shard_copies", copies, f"{M}dp_config.num_replicas")
        else:
            config.unknown["parallel.shard"] = "one group of shards per host, unless the script says otherwise"
    mode = config.read_word(f"{M}ac_config.mode")
    is_present = any(key.startswith(f"{M}ac_config.") for key in config.leaves)
    section_leaf = config.leaves.get(f"{M}ac_config")
    if section_leaf is not None and section_leaf.unknown:
        config.read_as[f"{M}ac_config.mode"] = section_leaf
        mode = config.read_word(f"{M}ac_config.mode")
    recompute = ("full" if mode in ("full", "") else "selective") if is_present else "none"
    config.set_value("parallel.recompute", recompute, f"{M}ac_config.mode")


def _read_batch(config: Conversion) -> None:
    length = config.read_whole(f"{M}max_sequence_length")
    config.set_value("data.sequence", length or 2048, f"{M}max_sequence_length")
    tokens = config.read_whole(f"{M}rank_microbatch_size")
    if tokens and length:
        config.set_value("batch.micro", max(1, tokens // length), f"{M}rank_microbatch_size", f"{M}max_sequence_length")
    elif f"{M}rank_microbatch_size" in config.leaves:
        config.set_value("batch.micro", 1, f"{M}rank_microbatch_size", f"{M}max_sequence_length")
    total = config.read_whole("data_loader.global_batch_size")
    if total:
        config.set_value("batch.global_tokens", total, "data_loader.global_batch_size")
    kind = config.leaves.get(f"{T}max_duration._target_")
    unit = str(kind.value).rpartition(".")[2] if kind is not None else ""
    amount = config.read_whole(f"{T}max_duration._args_.0")
    if amount and unit == "tokens":
        config.set_value("data.tokens", amount, f"{T}max_duration._args_.0")
    elif amount and unit == "steps":
        config.set_value("data.steps", amount, f"{T}max_duration._args_.0")
    if (seed := config.read_whole("data_loader.seed")) is not None:
        config.set_value("data.seed", abs(seed) % SEEDS, "data_loader.seed")


def _read_precision(config: Conversion) -> None:
    formats = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    key = f"{M}dp_config.param_dtype"
    fp8_key = f"{M}float8_config.enabled"
    # Float8Config is on by default (olmo_core/float8)
    if not config.has_leaf(fp8_key):
        config.rename_leaf(fp8_key, f"{M}float8_config._target_", True)
    if config.read_flag(fp8_key):
        config.set_value("precision.compute", "fp8", fp8_key)
        config.mark_used(key, by="precision.compute: what is not fp8")
    else:
        autocast_key = f"{M}autocast_precision"
        name = key if config.has_leaf(key) or not config.has_leaf(autocast_key) else autocast_key
        config.set_value("precision.compute", formats.get(config.read_word(name), "fp32"), name)
    reduce = formats.get(config.read_word(f"{M}dp_config.reduce_dtype") or "float32", "fp32")
    config.set_value("precision.grad_reduce", "bf16" if reduce != "fp32" else "fp32", f"{M}dp_config.reduce_dtype")
    config.set_value("precision.master_weights", True, note="weights are fp32, cast for each use")
    if (compiled := config.read_flag(f"{M}compile_model")) is not None:
        config.set_value("train.compile", compiled, f"{M}compile_model")


def _read_optimizer(config: Conversion) -> None:
    o = f"{M}optim."
    leaf = config.leaves.get(f"{o}_target_")
    kind = str(leaf.value).rpartition(".")[2] if leaf is not None else ""
    if "AdamW" in kind:
        config.set_value("optim.name", "adamw", f"{o}_target_")
    elif "Muon" in kind:
        config.set_value("optim.name", "muon", f"{o}_target_")
    elif kind:
        config.leave_unmapped(f"{o}_target_", "not an optimizer of the job schema")
    config.copy_keys(
        {
            f"{o}lr": ("optim.lr", Conversion.read_number),
            f"{o}eps": ("optim.eps", Conversion.read_number),
            f"{o}weight_decay": ("optim.weight_decay", Conversion.read_number),
            f"{M}max_grad_norm": ("optim.clip", Conversion.read_number),
        }
    )
    betas = config.find_leaf(f"{o}betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        config.set_value("optim.betas", list(betas.value), f"{o}betas")
    s = f"{M}scheduler."
    for name in ("warmup_steps", "warmup"):
        if (warmup := config.read_whole(f"{s}{name}")) is not None:
            config.set_value("optim.warmup_steps", warmup, f"{s}{name}")
    schedule = config.leaves.get(f"{s}_target_")
    word = str(schedule.value).rpartition(".")[2].lower() if schedule is not None else ""
    if word:
        config.set_value("optim.schedule", "cosine" if word.startswith("cos") else "wsd", f"{s}_target_")


def _read_checkpoint(config: Conversion) -> None:
    # train/__init__.py: prepare_training_environment(timeout=timedelta(minutes=15)); no script of 2026 changes it
    config.assume_default("train.timeout_s", 900, "prepare_training_environment")
    config.assume_default("comm.init_timeout_s", 900, "prepare_training_environment")
    c = f"{T}callbacks.checkpointer."
    steps = config.read_whole(f"{c}save_interval")
    ephemeral_steps = config.read_whole(f"{c}ephemeral_save_interval")
    if config.read_flag(f"{T}no_checkpoints"):
        config.set_value("checkpoint.steps", NEVER, f"{T}no_checkpoints", note="checkpoints are off")
        config.practice["saves"] = False
    elif ephemeral_steps:
        config.set_value("checkpoint.steps", ephemeral_steps, f"{c}ephemeral_save_interval", f"{c}save_interval")
    elif steps:
        config.set_value("checkpoint.steps", steps, f"{c}save_interval")
    is_async = config.read_flag(f"{c}save_async")
    if is_async is not None:
        config.set_value("checkpoint.async", is_async, f"{c}save_async")
