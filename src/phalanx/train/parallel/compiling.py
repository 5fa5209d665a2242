"""What torch.compile must be told about this rank before it compiles, or loads what was compiled before.

Two errors of torch 2.13 are kept away here; `benchmarks/torch_compile_errors.py` shows the first without Phalanx:

- The key of its compile cache names the mesh, but not the rank's place in it. A compiled DTensor operation holds the
  rank's place as a constant (which rows of the vocabulary are mine), so that rank 1 loads what rank 0 compiled, and
  trains on wrong numbers without a word.
- Schedules that split the backward pass run it with `retain_graph`. A backward compiled in this process notices and
  gives up reusing its inputs' memory (donated buffers); one loaded from the cache refuses to run.
"""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config

from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.pipeline import splits_backward


def prepare_compiler(meshes: Meshes, *, schedule: str) -> None:
    """Forget what was compiled for another place in a mesh; keep this place's own entries in the compile cache."""
    # A process that outlived a failure may hold code compiled for the place it had before.
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag = place_name(meshes)
    # Read when a backward is compiled and when it runs, and part of the cache's key.
    torch._functorch.config.donated_buffer = not (meshes.dims.pipeline > 1 and splits_backward(schedule))


def place_name(meshes: Meshes) -> str:
    """This rank's place and its groups, both of which compiled code holds as constants."""
    cuts = [mesh for mesh in (meshes.dense, meshes.work, meshes.experts, meshes.stages) if mesh is not None]
    places = [
        f"{axis}={mesh.get_local_rank(axis)}/{mesh.get_group(axis).group_name}"
        for mesh in cuts
        for axis in mesh.mesh_dim_names or ()
    ]
    return f"phalanx world={meshes.dims.world} " + " ".join(places)
