"""The kernel of `memory_sums`: sums of 64-bit words of many tensors at once. Imported only where there is a GPU."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

AT_ONCE = 4096  # words that a block of threads loads before it adds: 16 for each of 256 threads


def add_words(addresses: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the words of each chunk to the sum of its row. Addresses are multiples of 16; lengths are in words."""
    if triton is None:
        raise ImportError("triton")
    with torch.cuda.device(sums.device):
        _add_words[(len(rows),)](addresses, lengths, rows, sums, BLOCK=AT_ONCE, num_warps=8)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_words(addresses, lengths, rows, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        chunk = tl.program_id(0)
        words = tl.multiple_of(tl.load(addresses + chunk).to(tl.pointer_type(tl.int64)), 16)
        length = tl.load(lengths + chunk)
        places = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        whole = length // BLOCK * BLOCK  # without a mask a thread loads 16 bytes at once
        for start in range(0, whole, BLOCK):
            total += tl.load(words + start + places)
        last = whole + places
        total += tl.load(words + last, mask=last < length, other=0)
        # Whole numbers: the order in which blocks come to this does not show.
        tl.atomic_add(sums + tl.load(rows + chunk), tl.sum(total, axis=0))
