"""torchtitan's Python configurations (`config_registry.py`), under the names of its last TOML edition."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

# Classes of distributed/activation_checkpoint.py, and the modes that they replaced.
RECOMPUTE = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget", "NoAC": "none"}
CONVERTERS = {"NVFP4": "nvfp4", "Float8": "float8", "MXFP8": "mx", "MX": "mx"}
SLOTS, STEP = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
CONTEXT = "training.max_context_length"
MOST_GROUPS = 16


def rename_python_keys(config: Conversion) -> None:
    """Map settings that recipes express by classes and functions to the names that the reader uses."""
    if not any(key.endswith("_target_") for key in config.leaves):
        return
    _name_model(config)
    _name_recompute(config)
    _name_optimizer(config)
    _name_batch(config)
    for key in config.leaves:
        if key == "_target_" or key.endswith("._target_"):
            config.skip_leaf(key, "which class is built; the values beside it are read")


def _name_model(config: Conversion) -> None:
    leaf = config.leaves.get("model_spec._target_")
    package = str(leaf.value).removesuffix(".model_registry") if leaf is not None else ""
    if leaf is not None and package != str(leaf.value):
        config.rename_leaf("model.name", "model_spec._target_", package.rpartition(".")[2])
    config.rename_leaf("model.name", "model_spec.name")
    for key in ("model_spec._args_.0", "model_spec.flavor"):
        config.rename_leaf("model.flavor", key)
    if (spec := config.leaves.get("model_spec")) is not None and spec.unknown:
        for name in ("model.flavor", "model.converters"):
            config.read_as[name] = spec
    kinds = [
        (key, str(leaf_of_kind.value))
        for key, leaf_of_kind in config.leaves.items()
        if key.startswith("model_spec.converters.") and key.count(".") == 3 and key.endswith("._target_")
    ]
    for key, kind in kinds:
        for word, name in CONVERTERS.items():
            if f".{word}" in kind:
                config.rename_leaf("model.converters", key, [name])
                break
    converters = config.leaves.get("model_spec.converters")
    if converters is not None and converters.unknown:
        config.read_as["model.converters"] = converters


def _name_recompute(config: Conversion) -> None:
    leaf = config.leaves.get("activation_checkpoint._target_")
    class_name = str(leaf.value).removesuffix(".Config").rpartition(".")[2] if leaf is not None else ""
    if class_name in RECOMPUTE:
        config.rename_leaf("activation_checkpoint.mode", "activation_checkpoint._target_", RECOMPUTE[class_name])
    section_leaf = config.leaves.get("activation_checkpoint")
    if section_leaf is not None and section_leaf.unknown:
        config.read_as["activation_checkpoint.mode"] = section_leaf
    elif "activation_checkpoint" in config.leaves:  # None
        config.read_as["activation_checkpoint.mode"] = type(config.leaves["activation_checkpoint"])(
            key="activation_checkpoint", value="none", line=config.leaves["activation_checkpoint"].line
        )


def _name_optimizer(config: Conversion) -> None:
    """Read the optimizer from the only group of parameters, or from the one that matches all parameters."""
    o = "optimizer."
    leaf = config.leaves.get(f"{o}_target_")
    if leaf is not None and str(leaf.value).endswith("default_adamw"):
        config.rename_leaf("optimizer.name", f"{o}_target_", "AdamW")
        config.rename_leaf("optimizer.lr", f"{o}_args_.0")
    groups = [index for index in range(MOST_GROUPS) if f"{o}param_groups.{index}.optimizer_name" in config.leaves]
    patterns = {index: config.leaves.get(f"{o}param_groups.{index}.pattern") for index in groups}
    catch_all = [index for index, pattern in patterns.items() if pattern is not None and pattern.value == ".*"]
    if groups and (len(groups) == 1 or catch_all):
        group = f"{o}param_groups.{catch_all[-1] if catch_all else groups[0]}."
        config.rename_leaf("optimizer.name", f"{group}optimizer_name")
        for name in ("lr", "eps", "weight_decay"):
            config.rename_leaf(f"{o}{name}", f"{group}optimizer_kwargs.{name}")
        config.rename_leaf("optimizer.betas", f"{group}optimizer_kwargs.betas")
    betas = config.find_leaf("optimizer.betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        config.rename_leaf("optimizer.beta1", betas.key, betas.value[0])
        config.rename_leaf("optimizer.beta2", betas.key, betas.value[1])
    if (section_leaf := config.leaves.get("optimizer")) is not None and section_leaf.unknown:
        for name in ("name", "lr", "eps", "weight_decay"):
            config.read_as[f"{o}{name}"] = section_leaf


def _name_batch(config: Conversion) -> None:
    """Read editions that count tokens: a micro-batch is a number of tokens, in sequences of the context's length."""
    if not any(key in config.leaves for key in (SLOTS, STEP, CONTEXT)):
        return
    context, slots = config.read_whole(CONTEXT), config.read_whole(SLOTS)
    config.rename_leaf("training.seq_len", CONTEXT)
    length = context if context else 2048 if CONTEXT not in config.leaves else 0
    # config/configs.py: TrainingConfig
    tokens = slots if slots else 16_384 if SLOTS not in config.leaves else 0
    if not length or not tokens:
        for name in ("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"):
            config.rename_leaf(name, SLOTS if SLOTS in config.leaves else CONTEXT)
        return
    key = SLOTS if SLOTS in config.leaves else CONTEXT
    micro = max(1, tokens // length)
    pipeline = config.read_whole("parallelism.pipeline_parallel_degree") or 1
    passes = (config.read_whole("parallelism.num_pp_microbatches") or 1) if pipeline > 1 else 1
    config.rename_leaf("training.local_batch_size", key, micro * passes)
    config.rename_leaf("parallelism.pipeline_parallel_microbatch_size", key, micro)
    step = config.read_whole(STEP)
    if step is not None and step > 0:
        config.rename_leaf("training.global_batch_size", STEP, max(1, step // length))
    config.mark_used("parallelism.num_pp_microbatches", by="batch.global_sequences")
