"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): gradient matrices travel as two thin factors, with error feedback.

torch's own hook waits inside callbacks and deadlocks gloo with two buckets; here both sums of a bucket are blocking
and in the caller's order. Each rank carries its own error, M - P (Mᵀ P)ᵀ. Over the ranks these errors add up to
exactly what the summed gradient lost, so later steps recover it.

n rows, m columns, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.train.parallel import exchanges

# Seed of the first factors, the same on every rank; the date of the paper
SEED = 20190531


class PowerSgd:
    """Codec that sends matrices as factors of rank r; vectors, stacks and small matrices travel uncompressed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shapes: dict[int, tuple[torch.Size, ...]] = {}
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self.bytes_sent = 0
        self.bytes_raw = 0
        self.is_off = False

    def prepare(self, key: int, shapes: Sequence[torch.Size]) -> None:
        """Declare the shapes of the tensors in a bucket, in order."""
        self._shapes[key] = tuple(shapes)

    @torch.no_grad()
    def all_reduce(self, bucket: Tensor, group: ProcessGroup, key: int) -> None:
        """Sum in place; all ranks end with the same bits."""
        if group.size() == 1:
            return
        if self.is_off:
            dist.all_reduce(bucket, group=group)
            return
        parts = self._bucket_parts(bucket, key)
        matrix_parts = {f"{key}/{i}": part for i, part in enumerate(parts) if saves_bytes(part.shape, self._rank)}
        exact_parts = [part for part in parts if not saves_bytes(part.shape, self._rank)]
        matrices = {name: self._with_error(name, part) for name, part in matrix_parts.items()}
        left_factors = {name: m_nm @ self._last_factor(name, m_nm) for name, m_nm in matrices.items()}
        self._sum_tensors([*left_factors.values(), *exact_parts], group)
        left_factors = {name: torch.linalg.qr(p_nr).Q for name, p_nr in left_factors.items()}
        right_factors = {name: m_nm.mT @ left_factors[name] for name, m_nm in matrices.items()}
        for name, m_nm in matrices.items():
            self._errors[name] = (m_nm - left_factors[name] @ right_factors[name].mT).nan_to_num_(0.0, 0.0, 0.0)
        self._sum_tensors(list(right_factors.values()), group)
        for name, part in matrix_parts.items():
            part.copy_(left_factors[name] @ right_factors[name].mT)
            q_mr = right_factors[name]
            # Unit columns, because products of small gradients would underflow; the old factor after a step that is
            # not finite.
            tiny = torch.finfo(q_mr.dtype).tiny
            unit = q_mr / q_mr.norm(dim=0, keepdim=True).clamp_min(tiny)
            self._factors[name] = torch.where(q_mr.isfinite().all(), unit, self._factors[name])
        self.bytes_raw += ring_bytes(bucket.numel() * bucket.element_size(), group)

    def state(self) -> dict[str, Tensor]:
        """Return the errors and factors of every matrix."""
        errors = {f"{name}/error": tensor for name, tensor in self._errors.items()}
        return errors | {f"{name}/factor": tensor for name, tensor in self._factors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore errors and factors."""
        for ending, target in (("/error", self._errors), ("/factor", self._factors)):
            target.clear()
            target |= {
                name.removesuffix(ending): tensor.clone() for name, tensor in state.items() if name.endswith(ending)
            }

    def rescale(self, factor: float) -> None:
        """Multiply the errors by the change of the loss scale; factors have no unit."""
        for error in self._errors.values():
            error.mul_(factor)

    def _bucket_parts(self, bucket: Tensor, key: int) -> list[Tensor]:
        shapes = self._shapes.get(key)
        if shapes is None:
            raise ValueError(f"bucket {key}: call prepare(key, shapes) before its first sum")
        flat = bucket.view(-1).split_with_sizes([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    def _with_error(self, name: str, part: Tensor) -> Tensor:
        error = self._errors.get(name)
        matrix = part.to(torch.promote_types(part.dtype, torch.float32))
        return matrix.clone() if error is None else matrix + error

    def _last_factor(self, name: str, m_nm: Tensor) -> Tensor:
        """Return the right factor of the last step, or a random one.

        Starting from it, one power iteration per step suffices.
        """
        if name not in self._factors:
            rows, columns = m_nm.shape
            generator = torch.Generator().manual_seed(SEED)
            factor = torch.randn(columns, min(self._rank, rows, columns), generator=generator, dtype=m_nm.dtype)
            self._factors[name] = factor.to(m_nm.device)
        return self._factors[name]

    def _sum_tensors(self, tensors: list[Tensor], group: ProcessGroup) -> None:
        """Sum tensors over the group in place, as one message."""
        if not tensors:
            return
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = exchanges.all_reduce(torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]), group)
        for tensor, summed in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
        self.bytes_sent += ring_bytes(flat.numel() * flat.element_size(), group)


def saves_bytes(shape: torch.Size, rank: int) -> bool:
    """Return whether two factors of rank r are smaller than the matrix: r (n + m) < n m.

    >>> saves_bytes(torch.Size([64, 64]), 4), saves_bytes(torch.Size([8, 8]), 4), saves_bytes(torch.Size([64]), 4)
    (True, False, False)
    """
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def ring_bytes(size: int, group: ProcessGroup) -> int:
    """Return the bytes each rank sends in a ring all-reduce of `size` bytes: 2 (W - 1) / W of them."""
    return 2 * (group.size() - 1) * size // group.size()
