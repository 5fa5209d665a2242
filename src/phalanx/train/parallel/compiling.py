"""Preparation of torch.compile on a rank: imports before the fork, and a cache key that names the rank's place.

The key of torch's compile cache (2.13) contains the mesh but not the rank's coordinate in it. A compiled DTensor
operation holds that coordinate as a constant (which rows of the vocabulary the rank owns), so rank 1 would load the
code of rank 0 and train on wrong numbers without a warning. `benchmarks/torch_compile_errors.py` reproduces it
without Phalanx.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import torch
import torch._dynamo
import torch._inductor.config

from phalanx.train.parallel.dims import Meshes


def load_compiler(backend: str, *, on_gpu: bool) -> None:
    """Run the imports and key computations of the first compilation once, before the ranks are forked.

    They take seconds in every process. A rank that replaces another then starts faster: its code comes from the
    compile cache, whose key is a hash of all of torch's and Triton's source. Nothing here touches a GPU or starts a
    thread.
    """
    if backend != "inductor":
        return
    import_module("torch._inductor.compile_fx")
    # Private functions of torch: if one is missing, the first compilation does the work.
    with suppress(ImportError, AttributeError, RuntimeError):
        import_module("torch._inductor.codecache").torch_key()
        if on_gpu:
            import_module("torch._inductor.codegen.triton")
            import_module("torch._inductor.runtime.triton_heuristics")
            import_module("torch._inductor.runtime.triton_compat").triton_key()
        else:
            # Runs the C++ compiler
            import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()


def prepare_compiler(meshes: Meshes) -> None:
    """Drop code compiled for another place in the mesh, and give this place its own entries in the compile cache."""
    # A process that outlived a failure may hold code compiled for the place it had before.
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag = place_name(meshes)
    # Dropout draws the numbers that eager code draws, or the two could not be compared (guard/compiled.py). Code
    # without random numbers is not changed by it.
    torch._inductor.config.fallback_random = True


def place_name(meshes: Meshes) -> str:
    """Return a string of this rank's mesh coordinates and group names, which compiled code holds as constants."""
    device_meshes = [mesh for mesh in (meshes.dense, meshes.work, meshes.experts, meshes.stages) if mesh is not None]
    places = [
        f"{axis}={mesh.get_local_rank(axis)}/{mesh.get_group(axis).group_name}"
        for mesh in device_meshes
        for axis in mesh.mesh_dim_names or ()
    ]
    return f"phalanx world={meshes.dims.world} " + " ".join(places)
