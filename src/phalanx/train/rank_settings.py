"""Settings: the layout and everything else a rank needs to build its part of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from phalanx.errors import Problem, UserError
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job, Scale
from phalanx.plan.layout import Layout
from phalanx.plan.lean_step import drops_logits, drops_product
from phalanx.plan.trainable import Demand, layout_problems, precision_problems, splits_backward

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # operations other than matrix products stay in bf16
    "fp64": torch.float64,  # for proofs: `phalanx verify` and the parity tests
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The layout, with everything else that changes how a step is computed."""

    layout: Layout
    sequence: int
    compute: str = "fp32"
    # Also the output head's products, if its loss is computed in parts of the tokens.
    fp8_head: bool = False
    reduce: str = "fp32"
    master: str = "fp32"
    context_kind: str = "ring"
    loss_parallel: bool = True
    recompute_layers: int | None = None  # layers of each stage that are recomputed; None: all
    compile: bool = False
    compile_backend: str = "inductor"  # tests use "aot_eager": the same graphs without a compiler
    lean: bool | None = None  # never store large logits and MLP products whole; None: on GPUs
    reproducible: bool = False
    seed: int = 0
    bucket_mib: float | None = None  # gradients that are summed together; None: chosen by the trainer
    fixed_loss_scale: float | None = None  # in fp16; None: adapted while training
    allow_code: bool = False  # True if code that the job names may be run
    loss: str = ""  # reference of the user's own loss
    optimizer: str = ""  # reference of the user's own optimizer
    order: tuple[str, ...] = ()  # actions of each pipeline rank; empty: the layout's schedule
    scale: Scale = field(default_factory=Scale)  # how first values and updates follow the model's size

    @classmethod
    def of(cls, job: Job, layout: Layout, *, on_gpu: bool, allow_code: bool = False) -> Settings:
        """Return the settings of a planned job."""
        if problems := precision_problems(job):
            raise UserError(problems)
        reduced = job.precision.compute not in ("fp32", "fp64")
        return cls(
            layout=layout,
            sequence=job.data.sequence,
            compute=job.precision.compute,
            fp8_head=job.precision.fp8_head,
            reduce=job.precision.grad_reduce if reduced else "fp32",
            master="fp32" if job.precision.master_weights or not reduced else "bf16",
            context_kind=job.parallel.context_kind,
            loss_parallel=job.parallel.loss_parallel,
            recompute_layers=None if job.parallel.recompute_layers == "auto" else int(job.parallel.recompute_layers),
            # torch runs both halves of a compiled block's backward at once: a schedule that splits it would run it
            # twice, and fails where the block comes from the compile cache (donated buffers).
            compile=(on_gpu if job.train.compile == "auto" else bool(job.train.compile))
            and not splits_backward(layout),
            lean=on_gpu if job.train.lean == "auto" else bool(job.train.lean),
            reproducible=job.numerics.reproducible,
            seed=job.data.seed,
            bucket_mib=None if isinstance(job.comm.bucket_mib, str) else job.comm.bucket_mib,
            fixed_loss_scale=None if isinstance(job.precision.loss_scale, str) else job.precision.loss_scale,
            allow_code=allow_code,
            loss=job.plugins.loss,
            optimizer=job.plugins.optimizer,
            order=job.parallel.order,
            scale=job.scale,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations, and of the weights as they are used."""
        return DTYPES[self.compute]

    def chunks_loss(self, shape: ModelShape, device: torch.device) -> bool:
        """Return True if the loss and the logits' gradients are computed for a part of the tokens at a time."""
        layout = self.layout
        tokens = layout.micro_batch * self.sequence // layout.context
        is_possible = bool(drops_logits(tokens, shape.vocab, tensor=layout.tensor, pipeline=layout.pipeline))
        return self._is_lean(device) and is_possible and not self.loss and not shape.module

    def drops_product(self, shape: ModelShape, device: torch.device) -> bool:
        """Return True if backward computes the product of a gated MLP again instead of storing it."""
        layout = self.layout
        tokens = layout.micro_batch * self.sequence // layout.context
        splits = splits_backward(layout)
        is_possible = bool(drops_product(tokens, shape.ffn, tensor=layout.tensor, splits_backward=splits))
        is_plain = self.compute != "fp8" and layout.recompute == "none" and not shape.is_moe and not shape.module
        return self._is_lean(device) and is_possible and is_plain and shape.gated and shape.activation == "silu"

    def _is_lean(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.lean is None else self.lean

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of gradients while they are summed."""
        return DTYPES[self.reduce]

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the weights that the optimizer updates."""
        return DTYPES[self.master]


def check_layout(shape: ModelShape, settings: Settings) -> list[Problem]:
    """Return every reason why the trainer cannot run this layout of this model; empty if it can."""
    demand = Demand(
        layout=settings.layout,
        sequence=settings.sequence,
        compute=settings.compute,
        context_kind=settings.context_kind,
        reproducible=settings.reproducible,
    )
    return layout_problems(shape, demand)


def refuse_layout(shape: ModelShape, settings: Settings) -> None:
    """Raise UserError with every problem that `check_layout` finds."""
    if problems := check_layout(shape, settings):
        raise UserError(problems)
