"""NeMo's and Megatron-Bridge's YAML as job settings: other trees around Megatron Core's settings.

It reads NeMo 1.x (`trainer:`, `model:`, `exp_manager:`; examples/nlp/language_modeling/conf), NeMo 2.0 recipes
exported as YAML (`trainer.strategy`, `model.config`, `data`, `optim.config`), and Megatron-Bridge's ConfigContainer
(`model:`, `train:`, `ddp:`, `dist:`, `checkpoint:`, `mixed_precision:`), complete or as an override file.
"""

from __future__ import annotations

import re

from phalanx.rules.foreign import mcore, megatron
from phalanx.rules.foreign.conversion import Conversion, Leaf, found_in
from phalanx.rules.foreign.known_models import model_of_class, read_named_model, set_known_model

# Sections with Megatron's settings, in order of precedence: Bridge applies mixed_precision over model, optimizer
# and ddp.
PREFIXES = (
    "mixed_precision.",
    "trainer.plugins.",
    "trainer.strategy.ddp.",
    "trainer.strategy.",
    "model.config.",
    "ddp.",
    "dist.",
    "model.",
    "train.",
    "data.",
    "optimizer.",
    "optim.config.",
    "scheduler.",
    "checkpoint.",
    "rng.",
    "dataset.",
)
OTHER_NAMES = {
    "encoder_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "bias": "add_bias_linear",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "random_seed": "seed",
}
_WORDS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads q_lora_rank num_experts moe_ffn_hidden_size
    moe_router_topk num_query_groups kv_channels gated_linear_unit normalization norm_epsilon add_bias_linear
    add_qkv_bias qk_layernorm share_embeddings_and_output_weights position_embedding_type rotary_base
    max_position_embeddings moe_shared_expert_intermediate_size moe_layer_freq moe_router_score_function
    moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_load_balancing_type moe_aux_loss_coeff multi_latent_attention kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim vocab_size make_vocab_size_divisible_by tensor_model_parallel_size
    pipeline_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel cp_comm_type virtual_pipeline_model_parallel_size use_megatron_fsdp use_custom_fsdp
    use_torch_fsdp2 data_parallel_sharding_strategy use_distributed_optimizer optimizer_cpu_offload
    num_distributed_optimizer_instances recompute_granularity recompute_method recompute_num_layers seq_length
    micro_batch_size global_batch_size train_samples train_iters seed rampup_batch_size calculate_per_token_loss
    bf16 fp16 fp8 fp4 grad_reduce_in_fp32 loss_scale exp_avg_dtype exp_avg_dtype._target_ optimizer lr weight_decay
    clip_grad adam_eps adam_beta1 adam_beta2 lr_decay_style lr_decay_iters lr_wsd_decay_iters min_lr
    lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_decay_samples save save_interval most_recent_k async_save
    load finetune load_optim load_rng save_optim save_rng main_params_dtype
    ckpt_format replication non_persistent_ckpt_type non_persistent_save_interval distributed_timeout_minutes
    distributed_timeout_seconds_after_init bucket_size overlap_grad_reduce
    check_weight_hash_across_dp_replicas_interval log_throughput log_memory_to_tensorboard log_energy
    activations_checkpoint_method extra_vocab_size pad_vocab_size_to
