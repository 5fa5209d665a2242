"""Which trainer a configuration file is of: by what stands in it, not only by its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import mistake
from phalanx.io.files import read_head

TREES = (".json", ".yaml", ".yml")
# Words of which a file of each trainer has at least two.
SIGNS: dict[str, frozenset[str]] = {
    "torchtitan": frozenset(
        {"training", "parallelism", "activation_checkpoint", "lr_scheduler", "profiling", "metrics", "job", "float8"}
    ),
    "deepspeed": frozenset(
        {
            "zero_optimization",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "bf16",
            "fp16",
            "steps_per_print",
            "zero_allow_untested_optimizer",
            "communication_data_type",
        }
    ),
    "accelerate": frozenset(
        {
            "distributed_type",
            "compute_environment",
            "num_processes",
            "num_machines",
            "fsdp_config",
            "deepspeed_config",
            "parallelism_config",
            "mixed_precision",
            "main_training_function",
        }
    ),
    "nemo": frozenset(
        {
            "trainer",
            "model",
            "exp_manager",
            "train",
            "ddp",
            "dist",
            "checkpoint",
            "optimizer",
            "scheduler",
            "optim",
            "data",
        }
    ),
}
FITS = {
    ".toml": ("torchtitan",),
    ".json": ("deepspeed",),
    ".yaml": ("accelerate", "nemo"),
    ".yml": ("accelerate", "nemo"),
}
OURS = frozenset({"spec", "batch", "parallel", "precision", "cluster"})  # sections only our job file has
FLAGS = ("--tensor-model-parallel-size", "--num-layers", "--micro-batch-size", "--hidden-size", "--global-batch-size")
MOST_LOOKED = 1 << 20


def trainer_of_file(path: Path) -> str:
    """The trainer's name, or an empty text for what may be a job file.

    Raises UserError for a file that is neither: what ends in .json, .yaml or .yml is never a job file.
    """
    if path.suffix == ".toml":
        return _best_match(_toml_words(path), ".toml")
    if path.suffix in TREES:
        from phalanx.rules.foreign.config_files import read_tree

        words = {key.partition(".")[0] for key in read_tree(path)}
        return "megatron" if "MODEL_ARGS" in words else _best_match(words, path.suffix) or _refuse_unknown(path)
    # Two of Megatron's flags; a job file with such a line would not be TOML.
    text = read_head(path, MOST_LOOKED).decode("utf-8", errors="replace")
    has_flags = sum(flag in text for flag in FLAGS) >= 2
    return "megatron" if has_flags else ""


def _toml_words(path: Path) -> set[str]:
    from phalanx.io.toml import read_toml

    words = set(read_toml(path, noun="job file").table)
    return set() if words & OURS else words


def _best_match(words: Iterable[str], ending: str) -> str:
    counts = {name: len(SIGNS[name] & set(words)) for name in FITS[ending]}
    name = max(counts, key=lambda one: counts[one])
    return name if counts[name] >= 2 else ""


def _refuse_unknown(path: Path) -> str:
    raise mistake(
        str(path),
        "is not a configuration that Phalanx recognises",
        why="a job file ends in .toml; DeepSpeed's JSON, Accelerate's and NeMo's YAML are told by their keys",
        fix="say whose it is: phalanx import FILE --from torchtitan, megatron, deepspeed, accelerate or nemo",
    )
