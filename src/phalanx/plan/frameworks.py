"""What each framework can run, so that the search proposes nothing its user would have to write first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Limits of a framework; what the job fixes by hand is taken at its word and not held against them."""

    schedules: tuple[str, ...]
    zero: tuple[int, ...]
    zero_with_pipeline: tuple[int, ...]
    context: bool = True  # can split one sequence over devices
    copies_kv_heads: bool = True  # can give several tensor ranks the same key/value head
    bare_ends: bool = True  # can give the embedding and the head a pipeline chunk of their own
    selective_zero_bubble: bool = True  # can recompute selectively under a zero-bubble schedule


EVERYTHING = Framework(
    schedules=("gpipe", "1f1b", "interleaved", "zero-bubble"),  # torch.distributed.pipelining.schedules
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2, 3),
)
MEGATRON = Framework(
    schedules=("1f1b", "interleaved"),  # megatron/core/pipeline_parallel/schedules.py
    zero=(0, 1, 2, 3),  # distributed optimizer, Megatron-FSDP
    zero_with_pipeline=(0, 1),
)
# deepspeed/runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
DEEPSPEED = Framework(schedules=("1f1b",), zero=(0, 1, 2, 3), zero_with_pipeline=(0, 1), context=False)
# Our own trainer, as phalanx.train.settings refuses: key/value heads are split, never copied; under a pipeline torch's
# schedules keep the gathered weights for the whole step, so ZeRO-3 would promise memory it does not free.
PHALANX = Framework(
    schedules=EVERYTHING.schedules,
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2),
    copies_kv_heads=False,
    bare_ends=False,
    selective_zero_bubble=False,
)
FRAMEWORKS = {
    "phalanx": PHALANX,
    "megatron-core": MEGATRON,
    "megatron-bridge": MEGATRON,
    "megatron-lm": Framework(schedules=("1f1b", "interleaved"), zero=(0, 1), zero_with_pipeline=(0, 1), context=False),
    "megatron-deepspeed": DEEPSPEED,
    "deepspeed": DEEPSPEED,
    # nanotron 0.5: all-forward-all-backward and 1F1B, ZeRO-1
    "nanotron": Framework(schedules=("gpipe", "1f1b"), zero=(0, 1), zero_with_pipeline=(0, 1), context=False),
}


def find_framework(name: str) -> Framework:
    """The limits of a profile's framework; the unknown one can do everything."""
    return FRAMEWORKS.get(name, EVERYTHING)
