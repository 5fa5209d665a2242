"""Corrections of Megatron's arguments under DeepSpeed, whose JSON determines loss scale and bucket size."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import UserError
from phalanx.io.path_probes import is_file
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.conversion import Conversion, JobSetting, Leaf
from phalanx.rules.foreign.deepspeed import BYTES, ELEMENTS

JSON_SAYS = "DeepSpeed's JSON says it, and not the arguments"


def heed_deepspeed(config: Conversion) -> None:
    """Replace loss scale and buckets of Megatron's arguments by the JSON's; without the JSON they are unknown."""
    if not config.read_flag("deepspeed"):
        return
    json_leaves = _read_json(config)
    # Releases differ in whether they obey --no-load-optim: old ones let DeepSpeed's engine save and load
    # everything.
    config.practice.pop("resumes_exactly", None)
    _set_loss_scale(config, json_leaves)
    _set_buckets(config, json_leaves)


def _read_json(config: Conversion) -> dict[str, Leaf] | None:
    leaf = config.find_leaf("deepspeed_config")
    name = str(leaf.value) if leaf is not None else ""
    if not name or "$" in name or len(name) > 1000 or not name.isprintable():
        return None
    path = Path(config.file).parent / name
    try:
        return read_tree(path) if is_file(path) else None
    except (UserError, OSError, ValueError):
        return None


def _set_loss_scale(config: Conversion, found: dict[str, Leaf] | None) -> None:
    if config.job_value("precision.compute") != "fp16":
        return
    config.skip_leaf("loss_scale", JSON_SAYS)
    config.values.pop("precision.loss_scale", None)
    leaf = found.get("fp16.loss_scale") if found is not None else None
    scale = leaf.value if leaf is not None else None
    if isinstance(scale, int | float) and not isinstance(scale, bool) and scale > 0:
        config.values["precision.loss_scale"] = JobSetting(value=float(scale), note="static, of DeepSpeed's JSON")
    elif found is None:
        # It is in a JSON that is not available
        config.practice["loss_scale"] = None


def _set_buckets(config: Conversion, found: dict[str, Leaf] | None) -> None:
    config.values.pop("comm.bucket_width", None)
    config.theirs["comm.bucket_mib"] = "zero_optimization.reduce_bucket_size of DeepSpeed's JSON"
    leaf = found.get("zero_optimization.reduce_bucket_size") if found is not None else None
    size = leaf.value if leaf is not None else None
    number = float(size) if isinstance(size, int | float) and not isinstance(size, bool) and size > 0 else ELEMENTS
    width = BYTES.get(str(config.job_value("precision.grad_reduce")), 4)
    note = f"default of DeepSpeed: {number:,.0f} elements × {width} bytes"
    config.values["comm.bucket_mib"] = JobSetting(value=round(min(65_536.0, number * width / 2**20), 1), note=note)