"""
WORDS = frozenset(_WORDS.split())
IRRELEVANT = megatron.IRRELEVANT | {
    "_partial_": "how Hydra builds an object",
    "_target_": "which class is built; the values beside it are read",
    "_call_": "how Hydra builds an object",
    "_args_": "how Hydra builds an object",
    "_name_": "how Hydra builds an object",
    "name": "a name",
    "logger.": "logging",
    "log.": "logging",
    "exp_manager.": "logging, and where a run goes on",
    "profiling.": "profiler traces",
    "tokenizer.": "the tokenizer does not change the work of a step",
    "model.tokenizer.": "the tokenizer does not change the work of a step",
    "data.tokenizer.": "the tokenizer does not change the work of a step",
    "model.nsys_profile.": "profiler traces",
    "dataset.": "which text is read, and how",
    "data.": "which text is read, and how",
    "model.data.": "which text is read, and how",
    "validation.": "evaluation",
    "resume.": "where a run goes on",
    "restore_from_path": "where a run starts",
    "model.resume_from_checkpoint": "where a run goes on",
    "trainer.logger": "logging",
    "trainer.log_": "logging",
    "trainer.limit_": "evaluation",
    "trainer.val_check_interval": "evaluation",
    "trainer.num_sanity_val_steps": "evaluation",
    "trainer.max_epochs": "the steps end the run first",
    "trainer.accelerator": "the cluster says what it runs on",
    "trainer.benchmark": "kernel selection",
    "trainer.enable_": "progress bars and callbacks",
    "trainer.use_distributed_sampler": "data loading",
    "trainer.replace_sampler_ddp": "data loading",
    "trainer.accumulate_grad_batches": "Megatron accumulates by its global batch; this must stay 1",
    "trainer.callbacks.": "callbacks",
    "trainer.strategy.ckpt_": "how a checkpoint is laid out",
    "checkpoint.": "how a checkpoint is laid out, and where a run goes on",
    "dist.flight_recorder_": "flight recorder",
    "dist.": "how processes are started",
    "rng.": "random streams",
    "train.eval_": "evaluation",
    "train.exit_": "when the job is stopped from within",
    "train.manual_": "Python's garbage collection",
    "train.empty_unused_memory_level": "allocator settings",
    "model.init_method": "initial weights do not change the work of a step",
    "model.use_cpu_initialization": "initial weights do not change the work of a step",
    "model.init_model_with_meta_device": "initial weights do not change the work of a step",
    "model.perform_initialization": "initial weights do not change the work of a step",
    "model.inference_": "inference",
    "model.mup_": "initial weights do not change the work of a step",
    "model.native_amp_": "how dynamic loss scaling moves",
    "model.hf_model_id": "where the shape came from; it is written out",
    "optimizer.config_logger_dir": "logging",
    "optimizer.lion_": "another optimizer's settings",
    "optimizer.sgd_": "another optimizer's settings",
    "optimizer.muon_": "another optimizer's settings",
    "rerun_state_machine.": "checks that Megatron runs beside the step",
    "model.mcore_gpt": "which implementation; the plan assumes Megatron Core",
    "average_in_collective": "the same sum, scaled in the collective",
    "gradient_as_bucket_view": "memory layout",
    "params_dtype": "the format of the arithmetic",
    "pipeline_dtype": "the format of the arithmetic",
    "autocast_enabled": "the format of the arithmetic",
    "autocast_dtype": "the format of the arithmetic",
    "optim.lr_scheduler.": "the shape of the schedule",
    "activation_func": "the gated unit is said beside it",
    "optimizer_config_override_provider.": "code of Megatron-Bridge's",
}
UNMAPPED = megatron.UNMAPPED | {
    "comm_overlap.": "overlap is part of the efficiency profile, not of the job",
    "model.tp_comm_": "overlap is part of the efficiency profile, not of the job",
    "ddp.overlap_param_gather": "overlap is part of the efficiency profile, not of the job",
    "recompute_modules": "the planner's selective recomputation is attention's core only",
    "trainer.callbacks": "callbacks are code; those that train differently are not seen",
    "ENV_VARS.": "an environment variable that the job schema has no word for",
    "peft.": "the planner knows full training only",
    "exp_manager.checkpoint_callback_params.": "the job schema keeps the newest, not the best",
}


def translate_config(config: Conversion) -> None:
    """Translate a NeMo or Megatron-Bridge configuration into job settings."""
    _fill_references(config)
    hosts, devices_each = config.read_whole("trainer.num_nodes"), config.read_whole("trainer.devices")
    config.machines = (hosts or 0, devices_each if devices_each and devices_each > 0 else 0)
    config.mark_used("trainer.num_nodes", "trainer.devices", by="cluster: hosts × devices")
    is_template = any(leaf.value == MANDATORY for leaf in config.leaves.values())
    # The command line completes such a file: its number of hosts is a placeholder
    if is_template:
        config.machines = (0, 0)
    _read_trainer(config)
    _optimizer_of_one(config)
    _read_model(config)
    _read_precision(config)
    for key in config.leaves:
        _strongest_place(config, key)
    if "distributed" in config.read_word("optimizer") and "optimizer" in config.read_as:
        config.rename_leaf("use_distributed_optimizer", config.read_as["optimizer"].key, True)
    _agree_on_sharding(config)
    for name, key in TOKENIZERS:
        config.rename_leaf(name, key)
    mcore.translate_config(config, whole=False)
    total, micro = config.int_of("batch.global_sequences", 0), config.int_of("batch.micro", 0)
    # A placeholder too, because this batch is impossible
    if is_template and total and micro and total % micro:
        del config.values["batch.global_sequences"]
        config.leave_unmapped("global_batch_size", f"does not divide by {micro}: a place for another, as ??? are")
    _read_amp(config)
    for key in ("model.grad_allreduce_chunk_size_mb", "model.optim.bucket_cap_mb"):
        if (size := config.read_number(key)) is not None and size > 0:
            config.set_value("comm.bucket_mib", size, key)
    config.mark_used("model.optim.overlap_grad_sync", by="comm.bucket_mib")
    _drop_shadowed(config)
    config.settle_rest(
        irrelevant=IRRELEVANT,
        unmapped=UNMAPPED,
        seen=lambda key: key if found_in(key, [*UNMAPPED, *IRRELEVANT]) else key.rpartition(".")[2],
    )


def _agree_on_sharding(config: Conversion) -> None:
    """Resolve `use_distributed_optimizer` from its two sections, as the trainers do before the first step.

    NeMo 2: the optimizer's value holds (megatron_strategy.py). Megatron-Bridge: if one is on, both are
    (training/config.py).
    """
    name = "use_distributed_optimizer"
    if (leaf := config.leaves.get(f"optim.config.{name}")) is not None and leaf.value is not None:
        config.read_as[name] = leaf
    section_leaves = [
        leaf_of_section
        for section in ("ddp", "optimizer")
        if (leaf_of_section := config.leaves.get(f"{section}.{name}")) is not None
    ]
    if enabled := [leaf_of_section for leaf_of_section in section_leaves if leaf_of_section.value is True]:
        config.read_as[name] = enabled[0]
    elif unknown_leaves := [leaf_of_section for leaf_of_section in section_leaves if leaf_of_section.unknown]:
        config.read_as[name] = unknown_leaves[0]


# NeMo 1: a name on Hugging Face as `type`, or a file as `model`; Megatron-Bridge has Megatron's keys.
TOKENIZERS = (
    ("tokenizer_name_or_path", "model.tokenizer.type"),
    ("tokenizer_model", "model.tokenizer.model"),
    ("tokenizer_model", "tokenizer.tokenizer_model"),
    ("tokenizer_type", "tokenizer.tokenizer_type"),
)
REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")
MOST_HOPS = 8
MANDATORY = "???"  # OmegaConf: must be given at the start


def _fill_references(config: Conversion) -> None:
    """Resolve `${model.encoder_seq_length}` and `${.encoder_seq_length}` as OmegaConf does; functions are kept."""
    for key, leaf in config.leaves.items():
        value, reference_key = leaf.value, key
        for _ in range(MOST_HOPS):
            match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            reference_key = f"{reference_key.rpartition('.')[0]}.{match.group(2)}" if match.group(1) else match.group(2)
            value = config.leaves[reference_key].value if reference_key in config.leaves else None
        if value is not None and value != leaf.value:
            config.read_as[key] = Leaf(key=key, value=value, line=leaf.line)


def word_of(key: str) -> str:
    """Return Megatron's name for a key of any of the trees; empty if it has none.

    >>> word_of("trainer.strategy.tensor_model_parallel_size"), word_of("model.encoder_seq_length"), word_of("a.b")
    ('tensor_model_parallel_size', 'seq_length', '')
    """
    for prefix in PREFIXES:
        suffix = key.removeprefix(prefix)
        name = OTHER_NAMES.get(suffix, suffix)
        if suffix != key and name in WORDS:
            return name
    return ""


def _strongest_place(config: Conversion, key: str) -> None:
    """Use the key with the highest precedence among those of the same name."""
    name = word_of(key)
    leaf = config.leaves[key]
    if not name or leaf.value is None or name in config.read_as:
        return
    current_key = config.names.get(name)
    if current_key is None or _place_rank(key) < _place_rank(current_key):
        config.names[name] = key


def _place_rank(key: str) -> int:
    return next(index for index, prefix in enumerate(PREFIXES) if key.startswith(prefix))


def _drop_shadowed(config: Conversion) -> None:
    for key, leaf in config.leaves.items():
        name = word_of(key)
        effective = config.find_leaf(name) if name else None
        if effective is None or effective.key == key or key in config.settled or leaf.value is None:
            continue
        if effective.value == leaf.value:
            config.skip_leaf(key, f"{effective.key} says the same")
        else:
            config.leave_unmapped(key, f"{effective.key} goes before it")


def _read_trainer(config: Conversion) -> None:
    if (config.read_whole("trainer.max_steps") or 0) > 0:  # -1 is no limit
        config.rename_leaf("train_iters", "trainer.max_steps")
    else:
        config.skip_leaf("trainer.max_steps", "no limit: epochs end the run")
    config.rename_leaf("clip_grad", "trainer.gradient_clip_val")
    callback = "exp_manager.checkpoint_callback_params."
    for key in (f"{callback}every_n_train_steps", "log.ckpt.every_n_train_steps"):
        if (config.read_whole(key) or 0) > 0:
            config.rename_leaf("save_interval", key)
    config.rename_leaf("save_interval", "trainer.val_check_interval")
    for key in ("exp_manager.explicit_log_dir", "exp_manager.exp_dir", "log.log_dir"):
        config.rename_leaf("save", key)
    if not config.has_leaf("save") and config.has_leaf("save_interval"):
        config.rename_leaf("save", config.read_as["save_interval"].key, "checkpoints")
    for key in (f"{callback}save_top_k", "log.ckpt.save_top_k"):
        num_kept = config.read_whole(key) or 0
        # The last checkpoint is kept in addition, unless save_last is off (nemo/utils/exp_manager.py:
        # CallbackParams).
        keeps_last = config.read_flag(key.replace("save_top_k", "save_last")) is not False
        if num_kept > 0 and config.read_flag("exp_manager.create_checkpoint_callback") is not False:
            config.rename_leaf("most_recent_k", key, num_kept + keeps_last)


def _optimizer_of_one(config: Conversion) -> None:
    """Read the optimizer of NeMo 1.x, and the scheduler of 2.0."""
    o = "model.optim."
    config.rename_leaf("optimizer", f"{o}name")
    for name in ("lr", "weight_decay"):
        config.rename_leaf(name, f"{o}{name}")
    leaf = config.leaves.get(f"{o}betas")
    if leaf is not None and isinstance(leaf.value, list) and len(leaf.value) == 2:
        config.rename_leaf("adam_beta1", leaf.key, leaf.value[0])
        config.rename_leaf("adam_beta2", leaf.key, leaf.value[1])
    for sched in (f"{o}sched.", "optim.lr_scheduler."):
        config.rename_leaf("lr_warmup_iters", f"{sched}warmup_steps")
        config.rename_leaf("min_lr", f"{sched}min_lr")
        for key in (f"{sched}name", f"{sched}_target_"):
            if "cosine" in config.read_word(key):
                config.rename_leaf("lr_decay_style", key, "cosine")
        config.skip_leaf(f"{sched}constant_steps", "a plateau at the end of the schedule")


def _read_model(config: Conversion) -> None:
    for key in ("model.config._target_", "model._target_"):
        leaf = config.leaves.get(key)
        # A class of the program's own has the shape of its base class, except for the fields it sets.
        bases = config.leaves.get(key.replace("_target_", "_bases_"))
        chain = [str(leaf.value), *_texts(bases)] if leaf is not None else []
        model = next((known_model for name in chain if (known_model := model_of_class(name.rpartition(".")[2]))), None)
        if model is not None:
            set_known_model(config, model, key, note=chain[0].rpartition(".")[2])
    # AutoBridge.from_hf_pretrained("…") of a Python recipe
    if "from_hf" in config.read_word("model._target_"):
        read_named_model(config, "model._args_.0")
    activation = config.read_word("model.activation")
    if "swiglu" in activation:
        config.rename_leaf("swiglu", "model.activation", True)
    if not config.find_leaf("model.position_embedding_type") and "bridge" in config.read_word("model._target_"):
        config.skip_leaf("model._target_", "which class is built; the values beside it are read")


def _texts(leaf: Leaf | None) -> list[str]:
    return [str(item) for item in leaf.value] if leaf is not None and isinstance(leaf.value, list) else []


def _read_precision(config: Conversion) -> None:
    """Read `trainer.precision: bf16-mixed`, `mixed_precision: bf16_with_fp8_…`, or a plugin's `precision`."""
    for key in ("trainer.precision", "mixed_precision", "trainer.plugins.precision"):
        leaf = config.leaves.get(key)
        if leaf is not None and leaf.unknown:
            for name in ("bf16", "fp16", "fp8", "fp4"):
                config.read_as.setdefault(name, leaf)
        text = config.read_word(key)
        if not text:
            continue
        if "nvfp4" in text:
            config.rename_leaf("fp4", key, "e2m1")
        elif "fp8" in text:
            config.rename_leaf("fp8", key, "hybrid")
        if re.search(r"bf16|bfloat16", text):
            config.rename_leaf("bf16", key, True)
        elif re.search(r"fp16|^16", text):
            config.rename_leaf("fp16", key, True)
        else:
            config.rename_leaf("fp16", key, False)


def _read_amp(config: Conversion) -> None:
    """Read NeMo 1.x's O2, which keeps 16-bit weights with an fp32 copy; without it (the default) all is fp32."""
    key = "model.megatron_amp_O2"
    # NeMo 2.0 and Megatron-Bridge
    if not config.has_leaf("model.micro_batch_size") and not config.has_leaf(key):
        return
    if not config.read_flag(key):
        note = "without O2 weights and gradients are fp32, cast for each use"
        config.set_value("precision.grad_reduce", "fp32", key, note=note)
        config.practice.pop("sums_in", None)
    config.mark_used(key, by="precision.grad_reduce")
