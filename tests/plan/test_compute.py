"""Device work of one micro-batch: directions that physics demands, whatever the fitted constants are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.model import known_presets
from phalanx.plan.case_columns import machine_columns, model_columns
from phalanx.plan.cases import BF16, FP4, FP8, FP32
from phalanx.plan.compute import compute_seconds, matmul_pass, matmul_rates, routed_tokens
from phalanx.plan.physics import Profile, shipped_physics
from phalanx.validate.throughput_rows import row_columns, to_cases

ROW = {"layers": "1", "hidden": "64", "seq": "4096", "gpu": "H100", "gpus": "1", "global_batch": "64"}
FULL, SELECTIVE, NONE = 2.0, 1.0, 0.0


def case(preset="llama-3-8b", cluster="8xH100:1", **changes):
    known = model_columns(known_presets()[preset].model()) | machine_columns(resolve_cluster(cluster))
    return to_cases([row_columns(ROW, 1, "none") | known | changes])


def work(*args, **changes):
    return compute_seconds(case(*args, **changes), shipped_physics(), Profile())


def seconds(part):
    return (part.forward + part.backward).item()


def device(w):
    return seconds(w.matmul) + seconds(w.attention) + seconds(w.elementwise) + seconds(w.head) + w.recompute.item()


def test_never_faster_than_the_best_matmul_anyone_measured():
    """2 FLOPs per weight and token forward, 4 backward, at most at the rate of the device."""
    cases = case(micro_batch=4.0)
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    ideal = 6.0 * weights * cases.tokens.item() / cases.matmul_flops.item()
    found = seconds(compute_seconds(cases, shipped_physics(), Profile()).matmul)
    assert ideal < found < 2.0 * ideal


@pytest.mark.parametrize("tp", [2.0, 4.0, 8.0])
def test_tensor_parallelism_splits_matmuls_but_not_perfectly(tp):
    whole, split = seconds(work().matmul), seconds(work(tp=tp).matmul)
    assert whole / tp < split < whole


def test_small_micro_batches_are_less_efficient():
    per_sequence = [device(work(micro_batch=size)) / size for size in (1.0, 2.0, 4.0, 8.0)]
    assert per_sequence == sorted(per_sequence, reverse=True)


@given(rows=st.integers(1, 2**17), cols=st.integers(64, 2**15), inner=st.integers(64, 2**15))
def test_a_larger_matmul_never_takes_less(rows, cols, inner):
    c, rate = case(), np.array([6e14])

    def both(m, n, k):
        done = matmul_pass(c, shipped_physics(), *(np.array([float(one)]) for one in (m, n, k)), rate)
        return seconds(done)

    assert both(2 * rows, cols, inner) >= both(rows, cols, inner)
    assert both(rows, 64 * cols, inner) >= both(rows, cols, inner)


@pytest.mark.parametrize(("odd", "even"), [(50257.0, 50304.0), (50264.0, 50304.0), (51201.0, 51264.0)])
def test_padding_an_unaligned_vocabulary_pays(odd, even):
    """The known GPT-2 trick: 50,304 instead of 50,257 is faster, though larger."""
    assert seconds(work(vocab=odd).head) > seconds(work(vocab=even).head)


def test_the_worse_the_alignment_the_slower():
    by_width = [seconds(work(ffn=width).matmul) / width for width in (14336.0, 14344.0, 14337.0)]
    assert by_width == sorted(by_width)
    assert by_width[0] < by_width[1] < by_width[2]


def test_full_recompute_is_one_more_forward_of_the_layers():
    w = work(recompute=FULL)
    forward = w.matmul.forward + w.attention.forward + w.elementwise.forward
    assert w.recompute == pytest.approx(forward)
    # Backward is about twice a forward: a third more work in all, never half.
    assert 1.2 < device(w) / device(work()) < 1.4


def test_recompute_order():
    none, some, full = (work(recompute=kind).recompute.item() for kind in (NONE, SELECTIVE, FULL))
    assert none == 0.0
    assert 0.0 < some < full


def test_recompute_leaves_the_rest_alone():
    plain, again = work(), work(recompute=FULL)
    assert seconds(plain.matmul) == seconds(again.matmul)
    assert seconds(plain.head) == seconds(again.head)


def test_fp8_helps_only_devices_that_have_it():
    def gain(cluster):
        return seconds(work(cluster=cluster).matmul) / seconds(work(cluster=cluster, precision=float(FP8)).matmul)

    assert gain("8xH100:1") > 1.3
    assert gain("8xA100:1") == 1.0


def test_fp4_is_no_slower_than_fp8():
    for cluster in ("8xH100:1", "8xB200:1", "8xA100:1"):
        fp4, fp8 = (
            matmul_rates(case(cluster=cluster, precision=float(one)), shipped_physics(), Profile())[0].item()
            for one in (FP4, FP8)
        )
        assert fp4 >= fp8


def test_narrow_formats_leave_attention_and_head_in_16_bit():
    wide, narrow = work(precision=float(BF16)), work(precision=float(FP8))
    assert seconds(wide.attention) == seconds(narrow.attention)
    assert seconds(wide.head) == seconds(narrow.head)
    assert seconds(narrow.elementwise) > seconds(wide.elementwise)  # quantising is work too


def test_fp32_is_slower_and_moves_twice_the_bytes():
    wide, single = work(), work(precision=float(FP32))
    assert seconds(single.matmul) > 1.5 * seconds(wide.matmul)
    assert seconds(single.elementwise) == pytest.approx(2.0 * seconds(wide.elementwise))


def test_attention_grows_with_the_square_of_the_sequence():
    short, long = (work(seq=length, flash=1.0).attention for length in (16384.0, 32768.0))
    assert 3.5 < seconds(long) / seconds(short) < 4.01


def test_fused_attention_beats_unfused():
    assert seconds(work(flash=1.0).attention) < 0.5 * seconds(work(flash=0.0).attention)


def test_head_widths_without_tensor_cores_are_slow_unfused():
    """Attention of 20 heads of 100 (not a multiple of 8) against 16 heads of 128: similar FLOPs, published cliff."""
    odd = work(flash=0.0, heads=20.0, kv_heads=20.0, qk_dim=100.0, v_dim=100.0)
    even = work(flash=0.0, heads=16.0, kv_heads=16.0, qk_dim=128.0, v_dim=128.0)
    assert seconds(odd.attention) > 1.5 * seconds(even.attention)


def test_context_parallelism_splits_the_sequence():
    whole, split = work(seq=131072.0), work(seq=131072.0, cp=8.0)
    assert seconds(split.attention) == pytest.approx(seconds(whole.attention) / 8, rel=0.1)
    assert seconds(split.elementwise) == pytest.approx(seconds(whole.elementwise) / 8)


def test_sequence_parallelism_splits_norms():
    assert seconds(work(tp=8.0, sp=1.0).elementwise) < 0.8 * seconds(work(tp=8.0, sp=0.0).elementwise)


def test_grouped_query_attention_saves_projections_not_scores():
    grouped, full = work(), work(kv_heads=32.0)
    assert seconds(grouped.matmul) < seconds(full.matmul)
    assert seconds(grouped.attention) == seconds(full.attention)


def test_a_gate_is_half_as_much_mlp_again():
    gated, plain = (seconds(work(gated=one).matmul) for one in (1.0, 0.0))
    # Llama-3-8B: three of 3.33 parts of a layer's matmuls are MLP, two when plain.
    assert gated / plain == pytest.approx(218.1 / 159.4, rel=0.05)


def test_experts_cost_what_a_token_touches():
    """Mixtral routes 2 of 8: about two dense MLPs, far from eight."""
    sparse = seconds(work("mixtral-8x7b", micro_batch=8.0, ep=8.0, dp=8.0).matmul)
    dense = seconds(work("mixtral-8x7b", micro_batch=8.0, moe_layers=0.0).matmul)
    assert 1.5 < sparse / dense < 4.0


def test_few_tokens_per_expert_are_slow():
    many, few = (seconds(work("deepseek-v3", seq=length, ep=8.0, dp=8.0).matmul) / length for length in (16384, 512))
    assert few > 1.5 * many


def test_balanced_routing_conserves_tokens():
    cases = case("deepseek-v3", tp=2.0, dp=32.0, ep=64.0)
    # All 64 ranks together process every token of their 32 data ranks topk times.
    assert routed_tokens(cases).item() * 64 == 32 * cases.tokens.item() * 8


def test_latent_attention_is_priced():
    plain = work("deepseek-v3", kv_rank=0.0)
    latent = work("deepseek-v3")
    assert seconds(latent.matmul) != seconds(plain.matmul)
    assert seconds(latent.attention) == seconds(plain.attention)


def test_tensor_parallel_layers_launch_more():
    assert work(tp=2.0).operations > work().operations
    assert work("mixtral-8x7b").operations > work("mistral-7b").operations


def test_a_better_framework_profile_is_faster():
    slow, fast = (compute_seconds(case(), shipped_physics(), Profile(gemm=speed)).matmul for speed in (0.5, 1.0))
    assert seconds(slow) > 1.8 * seconds(fast)


def test_every_part_is_finite_and_positive_for_every_preset():
    for preset in known_presets():
        w = work(preset)
        for part in (w.matmul, w.attention, w.elementwise, w.head):
            assert np.isfinite(seconds(part))
            assert part.forward > 0
            assert part.backward > part.forward
