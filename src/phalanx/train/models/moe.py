"""Mixture of experts: a router, experts that drop no token, a shared expert, and two ways to keep the load even.

B batch, S sequence, D model, F expert width, E experts, K experts per token, T = B · S tokens, M = T · K visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.job.model import ModelShape
from phalanx.train.kernels.moe_permute import permute_rows, repeat_tokens, weigh_answers
from phalanx.train.models.layers import ACTIVATIONS, Mlp

Dispatch = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]


class Router(nn.Module):
    """Scores every expert for every token and chooses the best few. `bias` is moved by balance, not by gradient."""

    bias: Tensor | None

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.register_buffer("bias", torch.zeros(shape.experts, dtype=torch.float32) if shape.router_bias else None)
        self.num_chosen = shape.experts_per_token
        self.score = shape.router_score
        self.renormalise = shape.renormalise
        self.scale = shape.routed_scale

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """scores_TE, choice_TK and weight_TK, in float32 or wider: a coarser score would choose other experts."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        scores_TE = logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=-1)
        ranked_TE = scores_TE.detach() if self.bias is None else scores_TE.detach() + self.bias
        choice_TK = ranked_TE.topk(self.num_chosen, dim=-1).indices
        weight_TK = scores_TE.gather(-1, choice_TK)
        if self.renormalise:
            # 1e-20 as in DeepSeek-V3's code: sigmoids of all chosen experts may underflow together.
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return scores_TE, choice_TK, weight_TK * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.bias is not None and self.bias.dtype != torch.float32:
            # A step of 0.001 is lost on a bfloat16 bias near 0.5, whose spacing is 0.004.
            self.bias = before.to(self.bias.device)
        return self


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner = (shape.experts, shape.expert_ffn, shape.hidden)
        self.gate = nn.Parameter(torch.empty(inner)) if shape.gated else None
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_ffn))
        self.act = ACTIVATIONS[shape.activation]
        # Where kernels were chosen: gather_rows and combine_rows of kernels/moe_permute.py.
        self.gather_kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        self.combine_kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def gather_visits(self, x_TD: Tensor, order_M: Tensor, back_TK: Tensor) -> Tensor:
        """A row for every visit, sorted by expert."""
        if self.gather_kernel is not None:
            return self.gather_kernel(x_TD, back_TK)
        return permute_rows(repeat_tokens(x_TD, back_TK.shape[1]), order_M, back_TK.flatten())

    def combine_answers(self, y_MD: Tensor, order_M: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted answers of each token, added up."""
        if self.combine_kernel is not None:
            return self.combine_kernel(y_MD, back_TK, weight_TK)
        return weigh_answers(permute_rows(y_MD, back_TK.flatten(), order_M), weight_TK)

    def forward(self, x_MD: Tensor, counts_E: Tensor | Sequence[int]) -> Tensor:
        """Each run of rows through its expert; rows are sorted by expert, `counts_E` says how many each has."""
        if x_MD.is_cuda and self._fits_grouped(x_MD) and isinstance(counts_E, Tensor):
            return self.run_grouped(x_MD, counts_E)
        counts = counts_E.tolist() if isinstance(counts_E, Tensor) else list(counts_E)
        parts = [self._run_expert(expert, rows) for expert, rows in enumerate(torch.split(x_MD, counts))]
        return torch.cat(parts)

    def _run_expert(self, expert: int, x_MD: Tensor) -> Tensor:
        up_MF = F.linear(x_MD, self.up[expert])
        inner_MF = self.act(up_MF) if self.gate is None else self.act(F.linear(x_MD, self.gate[expert])) * up_MF
        return F.linear(inner_MF, self.down[expert])

    def _fits_grouped(self, x_MD: Tensor) -> bool:
        """The kernel wants bfloat16 and rows that are whole 16-byte units."""
        widths = (self.up.shape[1], self.up.shape[2])
        return x_MD.dtype is torch.bfloat16 and not any(width % 8 for width in widths)

    def run_grouped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """All experts in one kernel, without waiting for the counts to reach the host."""
        ends_E = counts_E.cumsum(0).to(torch.int32)

        def multiply(rows: Tensor, weight: Tensor) -> Tensor:
            product: Tensor = F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends_E)
            return product

        up_MF = multiply(x_MD, self.up)
        inner_MF = self.act(up_MF) if self.gate is None else self.act(multiply(x_MD, self.gate)) * up_MF
        return multiply(inner_MF, self.down)


class Moe(nn.Module):
    """Router, experts and shared expert in the place of an MLP.

    `dispatch` brings tokens to experts and back; expert parallelism replaces it. `counts_E` are the tokens of each
    expert since the last `update_bias`. `real_B`, where it is set, is 0 for sequences that only fill a micro-batch up:
    they neither count nor weigh. `aux_scale` is what one sequence's auxiliary loss weighs in the total (the engine sets
    1 / sequences of the global batch, times its loss scale); `sum_over_sequence` adds up tensors of the ranks that
    share a sequence.
    """

    counts_E: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        width = shape.shared_experts * shape.expert_ffn
        self.shared = (
            Mlp(shape.hidden, width, gated=shape.gated, bias=False, activation=shape.activation) if width else None
        )
        self.register_buffer("counts_E", torch.zeros(shape.experts, dtype=torch.int64), persistent=False)
        self.balance = shape.balance
        self.balance_rate = shape.balance_rate
        self.aux_scale = 0.0
        self.real_B: Tensor | None = None
        self.dispatch: Dispatch = run_locally
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _keep_local

    def forward(self, x_BSD: Tensor) -> Tensor:
        """What the chosen experts and the shared one make of every token."""
        x_TD = x_BSD.flatten(0, 1)
        scores_TE, choice_TK, weight_TK = self.router(x_TD)
        self._count_tokens(choice_TK.view(len(x_BSD), -1))
        y_BSD = self.dispatch(self.experts, x_TD, choice_TK, weight_TK).view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        if self.balance == "aux" and self.aux_scale:
            loss_B = self._aux_loss(scores_TE.view(*x_BSD.shape[:2], -1), choice_TK.view(*x_BSD.shape[:2], -1))
            y_BSD = _WithLoss.apply(y_BSD, loss_B, self.aux_scale, self.real_B)  # type: ignore[no-untyped-call]
        return y_BSD

    def _count_tokens(self, choice_BM: Tensor) -> None:
        """Once per token that is learned from: not in evaluation, nor when a block is computed again in backward."""
        if torch.is_grad_enabled():
            times_BM = None if self.real_B is None else self.real_B[:, None].expand_as(choice_BM)
            if torch.compiler.is_compiling():
                torch.ops.phalanx.count_tokens_(self.counts_E, choice_BM, times_BM)
            else:
                _count_tokens(self.counts_E, choice_BM, times_BM)

    def _aux_loss(self, scores_BSE: Tensor, choice_BSK: Tensor) -> Tensor:
        """DeepSeek-V3's sequence-wise balance loss, arXiv:2412.19437 eq. 17-20, of each sequence.

        Per sequence, so that it is the same however the batch is split. A rank that holds a part of a sequence gets
        its part of the sum.
        """
        experts, chosen = scores_BSE.shape[-1], choice_BSK.shape[-1]
        visits_BE = torch.zeros(len(choice_BSK), experts, dtype=scores_BSE.dtype, device=scores_BSE.device)
        ones = torch.ones_like(choice_BSK, dtype=scores_BSE.dtype).flatten(1)
        visits_BE = self.sum_over_sequence(visits_BE.scatter_add_(1, choice_BSK.flatten(1), ones))
        tokens_B1 = visits_BE.sum(dim=-1, keepdim=True) / chosen
        share_BE = (scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)).sum(dim=1) / tokens_B1
        return self.balance_rate * (visits_BE * (experts / chosen) / tokens_B1 * share_BE).sum(dim=-1)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """After a step: experts with fewer than their share of `counts_E` (of all ranks) become likelier.

        arXiv:2408.15664. Starts the count again, also for models balanced otherwise.
        """
        if self.balance == "bias" and self.router.bias is not None:
            load_E = counts_E.to(torch.float32)
            self.router.bias += self.balance_rate * torch.sign(load_E.mean() - load_E)
        self.counts_E.zero_()


def _count_tokens(counts_E: Tensor, choice_BM: Tensor, times_BM: Tensor | None) -> None:
    again = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks it
    if not again:
        counts_E += count_visits(choice_BM, len(counts_E), times_BM)


# An operator in compiled code. The compiler cannot ask whether a block is computed again: it would end its graph there,
# and compile every block in parts.
torch.library.define("phalanx::count_tokens_", "(Tensor(a!) counts, Tensor choice, Tensor? times) -> ()")
torch.library.impl("phalanx::count_tokens_", ("cpu", "cuda"), _count_tokens)
torch.library.register_fake("phalanx::count_tokens_", lambda counts_E, choice_BM, times_BM: None)


def run_locally(experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """All experts are here: sort the visits by expert, run them, and add up each token's weighted answers."""
    order_M, back_TK = sort_visits(choice_TK, len(experts.up))
    y_MD = experts(experts.gather_visits(x_TD, order_M, back_TK), count_visits(choice_TK, len(experts.up)))
    return experts.combine_answers(y_MD, order_M, back_TK, weight_TK)


