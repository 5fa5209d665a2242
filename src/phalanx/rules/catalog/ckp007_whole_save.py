"""CKP007: a checkpoint that one rank gathers whole fits into the memory of its host."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_bytes

# Bytes per parameter that the gathering rank holds: fp32 weights and both moments, or 16-bit weights alone.
WHOLE_STATE, HALF_WEIGHTS = 12, 2
KINDS = ("fsdp_config.fsdp_state_dict_type", "fsdp_state_dict_type")
GATHERS = (
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "deepspeed_config.zero3_save_16bit_model",
)


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the bytes that the gathering rank holds with the memory of a host."""
    setting = evidence.find_setting(*KINDS)
    width = WHOLE_STATE if setting is not None and str(setting.value).upper() == "FULL_STATE_DICT" else 0
    gather = next((name for name in GATHERS if evidence.setting_flag(name)), "")
    if not width and not gather:
        return exempt("every rank saves its own part")
    width, name = (width, setting.key) if width and setting is not None else (HALF_WEIGHTS, gather)
    plan = evidence.plan
    if plan is None:
        return unknown("one rank gathers the whole state; how large it is, is not known", fix="name model and cluster")
    need, have = width * plan.prediction.parameters, plan.cluster.host_memory_bytes
    if have <= 0:
        return unknown("the memory of a host is not known", fix="give host_memory_bytes in a cluster file")
    share, max_share = need / have, limits.number("most_share")
    message = f"one rank gathers {format_bytes(need)} to save, {share:.0%} of its host's memory"
    formula = (f"{width} bytes × {plan.prediction.parameters:.4g} parameters; host {format_bytes(have)}",)
    if share <= max_share:
        return passed(message, formula=formula, value=share, threshold=max_share, at=f"setting:{name}")
    return failed(
        f"{message}, more than {max_share:.0%}",
        formula=formula,
        value=share,
        threshold=max_share,
        at=f"setting:{name}",
        impact=Impact(note="the host runs out of memory at the first save, and the run ends there"),
        fix="SHARDED_STATE_DICT: every rank saves its own part; merge them afterwards, beside the training",
    )


RULE = Rule(
    id="CKP007",
    slug="whole-state-fits",
    severity="error",
    requires="J",
    uses="P",
    requirement="A state that one rank gathers to save it fits into the memory of its host.",
    why="""
`FULL_STATE_DICT` of FSDP and `stage3_gather_16bit_weights_on_model_save` of DeepSpeed bring all weights to rank 0: of a
70B model 840 GB with both moments, while the other ranks wait. The host kills the process at the first save, hours
after everything looked well.
""",
    how="""
`bytes × parameters <= 0.8 × host memory`: 12 bytes for FULL_STATE_DICT (fp32 weights, two moments), 2 for 16-bit
weights. The share left free is our choice: page cache, data loaders and seven other ranks live there.
""",
    limits={"most_share": Limit(value=0.8, note="of the memory of a host: our choice")},
    bad="fsdp_config:\n  fsdp_state_dict_type: FULL_STATE_DICT",
    good="fsdp_config:\n  fsdp_state_dict_type: SHARDED_STATE_DICT",
    fix="Sharded checkpoints.",
    waive="Hosts with more memory than the cluster's description says.",
    history="2026.1: added in 0.7.",
    references=(
        Reference(text="PyTorch FSDP: StateDictType.FULL_STATE_DICT, rank0_only", mark="recalled"),
        Reference(text="DeepSpeed: stage3_gather_16bit_weights_on_model_save", mark="recalled"),
    ),
    check=check,
)
