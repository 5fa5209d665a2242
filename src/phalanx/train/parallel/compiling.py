"""What torch.compile must be told about this rank before it compiles, or loads what was compiled before.

The key of torch's compile cache (2.13) names the mesh, but not the rank's place in it. A compiled DTensor operation
holds the rank's place as a constant (which rows of the vocabulary are mine), so that rank 1 loads what rank 0 compiled,
and trains on wrong numbers without a word. `benchmarks/torch_compile_errors.py` shows it without Phalanx.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import torch
import torch._dynamo
import torch._inductor.config

from phalanx.train.parallel.dims import Meshes


def load_compiler(backend: str, *, on_gpu: bool) -> None:
    """Do before ranks are forked what the first compilation does in every process, for seconds: imports and keys.

    A rank that replaces another waits for less: its code comes from the compile cache, whose key is a hash of all of
    torch's and Triton's source. Nothing here touches a GPU or starts a thread.
    """
    if backend != "inductor":
        return
    import_module("torch._inductor.compile_fx")
    with suppress(ImportError, AttributeError, RuntimeError):  # not public: else the first compilation does it
        import_module("torch._inductor.codecache").torch_key()
        if on_gpu:
            import_module("torch._inductor.codegen.triton")
            import_module("torch._inductor.runtime.triton_heuristics")
            import_module("torch._inductor.runtime.triton_compat").triton_key()
        else:
            import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()  # runs the C++ compiler


def prepare_compiler(meshes: Meshes) -> None:
    """Forget what was compiled for another place in a mesh; keep this place's own entries in the compile cache."""
    # A process that outlived a failure may hold code compiled for the place it had before.
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag = place_name(meshes)
    # Dropout draws the numbers that eager code draws, or the two could not be compared (guard/compiled.py). Code
    # without random numbers is not changed by it.
    torch._inductor.config.fallback_random = True


def place_name(meshes: Meshes) -> str:
    """This rank's place and its groups, both of which compiled code holds as constants."""
    cuts = [mesh for mesh in (meshes.dense, meshes.work, meshes.experts, meshes.stages) if mesh is not None]
    places = [
        f"{axis}={mesh.get_local_rank(axis)}/{mesh.get_group(axis).group_name}"
        for mesh in cuts
        for axis in mesh.mesh_dim_names or ()
    ]
    return f"phalanx world={meshes.dims.world} " + " ".join(places)
