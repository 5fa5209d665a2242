"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): gradient matrices travel as two thin factors, with error feedback.

torch's own hook waits inside callbacks and deadlocks gloo with two buckets; here both sums of a bucket are blocking and
in the caller's order. The error kept is each rank's own: M - P (Mᵀ P)ᵀ. These add up over the ranks to exactly what the
summed gradient lost, so nothing is lost for good.

n rows, m columns, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.train.parallel import exchanges

SEED = 20190531  # of the first factors, the same on every rank; the date of the paper


class PowerSgd:
    """Matrices as factors of rank r; vectors, stacks and matrices too small to gain travel whole."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shapes: dict[int, tuple[torch.Size, ...]] = {}
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self.bytes_sent = 0
        self.bytes_raw = 0
        self.is_off = False

    def prepare(self, key: int, shapes: Sequence[torch.Size]) -> None:
        """Say which tensors lie in a bucket, in order."""
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
        thin = {f"{key}/{i}": part for i, part in enumerate(parts) if saves_bytes(part.shape, self._rank)}
        whole = [part for part in parts if not saves_bytes(part.shape, self._rank)]
        matrices = {name: self._with_error(name, part) for name, part in thin.items()}
        left = {name: m_nm @ self._last_factor(name, m_nm) for name, m_nm in matrices.items()}
        self._sum_tensors([*left.values(), *whole], group)
        left = {name: torch.linalg.qr(p_nr).Q for name, p_nr in left.items()}
        right = {name: m_nm.mT @ left[name] for name, m_nm in matrices.items()}
        for name, m_nm in matrices.items():
            self._errors[name] = (m_nm - left[name] @ right[name].mT).nan_to_num_(0.0, 0.0, 0.0)
        self._sum_tensors(list(right.values()), group)
        for name, part in thin.items():
            part.copy_(left[name] @ right[name].mT)
            q_mr = right[name]
            # Unit columns: products of small gradients would underflow. Not after a step that was not finite.
            tiny = torch.finfo(q_mr.dtype).tiny
            unit = q_mr / q_mr.norm(dim=0, keepdim=True).clamp_min(tiny)
            self._factors[name] = torch.where(q_mr.isfinite().all(), unit, self._factors[name])
        self.bytes_raw += ring_bytes(bucket.numel() * bucket.element_size(), group)

    def state(self) -> dict[str, Tensor]:
        """Errors and factors of every matrix."""
        errors = {f"{name}/error": tensor for name, tensor in self._errors.items()}
        return errors | {f"{name}/factor": tensor for name, tensor in self._factors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these errors and factors."""
        for ending, target in (("/error", self._errors), ("/factor", self._factors)):
            target.clear()
            target |= {n.removesuffix(ending): t.clone() for n, t in state.items() if n.endswith(ending)}

    def rescale(self, factor: float) -> None:
        """Bring the errors to the new loss scale; factors have no unit."""
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
        """The right factor of the last step: one power iteration a step is enough when it goes on from there."""
        if name not in self._factors:
            rows, columns = m_nm.shape
            draw = torch.Generator().manual_seed(SEED)
            first = torch.randn(columns, min(self._rank, rows, columns), generator=draw, dtype=m_nm.dtype)
            self._factors[name] = first.to(m_nm.device)
        return self._factors[name]

    def _sum_tensors(self, tensors: list[Tensor], group: ProcessGroup) -> None:
        """Sum a list in place, as one message."""
        if not tensors:
            return
        kind = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = exchanges.all_reduce(torch.cat([one.reshape(-1).to(kind) for one in tensors]), group)
        for one, part in zip(tensors, flat.split_with_sizes([one.numel() for one in tensors]), strict=True):
            one.copy_(part.view_as(one))
        self.bytes_sent += ring_bytes(flat.numel() * flat.element_size(), group)


def saves_bytes(shape: torch.Size, rank: int) -> bool:
    """Whether two factors of rank r are smaller than the matrix: r (n + m) < n m.

    >>> saves_bytes(torch.Size([64, 64]), 4), saves_bytes(torch.Size([8, 8]), 4), saves_bytes(torch.Size([64]), 4)
    (True, False, False)
    """
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def ring_bytes(size: int, group: ProcessGroup) -> int:
    """What each rank sends in a ring all-reduce of `size` bytes: 2 (W - 1) / W of them."""
    return 2 * (group.size() - 1) * size // group.size()
