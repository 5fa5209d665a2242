"""Reader of Megatron-LM's arguments, alone or in the shell script that launches it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.errors import mistake
from phalanx.rules.foreign import mcore
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.contradictions import JSON, settle_contradictions
from phalanx.rules.foreign.conversion import Conversion, ReadConfig
from phalanx.rules.foreign.detect import TrainsNothingError, is_other_program, refuse_inference
from phalanx.rules.foreign.own_arguments import leave_open
from phalanx.rules.foreign.shell.partial_text import is_known
from phalanx.rules.foreign.shell.training_command import (
    MEGATRON_SIGNS,
    STARTS_RANKS,
    TrainingCommand,
    canonical_flag,
    leaves_of_script,
    notes_of_script,
    program_at,
    read_script,
)
from phalanx.rules.foreign.shell.written_json import named_json

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
    "verb.": "which command it is",
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
IRRELEVANT |= {
    "deepspeed_activation_checkpointing": "whose code recomputes; --checkpoint-activations says whether",
    "partition_activations": "how recomputed activations are stored",
    "deepspeed_mpi": LAUNCH,
    "hostfile": LAUNCH,
    "include": LAUNCH,
    "exclude": LAUNCH,
    "launcher": LAUNCH,
    "force_multi": LAUNCH,
    "SBATCH.": LAUNCH,
    "pad_vocab_size_to": "the size of the vocabulary is stated",
    "embed_layernorm": "one more norm behind the embedding costs nothing",
    "data_set": "which text is read does not change the work of a step",
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


def read_config(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """Read a script or a text, or Megatron's own test recipes: YAML with MODEL_ARGS and ENV_VARS."""
    if path.suffix in (".yaml", ".yml"):
        renamed = {
            key.removeprefix("MODEL_ARGS.").replace("ENV_VARS.", "env."): leaf for key, leaf in read_tree(path).items()
        }
        return ReadConfig(leaves={key: replace(leaf, key=key) for key, leaf in renamed.items()})
    reading = read_script(path, variables)
    if not reading.commands:
        error = mistake(
            str(path),
            "has no command that could be read and starts a training program of Megatron",
            why="none of its commands is given arguments such as --num-layers and --micro-batch-size",
            fix="check the script that starts the training",
        )
        raise TrainsNothingError(error.problems)
    if all(_trains_nothing(command) for command in reading.commands):
        refuse_inference(path)
    leaves = leaves_of_script(reading)
    leaves |= named_json(reading, leaves)
    open_why = next((command.open_why for command in reading.commands if command.open_why), "")
    return ReadConfig(leaves=leaves, open_why=open_why or _why_open(reading.commands), notes=notes_of_script(reading))


# Arguments that only Megatron's parser has: a program with its parser has its defaults.
ONLY_MEGATRON = frozenset(
    [
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size", "micro_batch_size"),
        *("max_position_embeddings", "num_attention_heads", "ffn_hidden_size", "train_iters", "train_samples"),
        *("lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_fraction", "lr_warmup_iters"),
        *("lr_warmup_samples", "eval_iters", "eval_interval", "save_interval", "log_interval", "split", "clip_grad"),
        *("attention_dropout", "hidden_dropout", "init_method_std", "tokenizer_type", "vocab_file", "merge_file"),
        *("use_distributed_optimizer", "use_mcore_models", "transformer_impl", "distributed_backend", "data_impl"),
        *("swiglu", "disable_bias_linear", "group_query_attention", "untie_embeddings_and_output_weights"),
        *("use_rotary_position_embeddings", "position_embedding_type", "recompute_granularity", "sequence_parallel"),
        *("checkpoint_activations", "no_load_optim", "no_load_rng", "adam_beta2", "min_lr", "mock_data"),
    ]
)
# Number of them required: for a program with a name that is also Megatron's, and for others.
LEAST_NAMED, LEAST = 2, 4


def _why_open(commands: Sequence[TrainingCommand]) -> str:
    """Return why settings that the script leaves out may have any value: its program is not known to be Megatron's."""
    for command in commands:
        flags = {canonical_key(flag) for arguments in command.program for flag in arguments}
        if "yaml_cfg" in flags:
            return "--yaml-cfg names a file that takes the place of all arguments"
        program_index = program_at(command.command.argv)
        name = command.command.argv[program_index - 1].rpartition("/")[2] if program_index else ""
        num_known = len(flags & ONLY_MEGATRON)
        if name and num_known < (LEAST_NAMED if name.startswith("pretrain_") else LEAST):
            return f"{name[:60] if is_known(name) else 'its program'} is not known to have Megatron's defaults"
    return ""


