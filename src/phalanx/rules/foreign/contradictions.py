"""Arguments of a script that say something else than the DeepSpeed JSON which the same script names."""

from __future__ import annotations

from phalanx.rules.evidence import differs
from phalanx.rules.foreign.conversion import Conversion

JSON = "ds."  # leaves of the DeepSpeed JSON that the command names
Pairs = tuple[tuple[str, str, str], ...]  # argument, key of the JSON, key of the job


def settle_contradictions(config: Conversion, pairs: Pairs) -> None:
    """Which of two values holds nobody here knows: the program decides, or stops."""
    for name, key, job_key in pairs:
        said, other = config.find_leaf(name), config.leaves.get(f"{JSON}{key}")
        if said is None or other is None or said.unknown or other.unknown:
            continue
        if differs(said.value, other.value):
            why = f"{said.key} is {str(said.value)[:20]} and {key} of DeepSpeed's JSON is {str(other.value)[:20]}"
            config.unknown.setdefault(job_key, why)
            if job_key == "batch.micro":
                config.unknown.setdefault("batch.per_replica", why)
    _settle_formats(config)


def _settle_formats(config: Conversion) -> None:
    """The arguments say one format, and the JSON turns on the other."""
    said = config.values.get("precision.compute")
    other = {"bf16": "fp16", "fp16": "bf16"}.get(str(said.value)) if said is not None and said.key else None
    leaf = config.leaves.get(f"{JSON}{other}.enabled")
    if said is not None and leaf is not None and leaf.value is True and not said.key.startswith(JSON):
        why = f"{said.key} is given, and DeepSpeed's JSON turns on {other}"
        config.unknown.setdefault("precision.compute", why)
