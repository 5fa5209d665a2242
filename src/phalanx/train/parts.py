"""A rank's share of a model: its stages built without storage, split, given storage, and filled by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.job.model import ModelShape
from phalanx.plan.schedules import is_v_shaped, my_stages, split_layers
from phalanx.train.models.decoder import TIED, Decoder
from phalanx.train.models.init import draw
from phalanx.train.models.protocol import build_model, build_stage, refuse_layout
from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.parallelize import parallelize
from phalanx.train.parallel.pieces import Piece
from phalanx.train.parallel.place import Box, box_of, expert_cuts
from phalanx.train.parallel.untraced import untraced
from phalanx.train.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One pipeline stage of the model, as this rank holds it."""

    stage: int
    model: Decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A parameter or buffer of a part, with its box of the whole tensor."""

    name: str
    tensor: torch.Tensor  # the parameter itself, perhaps a DTensor
    box: Box
    replicas: int
    owner: bool
    trained: bool

    @property
    def local(self) -> torch.Tensor:
        """Its plain storage on this rank."""
        held = self.tensor
        return held._local_tensor if isinstance(held, DTensor) else held.detach()

    def piece(self, tensor: torch.Tensor) -> Piece:
        """This box with `tensor` as its values."""
        return Piece(
            name=self.name,
            tensor=tensor,
            shape=self.box.shape,
            start=self.box.start,
            replicas=self.replicas,
            owner=self.owner,
            groups=self.box.groups,
        )


def num_stages(settings: Settings) -> int:
    """Pipeline stages of the whole job."""
    return settings.layout.pipeline * max(settings.layout.virtual_pipeline, 1)


def build_parts(shape: ModelShape, settings: Settings, meshes: Meshes, device: torch.device) -> list[Part]:
    """This rank's stages, split over its groups, with storage but without values."""
    layout = settings.layout
    stages = num_stages(settings)
    layers = split_layers(shape.layers, stages, embed_cost=embed_cost(shape), head_cost=head_cost(shape))
    v_shaped = is_v_shaped(layout.schedule, max(layout.virtual_pipeline, 1)) and layout.pipeline > 1
    mine = my_stages(meshes.index("pipeline"), layout.pipeline, max(layout.virtual_pipeline, 1), v_shaped=v_shaped)
    if shape.module:
        with torch.device("meta"):
            refuse_layout(shape, build_model(shape, allow_code=settings.allow_code), layout)
    parts = []
    for stage in mine:
        with untraced():
            with torch.device("meta"):
                model = build_stage(
                    shape,
                    layers=layers[stage],
                    first=stage == 0,
                    last=stage == stages - 1,
                    allow_code=settings.allow_code,
                )
            _cast(model, settings.master_dtype if meshes.dims.zero else settings.compute_dtype)
            parallelize(model, meshes, settings, device)
        model.to_empty(device="cpu" if layout.offload == "parameters" else device)
        assert model.positions is not None
        model.positions = model.positions.to(device)
        _move_buffers(model, device)
        parts.append(Part(stage=stage, model=model))
    return parts


def head_cost(shape: ModelShape) -> float:
    """What the head weighs in layers: its matrix product against a layer's (both twice their parameters per token)."""
    return shape.vocab * shape.hidden / _layer_weights(shape)


def embed_cost(shape: ModelShape) -> float:
    """What the embedding weighs in layers: a lookup costs no arithmetic, but its table is held and updated.

    BLOOM counted its 3.6 B table as one layer of 2.5 B; we count it where it outweighs half a layer.
    """
    return 1.0 if shape.vocab * shape.hidden > 0.5 * _layer_weights(shape) else 0.0


def _layer_weights(shape: ModelShape) -> float:
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    width = shape.expert_ffn * (shape.experts_per_token + shape.shared_experts) if shape.is_moe else shape.ffn
    return attention + (3 if shape.gated else 2) * shape.hidden * width


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: the router's balance bias is a float32 count of sorts."""
    for param in model.parameters():
        param.data = param.data.to(dtype)


def holdings(parts: Sequence[Part], meshes: Meshes, *, tied: bool) -> list[Held]:
    """Every parameter and buffer of this rank's parts, in the order of the model."""
    return [held for part in parts for held in _part_holdings(part, meshes, tied=tied)]


def _part_holdings(part: Part, meshes: Meshes, *, tied: bool) -> Iterator[Held]:
    experts = expert_cuts(part.model)
    ends = {part.model.embed is not None, part.model.head is not None}
    twice = tied and ends == {True, False}  # the other copy of the tied table stands on another stage
    named: list[tuple[str, torch.Tensor, bool]] = [(n, p, True) for n, p in part.model.named_parameters()]
    named += [(name, buffer, False) for name, buffer in _kept_buffers(part.model)]
    for name, tensor, trained in named:
        cut = experts.get(id(tensor))
        box = box_of(tensor, (cut,) if cut else ())
        copy = twice and name in TIED
        yield Held(
            name=TIED[0] if copy else name,
            tensor=tensor,
            box=box,
            replicas=meshes.dims.stage // box.parts * (2 if copy else 1),
            owner=_is_first(box, meshes) and not (copy and name == TIED[1]),
            trained=trained,
        )


def _is_first(box: Box, meshes: Meshes) -> bool:
    """Whether this rank has place 0 on every axis of its stage that does not cut the tensor."""
    cutting = {id(cut.group) for cut in box.cuts}
    whole_experts = meshes.experts is not None and id(meshes.experts.get_group("expert")) in cutting
    mesh = meshes.experts if whole_experts and meshes.experts is not None else meshes.dense
    axes = [axis for axis in mesh.mesh_dim_names or () if axis != "pipeline"]
    return all(mesh.get_local_rank(a) == 0 or id(mesh.get_group(a)) in cutting for a in axes)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers stand where the activations are, also when the parameters are kept in host memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the model's state."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@torch.no_grad()
def fill(pieces: Sequence[Piece], *, seed: int, layers: int) -> None:
    """Give every weight its first value, drawn by name, so that all layouts start from the same model."""
    for piece in pieces:
        size = tuple(piece.tensor.shape)
        rows = range(piece.start[0], piece.start[0] + size[0])
        drawn = draw(piece.name, piece.shape, seed=seed, layers=layers, dtype=torch.float32, rows=rows)
        for dim in range(1, len(size)):
            drawn = drawn.narrow(dim, piece.start[dim], size[dim])
        piece.tensor.copy_(drawn)