def run_evenly(experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """For dry runs on tensors without values: the same work, as if every expert had been chosen equally often."""
    x_MD = repeat_tokens(x_TD, choice_TK.shape[1])
    each, rest = divmod(len(x_MD), len(experts.up))
    counts_E = [each + (expert < rest) for expert in range(len(experts.up))]
    return weigh_answers(experts(x_MD, counts_E), weight_TK)


def sort_visits(choice_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Visits in the order of their experts, those of earlier tokens first; and where each visit then stands."""
    # A GPU sorts by digits: 2 bytes take a quarter of the passes of 8. Places are all different, so no order of writing
    # them gives others.
    keys_M = choice_TK.flatten().to(torch.int16 if experts < 2**15 else torch.int64)
    order_M = keys_M.argsort(stable=True)
    back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    return order_M, back_M.view_as(choice_TK)


def count_visits(choice: Tensor, experts: int, times: Tensor | None = None) -> Tensor:
    """How often each expert was chosen, a choice counting `times` times; unlike bincount, of a size known without
    values."""
    flat = choice.flatten()
    zeros = torch.zeros(experts, dtype=torch.int64, device=choice.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat) if times is None else times.flatten())


class _WithLoss(torch.autograd.Function):
    """The activations unchanged; in backward each sequence's side loss receives `scale` as its gradient, if it counts.

    What is remembered is of the first forward: when a block is computed again, `real_B` is another micro-batch's.
    """

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, loss_B: Tensor, scale: float, real_B: Tensor | None) -> Tensor:
        ctx.grad_B = torch.full_like(loss_B, scale) if real_B is None else real_B.to(loss_B.dtype) * scale
        return x_BSD.view_as(x_BSD)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad_BSD, ctx.grad_B, None, None


def _keep_local(tensor: Tensor) -> Tensor:
    return tensor
