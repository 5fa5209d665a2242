"""A rank's pipeline stages: built without storage, split over its groups, then given storage and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.job.model import ModelShape
from phalanx.plan.parametrization import ParameterScales, standard_scales
from phalanx.plan.schedules import is_v_shaped, layers_of_stages, my_stages
from phalanx.train.models.decoder import TIED, Decoder
from phalanx.train.models.initial_values import draw_values
from phalanx.train.models.own_model import OwnStage, build_outline, build_stage, refuse_network
from phalanx.train.parallel.dims import Meshes, without_tracing
from phalanx.train.parallel.parallelize import parallelize
from phalanx.train.parallel.tensor_shard import ShardRegion, TensorShard, expert_splits, region_of
from phalanx.train.rank_settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelStage:
    """One pipeline stage of the model, as this rank holds it."""

    stage: int
    layers: range  # of the whole model
    model: Decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTensor:
    """A parameter or buffer of a stage, with the box of the whole tensor that this rank holds."""

    name: str
    tensor: torch.Tensor  # the parameter itself, perhaps a DTensor
    box: ShardRegion
    replicas: int
    owner: bool
    is_parameter: bool
    trained: bool  # updated by gradients: neither a buffer nor a frozen parameter
    moves: bool  # forward may change it: a buffer of the user's own network

    @property
    def local(self) -> torch.Tensor:
        """The plain tensor that this rank stores."""
        tensor = self.tensor
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()

    def shard(self, tensor: torch.Tensor) -> TensorShard:
        """Return this box as a TensorShard with `tensor` as its values."""
        return TensorShard(
            name=self.name,
            tensor=tensor,
            shape=self.box.shape,
            start=self.box.start,
            replicas=self.replicas,
            owner=self.owner,
            groups=self.box.groups,
            moves=self.moves,
        )


def num_stages(settings: Settings) -> int:
    """Return the number of pipeline stages of the whole job."""
    return settings.layout.pipeline * max(settings.layout.virtual_pipeline, 1)


def build_stages(shape: ModelShape, settings: Settings, meshes: Meshes, device: torch.device) -> list[ModelStage]:
    """Build this rank's stages, split over its groups, with storage but without values."""
    layout = settings.layout
    stages = num_stages(settings)
    layers = layers_of_stages(shape.layers, stages, embed_cost=embed_cost(shape), head_cost=head_cost(shape))
    v_shaped = is_v_shaped(layout.schedule, max(layout.virtual_pipeline, 1)) and layout.pipeline > 1
    own_stages = my_stages(
        meshes.index("pipeline"), layout.pipeline, max(layout.virtual_pipeline, 1), v_shaped=v_shaped
    )
    outline = None
    if shape.module:
        with without_tracing():
            outline = build_outline(shape, allow_code=settings.allow_code, seed=settings.seed)
        refuse_network(shape, outline, layout, compute=settings.compute, reproducible=settings.reproducible)
    built = []
    for stage in own_stages:
        with without_tracing():
            model = build_stage(
                shape,
                layers=layers[stage],
                first=stage == 0,
                last=stage == stages - 1,
                allow_code=settings.allow_code,
                whole=outline,
            )
            dtype = settings.master_dtype if meshes.dims.zero else settings.compute_dtype
            # Not buffers: the router's balance bias must stay float32.
            for param in model.parameters():
                param.data = param.data.to(dtype)
            _widen_buffers(model, settings.compute_dtype)
            parallelize(model, meshes, settings, device)
        model.to_empty(device="cpu" if layout.offload == "parameters" else device)
        assert model.positions is not None
        model.positions = model.positions.to(device)
        _move_buffers(model, device)
        model.tie()
        built.append(ModelStage(stage=stage, layers=layers[stage], model=model))
    return built


def head_cost(shape: ModelShape) -> float:
    """Return the cost of the head in layers: its matrix product over a layer's.

    Both take twice their parameters in FLOPs per token.
    """
    return shape.vocab * shape.hidden / _layer_weights(shape)


def embed_cost(shape: ModelShape) -> float:
    """Return the cost of the embedding in layers: no arithmetic, but its table is stored and updated.

    BLOOM counted its table of 3.6 B parameters as one layer of 2.5 B; here it counts as one if it exceeds half a
    layer.
    """
    return 1.0 if shape.vocab * shape.hidden > 0.5 * _layer_weights(shape) else 0.0


