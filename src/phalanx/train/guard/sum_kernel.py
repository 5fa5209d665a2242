"""The Triton kernel of `memory_sums`: sums of 64-bit words of many tensors at once. Imported only if there is a GPU."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs is installed without Triton
    triton = None

AT_ONCE = 2048  # words that a block of threads loads at once


def add_words(addresses: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the words of each chunk to the sum of its row. Addresses are multiples of 16; lengths are in words."""
    if triton is None:
        raise ImportError("triton")
    with torch.cuda.device(sums.device):
        _add_words[(len(rows),)](addresses, lengths, rows, sums, BLOCK=AT_ONCE)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_words(addresses, lengths, rows, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        chunk = tl.program_id(0)
        words = tl.multiple_of(tl.load(addresses + chunk).to(tl.pointer_type(tl.int64)), 16)
        length = tl.load(lengths + chunk)
        places = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        # Without a mask a thread loads 16 bytes at once.
        full_words = length // BLOCK * BLOCK
        for start in range(0, full_words, BLOCK):
            total += tl.load(words + start + places)
        last = full_words + places
        total += tl.load(words + last, mask=last < length, other=0)
        # Integers: the result does not depend on the order of the blocks.
        tl.atomic_add(sums + tl.load(rows + chunk), tl.sum(total, axis=0))
