"""Arguments that no reader knows: values that their names suggest they change are marked as unknown.

A fork gives its program arguments that the original does not have. Their effect is not known, so the defaults of
layout, sharding, format or batch that their names refer to cannot be assumed.
"""

from __future__ import annotations

import re

from phalanx.rules.evidence import NO_WORD
from phalanx.rules.foreign.conversion import Conversion
from phalanx.rules.foreign.shell.training_command import ACCELERATE, canonical_flag

SPEAKS_OF = {
    "parallel.tensor": re.compile(
        r"tensor_?(model_)?parallel|^(model_parallel|mp)_size$|(^|_)tp(_size|_degree)?$|autotp|mp_args"
    ),
    "parallel.pipeline": re.compile(
        r"pipe(line)?_?(model_)?parallel|(^|_)pp(_size|_degree)?$|^(num_|pipeline_)stages$|mp_args"
    ),
    "parallel.context": re.compile(
        r"(context|sequence|seq)_?(parallel|shard)|(^|_)(cp|sp)(_size|_degree)?$|ulysses|ring_?(attn|attention|flash)|zigzag"
    ),
    "parallel.expert": re.compile(r"expert_?(model_|tensor_)?parallel|(^|_)ep(_size|_degree)?$"),
    "parallel.zero": re.compile(
        r"(^|_)zero(_?[0-3]|_?stage)?$|fsdp|(^|_)shard(ed|ing)?(_|$)|^(use_)?deepspeed$|ddp_backend|distributed_optimizer"
    ),
    "parallel.recompute": re.compile(
        r"recomput|remat(_|$)|(activation|gradient|grad|act)s?_?(ckpt|checkpoint)|checkpoint_?(activ|layer|grad)"
    ),
    "parallel.offload": re.compile(r"offload"),
    "precision.compute": re.compile(
        r"(^|_)(bf16|fp16|fp8|amp|half|mixed_precision|precision|bfloat16|float16)(_training|_enabled|$)"
        r"|^((torch|model|train|compute|params?|weight)_)?dtype$"
    ),
    "batch.micro": re.compile(r"micro_?batch_?size|batch_?size_per_(gpu|device)|^(train_?)?batch_?size$"),
    "batch.per_replica": re.compile(r"grad(ient)?s?_?accum|^accum|accumulation_steps|update_freq"),
}
# Arguments of Megatron's that have such a word and change no step of the training.
CHANGES_NONE = re.compile(r"inference|no_data_sharding|log_|profil|(^|_)dataset|tokeniz")
OFF = ("false", "no", "off", "none", "", "0")
SWITCHED = ("parallel.zero", "parallel.recompute", "parallel.offload", "precision.compute")


def leave_open(config: Conversion) -> None:
    """After all leaves are settled, mark defaults as unknown that an argument of the program's own may change."""
    own_arguments = [
        (_name_of(key), leaf)
        for key, leaf in config.leaves.items()
        if (settled := config.settled.get(key)) is not None
        and settled.text == NO_WORD
        and not CHANGES_NONE.search(_name_of(key))
    ]
    for job_key, sign in SPEAKS_OF.items():
        # A degree of 1 splits nothing
        off = OFF if job_key in SWITCHED else (*OFF, "1")
        leaf = next(
            (leaf for name, leaf in own_arguments if sign.search(name) and str(leaf.value).lower() not in off), None
        )
        if leaf is not None and not _is_said(config, job_key):
            config.unknown.setdefault(job_key, f"{leaf.key[:60]} is an argument of the program's own")


# Prefixes of settings that have their own readers, and of Slurm and the environment.
NOT_OWN = ("ds.", "accelerate_file.", "accelerate_ds.", "fsdp_file.", "program_file.", "env.", "SBATCH.", "verb.")


def _name_of(key: str) -> str:
    """Return the name to match: for a key of the file that --config names, the last part."""
    bare_key = key.removeprefix(ACCELERATE)
    if bare_key.startswith("--"):
        return canonical_flag(bare_key)
    return "" if bare_key.startswith(NOT_OWN) else canonical_flag(bare_key.rpartition(".")[2])


def _is_said(config: Conversion, job_key: str) -> bool:
    if job_key == "batch.per_replica":
        return config.has_leaf("gradient_accumulation_steps") or config.has_leaf("global_batch_size")
    setting = config.values.get(job_key)
    return setting is not None and bool(setting.key)