def _layer_weights(shape: ModelShape) -> float:
    """Return the weights of a layer's matrices that a token uses."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    width = shape.expert_ffn * (shape.experts_per_token + shape.shared_experts) if shape.is_moe else shape.ffn
    return attention + (3 if shape.gated else 2) * shape.hidden * width


def _widen_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point buffers of the user's own network to float64 when computing in float64.

    This is what `.double()` would do. In other precisions buffers keep their format: bfloat16 ruins running
    statistics and wavelengths.
    """
    if isinstance(model, OwnStage) and dtype == torch.float64:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
        model.tie()


def stage_tensors(parts: Sequence[ModelStage], meshes: Meshes, *, tied: bool) -> list[StageTensor]:
    """Return every parameter and buffer of this rank's stages, in the order of the model."""
    return [tensor for part in parts for tensor in _part_holdings(part, meshes, tied=tied)]


def _part_holdings(part: ModelStage, meshes: Meshes, *, tied: bool) -> Iterator[StageTensor]:
    """Yield the parameters and buffers of one stage, each with its box and its number of copies."""
    experts = expert_splits(part.model)
    ends = {part.model.embed is not None, part.model.head is not None}
    # The tied table has a second copy on another stage.
    is_doubled = tied and ends == {True, False}
    parameters, is_own = list(part.model.named_parameters()), isinstance(part.model, OwnStage)
    parameter_ids = {id(param) for _, param in parameters}
    for name, tensor in [*parameters, *_kept_buffers(part.model)]:
        expert_split = experts.get(id(tensor))
        box = region_of(tensor, (expert_split,) if expert_split else ())
        copy = is_doubled and name in TIED
        yield StageTensor(
            name=TIED[0] if copy else name,
            tensor=tensor,
            box=box,
            replicas=meshes.dims.stage // box.parts * (2 if copy else 1),
            owner=_is_first(box, meshes) and not (copy and name == TIED[1]),
            is_parameter=id(tensor) in parameter_ids,
            trained=tensor.requires_grad and id(tensor) in parameter_ids,
            moves=is_own and id(tensor) not in parameter_ids,
        )


def _is_first(box: ShardRegion, meshes: Meshes) -> bool:
    """Return True if this rank has index 0 on every axis of its stage that does not cut the tensor."""
    cutting = {id(cut.group) for cut in box.cuts}
    whole_experts = meshes.experts is not None and id(meshes.experts.get_group("expert")) in cutting
    mesh = meshes.experts if whole_experts and meshes.experts is not None else meshes.dense
    axes = [axis for axis in mesh.mesh_dim_names or () if axis != "pipeline"]
    return all(mesh.get_local_rank(a) == 0 or id(mesh.get_group(a)) in cutting for a in axes)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device of the activations, also if the parameters stay in host memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers with their names; a buffer with several names once, under the first."""
    yielded: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in yielded:
                yielded.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


@torch.no_grad()
def draw_weights(
    shards: Sequence[TensorShard], *, seed: int, layers: int, scales: ParameterScales = standard_scales
) -> None:
    """Set every weight to its first value, drawn by its name, so that all layouts start from the same model."""
    for shard in shards:
        size = tuple(shard.tensor.shape)
        rows = range(shard.start[0], shard.start[0] + size[0])
        factor = scales(shard.name, len(shard.shape)).init
        values = draw_values(
            shard.name, shard.shape, seed=seed, layers=layers, dtype=torch.float32, rows=rows, factor=factor
        )
        for dim in range(1, len(size)):
            values = values.narrow(dim, shard.start[dim], size[dim])
        shard.tensor.copy_(values)


@torch.no_grad()
def copy_weights(
    values: Iterable[tuple[str, torch.Tensor]],
    parts: Sequence[ModelStage],
    weights: Sequence[TensorShard],
    *,
    prefix: str,
) -> None:
    """Set weights and buffers from whole tensors, on each rank its boxes; names come without `prefix`.

    Buffers that no checkpoint holds have no shard, and are whole on every rank.
    """
    targets: dict[str, list[TensorShard]] = {}
    for shard in weights:
        targets.setdefault(shard.name, []).append(shard)
    buffers = {name: buffer for part in parts for name, buffer in part.model.named_buffers()}
    for own_name, value in values:
        name = prefix + own_name
        for shard in targets.get(name, ()):
            piece = value
            for dim, (start, size) in enumerate(zip(shard.start, shard.tensor.shape, strict=True)):
                piece = piece.narrow(dim, start, size)
            shard.tensor.copy_(piece)
        if name in buffers and name not in targets:
            buffers[name].copy_(value)
