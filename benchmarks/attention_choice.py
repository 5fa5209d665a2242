"""Attention kernels on this GPU: torch's own choice before and after `sdpa_kernel`, and each kernel's time and error.

    python benchmarks/attention_choice.py

The sizes are those of a Llama 3 8B layer at 32,768 tokens; torch's own choice is shown at 4,096.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.train.kernels.attention import (
    CORES,
    ERROR_BOUND,
    AttentionSizes,
    is_right,
    largest_error,
    make_inputs,
    measure_attention,
)

NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
SIZES = AttentionSizes(batch=1, sequence=32768, heads=32, kv_heads=8, head=128)
SMALL = AttentionSizes(batch=2, sequence=1024, heads=8, kv_heads=2, head=128)


def order() -> str:
    return " ".join(NAMES.get(int(backend), str(backend)) for backend in torch._C._get_sdp_priority_order())


def choice(query: torch.Tensor, key: torch.Tensor) -> str:
    return NAMES.get(int(torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)), "?")


def compiled_choice(query: torch.Tensor, key: torch.Tensor) -> str:
    """The kernel that a newly compiled function runs."""
    torch._dynamo.reset()
    run = torch.compile(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(query, key)
        torch.cuda.synchronize()
    kernels = max(profile.key_averages(), key=lambda event: event.self_device_time_total).key
    return "cudnn" if "cudnn" in kernels else "flash" if "flash" in kernels else kernels[:60]


def show_state() -> None:
    query = torch.randn(1, 4096, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    key = torch.randn(1, 4096, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    def show(when: str) -> None:
        print(f"{when:38} order: {order():42} eager: {choice(query, key):8} compiled: {compiled_choice(query, key)}")

    print(f"{'before any call':38} order: {order()}")
    show("first call")
    show("second call")
    wanted = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(wanted, set_priority=True):
        show("inside sdpa_kernel(cudnn first)")
    show("after sdpa_kernel")


def show_kernels(device: torch.device) -> None:
    dtype = torch.bfloat16
    bound = ERROR_BOUND * torch.finfo(dtype).eps
    for name, core in CORES.items():
        error = largest_error(core, make_inputs(SMALL, dtype, device, 0))
        print(f"{name:10} right: {is_right(core, SIZES, dtype, device)}, error {error:.5f} of {bound:.5f} allowed")
    for name, timing in measure_attention(SIZES, dtype, device).items():
        print(f"{name:10} forward and backward {timing.median_ms:.2f} ± {timing.spread_ms:.2f} ms")


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
    show_state()
    show_kernels(torch.device("cuda"))


if __name__ == "__main__":
    main()
