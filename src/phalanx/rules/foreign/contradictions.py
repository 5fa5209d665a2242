"""Contradictions between a script's arguments and the DeepSpeed JSON that the script names."""

from __future__ import annotations

from phalanx.rules.evidence import differs
from phalanx.rules.foreign.conversion import Conversion

JSON = "ds."  # prefix of leaves of the DeepSpeed JSON that the command names
# Argument, key of the JSON, key of the job
Pairs = tuple[tuple[str, str, str], ...]


def settle_contradictions(config: Conversion, pairs: Pairs) -> None:
    """Mark settings whose argument and JSON value differ as unknown: the program uses one of them, or stops."""
    for name, key, job_key in pairs:
        arg, leaf = config.find_leaf(name), config.leaves.get(f"{JSON}{key}")
        if arg is None or leaf is None or arg.unknown or leaf.unknown:
            continue
        if differs(arg.value, leaf.value):
            reason = f"{arg.key} is {str(arg.value)[:20]} and {key} of DeepSpeed's JSON is {str(leaf.value)[:20]}"
            config.unknown.setdefault(job_key, reason)
            if job_key == "batch.micro":
                config.unknown.setdefault("batch.per_replica", reason)
    _settle_formats(config)


def _settle_formats(config: Conversion) -> None:
    """Mark the format as unknown if an argument sets one and the JSON enables the other."""
    setting = config.values.get("precision.compute")
    other_format = (
        {"bf16": "fp16", "fp16": "bf16"}.get(str(setting.value)) if setting is not None and setting.key else None
    )
    leaf = config.leaves.get(f"{JSON}{other_format}.enabled")
    if setting is not None and leaf is not None and leaf.value is True and not setting.key.startswith(JSON):
        reason = f"{setting.key} is given, and DeepSpeed's JSON turns on {other_format}"
        config.unknown.setdefault("precision.compute", reason)
