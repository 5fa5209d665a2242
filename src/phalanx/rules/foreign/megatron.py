"""Megatron-LM's argument list, alone or in the shell script that launches it."""

from __future__ import annotations

from phalanx.rules.foreign import mcore
from phalanx.rules.foreign.conversion import Conversion

SAME = {  # other spellings of one argument
    "ddp_bucket_size": "bucket_size",
    "grad_reduce_in_bf16": "grad_reduce_in_bf16",
    "moe_router_load_balancing_type": "moe_router_load_balancing_type",
    "num_moe_experts": "num_experts",
    "model_parallel_size": "tensor_model_parallel_size",
    "batch_size": "micro_batch_size",
    "warmup": "lr_warmup_fraction",
}
LAUNCH = "the launcher's own business: names, addresses and ports"
IRRELEVANT = {
    "master_addr": LAUNCH,
    "master_port": LAUNCH,
    "node_rank": LAUNCH,
    "rdzv_": LAUNCH,
    "log_dir": LAUNCH,
    "role": LAUNCH,
    "tee": LAUNCH,
    "redirects": LAUNCH,
    "standalone": LAUNCH,
    "distributed_backend": "nccl is what the planner assumes of GPUs",
    "data_path": "which text is read does not change the work of a step",
    "train_data_path": "which text is read does not change the work of a step",
    "valid_data_path": "which text is read does not change the work of a step",
    "test_data_path": "which text is read does not change the work of a step",
    "data_cache_path": "which text is read does not change the work of a step",
    "data_impl": "which text is read does not change the work of a step",
    "mock_data": "which text is read does not change the work of a step",
    "split": "which text is read does not change the work of a step",
    "num_workers": "data loading",
    "dataloader_type": "data loading",
    "no_mmap_bin_files": "data loading",
    "no_create_attention_mask_in_dataloader": "data loading",
    "reset_": "masks within a sequence",
    "eod_mask_loss": "masks within a sequence",
    "vocab_file": "the tokenizer does not change the work of a step",
    "merge_file": "the tokenizer does not change the work of a step",
    "tokenizer_": "the tokenizer does not change the work of a step",
    "make_vocab_size_divisible_by": "padding of the vocabulary; its size is stated",
    "log_": "logging",
    "tensorboard_": "logging",
    "wandb_": "logging",
    "timing_log_": "logging",
    "no_barrier_with_level_1_timing": "logging",
    "eval_interval": "evaluation",
    "eval_iters": "evaluation",
    "init_method_": "initial weights do not change the work of a step",
    "attention_dropout": "regularisation",
    "hidden_dropout": "regularisation",
    "use_mcore_models": "which implementation; the plan assumes Megatron Core",
    "use_legacy_models": "which implementation",
    "transformer_impl": "which kernels",
    "attention_backend": "which kernels",
    "use_flash_attn": "which kernels",
    "attention_softmax_in_fp32": "which kernels",
    "no_masked_softmax_fusion": "which kernels",
    "no_rope_fusion": "which kernels",
    "no_bias_": "which kernels",
    "no_gradient_accumulation_fusion": "which kernels",
    "cross_entropy_": "which kernels",
    "moe_grouped_gemm": "which kernels",
    "moe_permute_fusion": "which kernels",
    "profile": "profiler traces",
    "profile_": "profiler traces",
    "use_pytorch_profiler": "profiler traces",
    "tiktoken_": "the tokenizer does not change the work of a step",
    "apply_layernorm_1p": "which kernels",
    "no_position_embedding": "an old spelling of rotary positions",
    "rotary_percent": "how much of a head is rotated costs nothing",
    "empty_unused_memory_level": "allocator settings",
    "bias_": "which kernels",
    "disable_gloo_process_groups": "how processes are started",
    "manual_gc": "Python's garbage collection",
    "manual_gc_": "Python's garbage collection",
    "exit_": "when the job is stopped from within",
    "load": "where a run goes on",
    "finetune": "where a run starts",
    "auto_detect_ckpt_format": "where a run goes on",
    "ckpt_": "how a checkpoint is laid out",
    "dist_ckpt_": "how a checkpoint is laid out",
    "use_dist_ckpt": "how a checkpoint is laid out",
    "fp8_margin": "how fp8 is scaled",
    "fp8_amax_": "how fp8 is scaled",
    "fp8_recipe": "how fp8 is scaled",
    "initial_loss_scale": "where dynamic loss scaling starts",
    "min_loss_scale": "how low dynamic loss scaling goes",
    "loss_scale_window": "how dynamic loss scaling moves",
    "hysteresis": "how dynamic loss scaling moves",
    "TEST_TYPE": "Megatron's own tests",
    "METRICS": "Megatron's own tests",
    "BEFORE_SCRIPT": "code that is not run",
    "AFTER_SCRIPT": "code that is not run",
    "env.CUDA_DEVICE_MAX_CONNECTIONS": "order of kernels, for overlap",
    "env.PYTORCH_": "allocator settings",
    "env.OMP_NUM_THREADS": "threads of the host",
    "env.NCCL_DEBUG": "logging",
    "env.CUDA_VISIBLE_DEVICES": LAUNCH,
    "env.MASTER_": LAUNCH,
    "env.PYTHONPATH": LAUNCH,
    "SBATCH.job-name": LAUNCH,
    "SBATCH.partition": LAUNCH,
    "SBATCH.account": LAUNCH,
    "SBATCH.time": LAUNCH,
    "SBATCH.output": LAUNCH,
    "SBATCH.error": LAUNCH,
}
UNMAPPED = {
    "overlap_param_gather": "overlap is part of the efficiency profile, not of the job",
    "tp_comm_overlap": "overlap is part of the efficiency profile, not of the job",
    "overlap_p2p_comm": "overlap is part of the efficiency profile, not of the job",
    "no_overlap_p2p_communication": "overlap is part of the efficiency profile, not of the job",
    "decoupled_lr": "a learning rate of its own for the embedding",
    "decoupled_min_lr": "a learning rate of its own for the embedding",
    "mtp_num_layers": "the planner counts no multi-token heads",
    "account_for_": "the planner splits layers evenly",
    "decoder_first_pipeline_num_layers": "the planner splits layers evenly",
    "decoder_last_pipeline_num_layers": "the planner splits layers evenly",
    "pipeline_model_parallel_layout": "the planner splits layers evenly",
    "moe_token_dispatcher_type": "how tokens reach their experts is the efficiency profile's matter",
    "enable_ft_package": "NVRx's heartbeats have no key in the job schema",
    "env.": "an environment variable that the job schema has no word for",
}