def _trains_nothing(command: TrainingCommand) -> bool:
    """Return whether a program converts or evaluates: it has no training name, length or learning rate.

    It still gets Megatron's arguments, to build the model.
    """
    flags = {canonical_flag(flag) for arguments in command.program for flag in arguments}
    programs = [word.rpartition("/")[2] for word in command.command.argv if word.endswith(".py")]
    is_training_name = any(re.search(r"train|tune|sft", name) for name in programs)
    lengths = [
        arguments.get(flag, ())
        for arguments in command.program
        for flag in arguments
        if canonical_flag(flag) in ("train_iters", "train_samples")
    ]
    if "inference" in flags or (programs and all(is_other_program(name) for name in programs)):
        # It gets the arguments of a training, to build the model as it was trained
        return True
    if lengths and all(words == ("0",) for words in lengths) and not command.open_why:
        return True  # --train-iters 0: the loss of a checkpoint is evaluated
    return bool(programs) and not (is_training_name or command.open_why or flags & MEGATRON_SIGNS.asked)


def translate_config(config: Conversion) -> None:
    """Translate Megatron-LM's arguments into job settings."""
    config.names |= {canonical_key(key): key for key in config.leaves if key.startswith("--") and " " not in key}
    read_machines(config)
    algorithms = {"ring": "ring", "tree": "tree", "nvls": "nvls", "nvlstree": "nvls"}
    if (algorithm := config.read_word("env.NCCL_ALGO")) in algorithms:
        config.set_value("comm.algorithm", algorithms[algorithm], "env.NCCL_ALGO")
    mcore.translate_config(config)
    _read_deepspeed(config)
    if (degree := config.read_whole("ds_sequence_parallel_size")) is not None and degree > 0:
        config.set_value("parallel.context", degree, "ds_sequence_parallel_size")
        config.set_value("parallel.context_kind", "ulysses", "ds_sequence_parallel_size")
    config.settle_rest(
        irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: canonical_key(key) if key.startswith("--") else key
    )
    leave_open(config)


def canonical_key(key: str) -> str:
    """Return an argument's canonical name, with underscores.

    >>> canonical_key("--tensor-model-parallel-size")
    'tensor_model_parallel_size'
    """
    name = key.removeprefix("--").replace("-", "_").lower()
    return SAME.get(name, name)


PAIRS = (
    ("micro_batch_size", "train_micro_batch_size_per_gpu", "batch.micro"),
    ("bf16", "bf16.enabled", "precision.compute"),
    ("fp16", "fp16.enabled", "precision.compute"),
)
STAGE = "ds.zero_optimization.stage"


def _read_deepspeed(config: Conversion) -> None:
    """Read Megatron-DeepSpeed: the JSON determines how states are sharded; --zero-stage must agree with it."""
    if config.read_flag("no_pipeline_parallel"):
        config.set_value("parallel.pipeline", 1, "no_pipeline_parallel")
    if not config.has_leaf("deepspeed") and "deepspeed" not in config.unreadable:
        reason = "no effect without --deepspeed"
        for key in config.leaves:
            if key.startswith(JSON):
                config.skip_leaf(key, reason)
        config.skip_leaf("zero_stage", reason)
        config.skip_leaf("deepspeed_config", reason)
        return
    config.mark_used("deepspeed", "deepspeed_config", by="parallel.zero")
    config.unknown.pop("parallel.zero", None)
    leaf = config.find_leaf(STAGE)
    if leaf is not None and not leaf.unknown:
        stage, name = config.read_whole(STAGE), STAGE
    elif config.has_leaf("zero_stage"):
        stage, name = config.read_whole("zero_stage"), "zero_stage"
    else:
        stage, name = config.read_whole(STAGE) or 0, STAGE
    config.set_value("parallel.zero", stage or 0, name, note="DeepSpeed")
    config.mark_used("zero_stage", by="parallel.zero")
    if leaf is None and not any(key.startswith(JSON) for key in config.leaves) and not config.has_leaf("zero_stage"):
        config.unknown.setdefault("parallel.zero", "--deepspeed, and no configuration of DeepSpeed's is named")
    _read_format(config, missing=leaf is not None and bool(leaf.unknown))
    settle_contradictions(config, PAIRS)
    names = (f"{JSON}zero_optimization.offload_optimizer.device", f"{JSON}zero_optimization.cpu_offload")
    if config.read_word(names[0]) in ("cpu", "nvme") or config.read_flag(names[1]):
        config.set_value("parallel.offload", "optimizer", *names)
    elif config.read_flag("cpu_optimizer"):
        config.set_value("parallel.offload", "optimizer", "cpu_optimizer")
    elif leaf is not None and leaf.unknown:
        config.unknown["parallel.offload"] = f"the DeepSpeed JSON {leaf.unknown}"
    if str(config.job_value("precision.compute")) == "fp16" and "precision.loss_scale" in config.values:
        scale = config.read_number(f"{JSON}fp16.loss_scale")
        if scale is not None:
            value: object = scale if scale > 0 else "auto"
            note = "static" if scale > 0 else "0 is dynamic"
            config.set_value("precision.loss_scale", value, f"{JSON}fp16.loss_scale", note=note)
    for key in config.leaves:
        if key.startswith(JSON) and key not in config.settled:
            config.skip_leaf(key, "as the arguments say, or a detail of DeepSpeed")


