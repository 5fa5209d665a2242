"""Mixture of experts: a router, experts that drop no token, a shared expert, and two ways to balance the load.

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
    """Scores every expert for every token and chooses the best `num_chosen`.

    `bias`, which load balancing updates without gradients, affects the choice but not the weights.
    """

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
        """Return scores_TE, choice_TK and weight_TK, in float32 or wider: coarser scores would choose other experts."""
        score_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(score_dtype), self.weight.to(score_dtype))
        scores_TE = logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=-1)
        ranked_TE = scores_TE.detach() if self.bias is None else scores_TE.detach() + self.bias
        choice_TK = ranked_TE.topk(self.num_chosen, dim=-1).indices
        weight_TK = scores_TE.gather(-1, choice_TK)
        if self.renormalise:
            # 1e-20 as in DeepSeek-V3's code: sigmoids of all chosen experts may underflow together.
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return scores_TE, choice_TK, weight_TK * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias_before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias_before is not None and self.bias is not None and self.bias.dtype != torch.float32:
            # A step of 0.001 is lost on a bfloat16 bias near 0.5, whose spacing is 0.004.
            self.bias = bias_before.to(self.bias.device)
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
        # The selected kernels, if any: gather_rows and combine_rows of kernels/moe_permute.py.
        self.gather_kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        self.combine_kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def gather_visits(self, x_TD: Tensor, order_M: Tensor, back_TK: Tensor) -> Tensor:
        """Return a row for every visit, sorted by expert."""
        if self.gather_kernel is not None:
            return self.gather_kernel(x_TD, back_TK)
        return permute_rows(repeat_tokens(x_TD, back_TK.shape[1]), order_M, back_TK.flatten())

    def combine_answers(self, y_MD: Tensor, order_M: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert outputs."""
        if self.combine_kernel is not None:
            return self.combine_kernel(y_MD, back_TK, weight_TK)
        return weigh_answers(permute_rows(y_MD, back_TK.flatten(), order_M), weight_TK)

    def forward(self, x_MD: Tensor, counts_E: Tensor | Sequence[int]) -> Tensor:
        """Run each group of rows through its expert; rows are sorted by expert, `counts_E` are the rows per expert."""
        if x_MD.is_cuda and self._fits_grouped(x_MD) and isinstance(counts_E, Tensor):
            return self.run_grouped(x_MD, counts_E)
        counts = counts_E.tolist() if isinstance(counts_E, Tensor) else list(counts_E)
        outputs = [self._run_expert(expert, rows) for expert, rows in enumerate(torch.split(x_MD, counts))]
        return torch.cat(outputs)

    def _run_expert(self, expert: int, x_MD: Tensor) -> Tensor:
        up_MF = F.linear(x_MD, self.up[expert])
        inner_MF = self.act(up_MF) if self.gate is None else self.act(F.linear(x_MD, self.gate[expert])) * up_MF
        return F.linear(inner_MF, self.down[expert])

    def _fits_grouped(self, x_MD: Tensor) -> bool:
        """Return whether the grouped kernel applies: it requires bfloat16 and rows of whole 16-byte units."""
        widths = (self.up.shape[1], self.up.shape[2])
        return x_MD.dtype is torch.bfloat16 and not any(width % 8 for width in widths)

    def run_grouped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Run all experts in one kernel, without waiting for the counts to reach the host."""
        ends_E = counts_E.cumsum(0).to(torch.int32)

        def multiply(rows: Tensor, weight: Tensor) -> Tensor:
            product: Tensor = F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends_E)
            return product

        up_MF = multiply(x_MD, self.up)
        inner_MF = self.act(up_MF) if self.gate is None else self.act(multiply(x_MD, self.gate)) * up_MF
        return multiply(inner_MF, self.down)


class Moe(nn.Module):
    """Router, experts and shared expert in place of an MLP.

    Attributes:
        dispatch: Brings tokens to experts and back; expert parallelism replaces it.
        counts_E: Tokens of each expert since the last `update_bias`.
        real_B: If set, 0 for padding sequences of a micro-batch: they neither count nor contribute to the loss.
        aux_scale: Weight of one sequence's auxiliary loss in the total; the engine sets it to its loss scale divided by
            the sequences of the global batch.
        sum_over_sequence: Sums a tensor over the ranks that share a sequence.
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
        """Return the output of the chosen experts and the shared one for every token."""
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
        """Count the visits of tokens in training: not in evaluation, nor when a block is recomputed in backward."""
        if torch.is_grad_enabled():
            times_BM = None if self.real_B is None else self.real_B[:, None].expand_as(choice_BM)
            if torch.compiler.is_compiling():
                torch.ops.phalanx.count_tokens_(self.counts_E, choice_BM, times_BM)
            else:
                _count_tokens(self.counts_E, choice_BM, times_BM)

    def _aux_loss(self, scores_BSE: Tensor, choice_BSK: Tensor) -> Tensor:
        """Return DeepSeek-V3's sequence-wise balance loss, arXiv:2412.19437 eq. 17-20, of each sequence.

        It is per sequence, so that it does not depend on how the batch is split. A rank that holds a part of a
        sequence gets its part of the sum.
        """
        experts, chosen_per_token = scores_BSE.shape[-1], choice_BSK.shape[-1]
        visits_BE = torch.zeros(len(choice_BSK), experts, dtype=scores_BSE.dtype, device=scores_BSE.device)
        ones = torch.ones_like(choice_BSK, dtype=scores_BSE.dtype).flatten(1)
        visits_BE = self.sum_over_sequence(visits_BE.scatter_add_(1, choice_BSK.flatten(1), ones))
        tokens_B1 = visits_BE.sum(dim=-1, keepdim=True) / chosen_per_token
        share_BE = (scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)).sum(dim=1) / tokens_B1
        return self.balance_rate * (visits_BE * (experts / chosen_per_token) / tokens_B1 * share_BE).sum(dim=-1)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """After a step, raise the bias of experts with less than the mean of `counts_E`, and lower the others'.

        `counts_E` are of all ranks. arXiv:2408.15664. Also resets the counts, whichever balancing the model uses.
        """
        if self.balance == "bias" and self.router.bias is not None:
            load_E = counts_E.to(torch.float32)
            self.router.bias += self.balance_rate * torch.sign(load_E.mean() - load_E)
        self.counts_E.zero_()