def translate_config(config: Conversion) -> None:
    """Fill the conversion."""
    config.names |= {_canonical_key(key): key for key in config.leaves if key.startswith("--") and " " not in key}
    _set_aside(config)
    _read_machines(config)
    words = {"ring": "ring", "tree": "tree", "nvls": "nvls", "nvlstree": "nvls"}
    if (word := config.read_word("env.NCCL_ALGO")) in words:
        config.set_value("comm.algorithm", words[word], "env.NCCL_ALGO")
    mcore.translate_config(config)
    config.settle_rest(
        irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: _canonical_key(key) if key.startswith("--") else key
    )


def _canonical_key(key: str) -> str:
    """
    >>> _canonical_key("--tensor-model-parallel-size")
    'tensor_model_parallel_size'
    """
    name = key.removeprefix("--").replace("-", "_").lower()
    return SAME.get(name, name)


def _set_aside(config: Conversion) -> None:
    """Flags in an if, and those given again further down."""
    for key in config.leaves:
        if "(in an if" in key:
            config.leave_unmapped(key, "stands between if and fi, which are not run; give its effect with --set")
        elif "given again)" in key:
            config.skip_leaf(key, "given again further down, which holds")


def _read_machines(config: Conversion) -> None:
    hosts = next((n for n in ("nnodes", "SBATCH.nodes") if (config.read_whole(n) or 0) > 0), "")
    each = next(
        (
            n
            for n in ("nproc_per_node", "SBATCH.gpus-per-node", "SBATCH.ntasks-per-node")
            if (config.read_whole(n) or 0) > 0
        ),
        "",
    )
    config.machines = ((config.read_whole(hosts) or 0) if hosts else 0, (config.read_whole(each) or 0) if each else 0)
    config.mark_used(*(name for name in (hosts, each) if name), by="cluster: hosts × devices")
    for name in ("SBATCH.nodes", "SBATCH.ntasks-per-node", "SBATCH.gpus-per-node"):
        if name not in (hosts, each):
            config.skip_leaf(name, "the launcher says the same")
    if (again := config.read_whole("max_restarts")) is not None:
        config.set_value(
            "fault.restarts", again + 1, "max_restarts", note="torchrun --max-restarts, and the first start"
        )
