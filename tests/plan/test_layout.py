from dataclasses import replace

from phalanx.plan.layout import Layout

LLAMA = Layout(
    data=128, shard=128, tensor=8, context=1, pipeline=16, virtual_pipeline=1, expert=1, zero=1,
    sequence_parallel=True, micro_batch=1, accumulation=16, recompute="full", precision="bf16", schedule="1f1b",
    offload="none", compression="none",
)  # fmt: skip


def test_name_says_every_axis():
    assert LLAMA.name == "TP8·CP1·PP16·DP128 (ZeRO-1, EP1) mbs1 full"
    assert LLAMA.devices == 16384


def test_short_name_leaves_unused_axes_out():
    assert LLAMA.short == "TP8·PP16·DP128 ZeRO-1 mbs1 full"


def test_names_tell_apart_what_runs_differently():
    others = [
        replace(LLAMA, virtual_pipeline=4, schedule="interleaved"),
        replace(LLAMA, schedule="zero-bubble"),
        replace(LLAMA, shard=8),
        replace(LLAMA, offload="optimizer"),
        replace(LLAMA, compression="bf16"),
        replace(LLAMA, recompute="none"),
    ]
    assert len({one.name for one in [LLAMA, *others]}) == 7
    assert len({one.short for one in [LLAMA, *others]}) == 7


def test_a_grouped_shard_is_written_with_its_size():
    assert "(ZeRO-3/8, EP1)" in replace(LLAMA, zero=3, shard=8).name
