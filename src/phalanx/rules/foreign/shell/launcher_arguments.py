"""Boundaries between a launcher's arguments and the program: torchrun, deepspeed, accelerate launch."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.rules.foreign.shell.partial_text import is_known

# Launcher arguments without a value: torch/distributed/run.py, deepspeed/launcher/runner.py, accelerate's
# commands/launch.py.
# commands/launch.py.
SWITCHES = frozenset(
    [
        *("standalone", "no_python", "run_path", "use_env", "no_local_rank", "no_ssh", "save_pid", "force_multi"),
        *("bind_cores_to_rank", "elastic_training", "signal_children", "multi_gpu", "cpu", "tpu", "quiet", "debug"),
        *("use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "use_mps_device", "use_xpu"),
        *("ipex", "module", "dynamo_use_fullgraph", "dynamo_use_dynamic", "enable_cpu_affinity", "tpu_use_sudo"),
        *("tpu_cluster", "no_tpu_cluster", "tpu_use_cluster", "same_network"),
    ]
)


def is_launcher_switch(word: str) -> bool:
    """Return whether the next word is not the value of this argument.

    >>> [is_launcher_switch(one) for one in ("--use_deepspeed", "--num_gpus=8", "--num_gpus", "-m")]
    [True, True, False, False]
    """
    return word.startswith("--") and ("=" in word or word.lstrip("-").replace("-", "_") in SWITCHES)


def accelerate_at(words: Sequence[str]) -> int:
    """Return the index at which the arguments of `accelerate launch` begin; -1 if it is not started.

    >>> accelerate_at(["env", "A=1", "accelerate", "launch", "--multi_gpu", "train.py"])
    4
    """
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "accelerate" and list(words[place + 1 : place + 2]) == ["launch"]:
            return place + 2
        if word in ("accelerate-launch", "accelerate.commands.launch") or word.endswith("/accelerate-launch"):
            return place + 1
    return -1


def starts_ranks(words: Sequence[str]) -> bool:
    """Return whether the words contain a launcher that starts the ranks of a host.

    >>> starts_ranks(["srun", "torchrun", "a.py"]), starts_ranks(["srun", "python", "a.py"])
    (True, False)
    """
    modules = ("torch.distributed.launch", "torch.distributed.run", "deepspeed.launcher.runner")
    programs = ("torchrun", "deepspeed", "accelerate", "accelerate-launch")
    program_index = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    return any(word in modules or word.rpartition("/")[2] in programs for word in words[:program_index])


def starts_deepspeed(words: Sequence[str], program: int) -> bool:
    """Return whether DeepSpeed's launcher starts the program, whose arguments begin at `program`."""
    launcher_words = words[: program or 1]
    return any(word.rpartition("/")[2] in ("deepspeed", "deepspeed.launcher.runner") for word in launcher_words)


def program_of_accelerate(words: Sequence[str], start: int) -> int:
    """Return the index at which the arguments of the program begin that `accelerate launch` starts."""
    place = start
    while place < len(words):
        word = words[place]
        if word in ("-m", "--module"):
            place += 1
        elif word.startswith("-"):
            place += 1 if is_launcher_switch(word) else 2
        # A variable that may hold any of its arguments
        elif not is_known(word) and not word.endswith(".py"):
            place += 1
        else:
            return place + 1
    return len(words)