def _read_format(config: Conversion, *, missing: bool) -> None:
    """Read the compute format from the JSON, which holds if neither --bf16 nor --fp16 is given."""
    if any(config.has_leaf(name) for name in ("bf16", "fp16", "fp8_format")):
        return
    for name, compute in (("bf16.enabled", "bf16"), ("bfloat16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if config.read_flag(f"{JSON}{name}"):
            config.set_value("precision.compute", compute, f"{JSON}{name}")
            return
    if missing:
        config.unknown.setdefault("precision.compute", "DeepSpeed's JSON may say it, and is not here")


EACH_HOST = ("nproc_per_node", "num_gpus", "SBATCH.gpus-per-node", "SBATCH.ntasks-per-node")


def _starts_tasks(config: Conversion, name: str) -> bool:
    """Return whether Slurm's tasks on a host are the ranks: no launcher starts them, nor is it one task for all."""
    if (
        config.has_leaf(STARTS_RANKS)
        or config.has_leaf("nproc_per_node")
        or config.has_leaf("num_gpus")
        or {"nproc_per_node", "num_gpus"} & set(config.unreadable)
    ):
        return False
    has_devices = any(
        config.has_leaf(directive) for directive in ("SBATCH.gres", "SBATCH.gpus-per-node", "SBATCH.gpus")
    )
    return not (name == "SBATCH.ntasks-per-node" and has_devices and config.read_whole(name) == 1)


LOCAL = ("localhost", "127.0.0.1")
SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _holds_a_place(config: Conversion) -> bool:
    """Return whether one host at a local address is a placeholder: the layout needs several whole hosts."""
    hosts, devices_each = config.machines
    address = str(leaf.value) if (leaf := config.find_leaf("master_addr")) is not None else ""
    model_ranks = 1
    for name in SPLITS:
        model_ranks *= config.read_whole(name) or 1
    return (
        hosts == 1
        and devices_each > 0
        and address in LOCAL
        and model_ranks > devices_each
        and model_ranks % devices_each == 0
    )


def read_machines(config: Conversion) -> None:
    """Read the number of hosts and of devices of each, from the launcher's or Slurm's settings."""
    # A range such as 1:4 is elastic
    for name in ("nnodes", "num_nodes"):
        if (leaf := config.find_leaf(name)) is not None and not str(leaf.value).isdigit() and not leaf.unknown:
            config.leave_unmapped(name, "not one number of hosts")
            config.read_as[name] = replace(leaf, value=None)
    hosts_key = next((key for key in ("nnodes", "num_nodes", "SBATCH.nodes") if (config.read_whole(key) or 0) > 0), "")
    if hosts_key == "SBATCH.nodes" and config.has_leaf(STARTS_RANKS) and config.read_whole(hosts_key) != 1:
        # The launcher does not get them: it starts as many runs, or gets the number differently
        hosts_key = ""
    devices_key = next((key for key in EACH_HOST if (config.read_whole(key) or 0) > 0), "")
    if devices_key.startswith("SBATCH.") and not _starts_tasks(config, devices_key):
        devices_key = ""
    config.machines = (
        (config.read_whole(hosts_key) or 0) if hosts_key else 0,
        (config.read_whole(devices_key) or 0) if devices_key else 0,
    )
    if _holds_a_place(config):
        config.machines = (0, config.machines[1])
    config.mark_used(*(name for name in (hosts_key, devices_key) if name), by="cluster: hosts × devices")
    for name in ("SBATCH.nodes", "SBATCH.ntasks-per-node", "SBATCH.gpus-per-node"):
        if name not in (hosts_key, devices_key):
            config.skip_leaf(name, "the launcher says the same")
    if (restarts := config.read_whole("max_restarts")) is not None:
        config.set_value(
            "fault.restarts", restarts + 1, "max_restarts", note="torchrun --max-restarts, and the first start"
        )
