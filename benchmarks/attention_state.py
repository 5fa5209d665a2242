"""The state that decides torch's attention kernel: its priority order and choice, before and after `sdpa_kernel`.

python benchmarks/attention_state.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def order() -> str:
    return " ".join(NAMES.get(int(one), str(one)) for one in torch._C._get_sdp_priority_order())


def choice(query: torch.Tensor, key: torch.Tensor) -> str:
    return NAMES.get(int(torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)), "?")


def compiled_choice(query: torch.Tensor, key: torch.Tensor) -> str:
    """The kernel that a newly compiled function runs."""
    torch._dynamo.reset()
    run = torch.compile(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(query, key)
        torch.cuda.synchronize()
    kernels = max(profile.key_averages(), key=lambda one: one.self_device_time_total).key
    return "cudnn" if "cudnn" in kernels else "flash" if "flash" in kernels else kernels[:60]


def main() -> None:
    query = torch.randn(1, 4096, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    key = torch.randn(1, 4096, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    def show(when: str) -> None:
        print(f"{when:38} order: {order():42} eager: {choice(query, key):8} compiled: {compiled_choice(query, key)}")

    print(torch.__version__, torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
    print(f"{'before any call':38} order: {order()}")
    show("first call")
    show("second call")
    wanted = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(wanted, set_priority=True):
        show("inside sdpa_kernel(cudnn first)")
    show("after sdpa_kernel")


if __name__ == "__main__":
    main()