def _count_tokens(counts_E: Tensor, choice_BM: Tensor, times_BM: Tensor | None) -> None:
    # The same test as in torch.utils.checkpoint
    is_recompute = torch._C._current_graph_task_id() != -1
    if not is_recompute:
        counts_E += count_visits(choice_BM, len(counts_E), times_BM)


# An operator, because the compiler cannot trace the test for recomputation: it would break the graph there and
# compile every block in parts.
torch.library.define("phalanx::count_tokens_", "(Tensor(a!) counts, Tensor choice, Tensor? times) -> ()")
torch.library.impl("phalanx::count_tokens_", ("cpu", "cuda"), _count_tokens)
torch.library.register_fake("phalanx::count_tokens_", lambda counts_E, choice_BM, times_BM: None)


def run_locally(experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Run all experts on this rank: sort the visits by expert, run them, and sum each token's weighted outputs."""
    order_M, back_TK = sort_visits(choice_TK, len(experts.up))
    y_MD = experts(experts.gather_visits(x_TD, order_M, back_TK), count_visits(choice_TK, len(experts.up)))
    return experts.combine_answers(y_MD, order_M, back_TK, weight_TK)


def run_evenly(experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """For dry runs on tensors without values: do the same work as if every expert were chosen equally often."""
    x_MD = repeat_tokens(x_TD, choice_TK.shape[1])
    base, remainder = divmod(len(x_MD), len(experts.up))
    counts_E = [base + (expert < remainder) for expert in range(len(experts.up))]
    return weigh_answers(experts(x_MD, counts_E), weight_TK)


def sort_visits(choice_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of visits by expert, earlier tokens first, and each visit's place in that order."""
    # A GPU sorts by digits: 2-byte keys take a quarter of the passes of 8-byte ones. All places differ, so the
    # scatter's order of writing does not matter.
    keys_M = choice_TK.flatten().to(torch.int16 if experts < 2**15 else torch.int64)
    order_M = keys_M.argsort(stable=True)
    back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    return order_M, back_M.view_as(choice_TK)


def count_visits(choice: Tensor, experts: int, times: Tensor | None = None) -> Tensor:
    """Count how often each expert was chosen, each choice `times` times.

    Unlike bincount, with a size known in advance.
    """
    flat = choice.flatten()
    zeros = torch.zeros(experts, dtype=torch.int64, device=choice.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat) if times is None else times.flatten())


class _WithLoss(torch.autograd.Function):
    """Passes activations unchanged.

    In backward each sequence's auxiliary loss gets `scale` as its gradient, if it counts. Only the first forward's
    `real_B` is used: when a block is recomputed, the module holds another micro-batch's.
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
