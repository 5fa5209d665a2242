"""The trainer's own key for a key of the job: a cure is of use only in the words of the file it is for."""

from __future__ import annotations

from collections.abc import Mapping

# What a reader leaves open until the world is known, and the key of the job it becomes.
OPEN = {
    "checkpoint.steps": "checkpoint.interval_s",
    "data.steps": "data.tokens",
    "data.samples": "data.tokens",
    "optim.warmup_steps": "optim.warmup_tokens",
    "optim.warmup_samples": "optim.warmup_tokens",
    "batch.per_replica": "batch.global_sequences",
    "parallel.shard_copies": "parallel.shard",
}
UNITS = {
    "interval": "in steps",
    "save_interval": "in steps",
    "save-interval": "in steps",
    "every_n_train_steps": "in steps",
    "distributed_timeout_minutes": "in minutes",
    "distributed-timeout-minutes": "in minutes",
    "DEEPSPEED_TIMEOUT of the environment": "in minutes",
    "reduce_bucket_size": "in elements",
    "bucket_size": "in parameters",
    "ddp-bucket-size": "in parameters",
}


def their_keys(theirs: Mapping[str, str], *, title: str, arguments: bool) -> dict[str, str]:
    """Job key -> what to say of it, as "torchtitan: comm.train_timeout_seconds".

    >>> their_keys({"train.timeout_s": "distributed_timeout_minutes"}, title="Megatron-LM", arguments=True)
    {'train.timeout_s': 'Megatron-LM: --distributed-timeout-minutes, in minutes'}
    """
    found = {}
    for key, name in theirs.items():
        spelled = name
        if arguments and not name.startswith(("--", "env.")):
            spelled = "--" + name.replace("_", "-")
        unit = UNITS.get(spelled.rpartition(".")[2].removeprefix("--"), "")
        found[OPEN.get(key, key)] = f"{title}: {spelled}" + (f", {unit}" if unit else "")
    return found
