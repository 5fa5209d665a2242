"""Keys of older torchtitan editions, under the names of the last TOML edition."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

P = "parallelism."
# From torchtitan's history: the first editions had all degrees under [training], later ones under [experimental].
RENAMED = {
    "training.tensor_parallel_degree": f"{P}tensor_parallel_degree",
    "training.sequence_parallel_degree": f"{P}tensor_parallel_degree",
    "training.pipeline_parallel_degree": f"{P}pipeline_parallel_degree",
    "training.data_parallel_degree": f"{P}data_parallel_shard_degree",
    "training.data_parallel_shard_degree": f"{P}data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": f"{P}data_parallel_replicate_degree",
    "experimental.pipeline_parallel_degree": f"{P}pipeline_parallel_degree",
    "experimental.context_parallel_degree": f"{P}context_parallel_degree",
    "experimental.context_parallel_rotate_method": f"{P}context_parallel_rotate_method",
    "experimental.pipeline_parallel_schedule": f"{P}pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatch_size": f"{P}pipeline_parallel_microbatch_size",
    "experimental.pipeline_parallel_split_points": f"{P}pipeline_parallel_split_points",
    "experimental.enable_async_tensor_parallel": f"{P}enable_async_tensor_parallel",
    "training.disable_loss_parallel": f"{P}disable_loss_parallel",
    "training.context_parallel_degree": f"{P}context_parallel_degree",
    "training.expert_parallel_degree": f"{P}expert_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "optimizer.warmup_steps": "lr_scheduler.warmup_steps",
    "training.gradient_accumulation_steps": "training.gradient_accumulation_steps",
}
FLOAT8 = (
    "training.enable_float8_linear",
    "training.enable_fp8_linear",
    "float8.enable_float8_linear",
    "training.fp8_linear",
)


def rename_old_keys(config: Conversion) -> None:
    """Map keys of older editions to the names that the reader uses."""
    for old, new in RENAMED.items():
        if old != new:
            config.rename_leaf(new, old)
    for name in FLOAT8:
        value = config.find_leaf(name)
        if value is not None and str(value.value).lower() not in ("false", "", "none"):
            config.rename_leaf("model.converters", name, ["float8"])
        elif value is not None:
            config.skip_leaf(name, "fp8 is off")
