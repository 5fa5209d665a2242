"""Watch over names and hooks in a candidate's process that a kernel has no reason to change, compared after each
call.

It is a detector, not a barrier, because it runs in the process that it watches. It names an attempt; the guard judges
values independently.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import importlib._bootstrap
import importlib._bootstrap_external
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

# PyTorch itself changes names that begin with an underscore, for instance when it initializes a device.
_TORCH: tuple[Any, ...] = (
    torch, torch.Tensor, torch._C.TensorBase, torch.nn.functional, torch.autograd, torch.autograd.Function, torch.cuda,
    torch.cuda.Event, torch.linalg,
)  # fmt: skip
_STANDARD: tuple[Any, ...] = (
    builtins, gc, importlib, importlib._bootstrap, importlib._bootstrap_external, json, math, socket, sys, threading,
    time, atexit,
)  # fmt: skip
# Operators that copy results to the judge; a library could register other implementations of them.
_COPYING = ("aten::copy_", "aten::clone", "aten::detach", "aten::view", "aten::view.dtype", "aten::slice.Tensor")
_CHANGING = {"sys": ("last_type", "last_value", "last_traceback", "flags"), "threading": ("_counter",)}
CALLER_EVENTS = frozenset((
    "gc.get_objects", "gc.get_referents", "gc.get_referrers", "sys._current_frames", "sys._getframe",
    "sys.addaudithook", "sys.setprofile", "sys.settrace",
))  # fmt: skip
CALLER_ATTRIBUTES = frozenset(("cr_frame", "gi_frame", "tb_frame"))


def hide_judge(harness: Mapping[str, Any]) -> ModuleType:
    """Remove Phalanx's modules from `sys.modules`; return the empty module that replaces `__main__`.

    A candidate that replaces a name of `__main__` then only changes this unused module.
    """
    for name in [name for name in sys.modules if name == "phalanx" or name.startswith("phalanx.")]:
        del sys.modules[name]
    decoy = ModuleType("__main__")
    decoy.__file__ = harness.get("__file__")
    sys.modules["__main__"] = decoy
    return decoy


def watch_process(harness: Mapping[str, Any], decoy: ModuleType) -> Callable[[], str]:
    """Return a function that describes a change since now, or returns an empty text.

    Everything that it uses is bound here, so a candidate cannot affect it by replacing a name of this module or a
    built-in.
    """
    spaces: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
    for watched in (*_TORCH, *_STANDARD):
        name = getattr(watched, "__name__", "")
        changing = _CHANGING.get(name, ())
        is_torch = any(watched is torch_object for torch_object in _TORCH)
        names = {
            key: value
            for key, value in vars(watched).items()
            if key not in changing and not (is_torch and key.startswith("_") and not key.startswith("__"))
        }
        spaces.append((name, vars(watched), names))
    spaces.append(("__main__", harness, dict(harness)))
    spaces.append(("__main__", vars(decoy), dict(vars(decoy))))
    # A new name in a class hides that of its base class, such as copy_ of tensors, so these must not grow.
    closed = [(name, now) for name, now, _ in spaces if not isinstance(now, dict) or name == "__main__"]
    sizes = [len(now) for _, now in closed]
    modules, loaded = sys.modules, dict(sys.modules)
    hooks: dict[str, list[Any]] = {
        "sys.meta_path": sys.meta_path,
        "sys.path_hooks": sys.path_hooks,
        "gc.callbacks": gc.callbacks,
    }
    contents = {name: tuple(values) for name, values in hooks.items()}
    running_frames, get_trace, get_profile = sys._current_frames, sys.gettrace, sys.getprofile
    count_exits, function_modes = atexit._ncallbacks, torch._C._len_torch_function_stack
    dispatch_modes, dump = torch._C._len_torch_dispatch_stack, torch._C._dispatch_dump
    exits, num_items = count_exits(), len
    read_settings, equal = _settings_reader(), torch.equal
    settings_before, random_before, read_random = read_settings(), torch.get_rng_state(), torch.get_rng_state
    operators = {name: dump(name) for name in _COPYING}
    as_tuple, number, collect_is_on, pairs = tuple, enumerate, gc.isenabled, zip

    def changed() -> str:
        for name, now, before in spaces:
            for key, value in before.items():
                if now.get(key) is not value:
                    return f"replaced {name}.{key}"
        for place, (name, now) in number(closed):
            if num_items(now) != sizes[place]:
                return f"added a name to {name}"
        for key, value in loaded.items():
            if modules.get(key) is not value:
                return f"replaced the module {key}"
        for name, values in hooks.items():
            if as_tuple(values) != contents[name]:
                return f"changed {name}"
        if get_trace() is not None or get_profile() is not None:
            return "traces its process"
        if count_exits() != exits:
            return "registered a function with atexit"
        # Idle threads of PyTorch's autograd have no Python frame.
        if num_items(running_frames()) > 1:
            return "started a thread"
        if function_modes() or dispatch_modes():
            return "left a mode of torch switched on"
        for (name, value), (_, value_before) in pairs(read_settings(), settings_before):
            if value != value_before:
                return f"changed {name}, which the whole program shares"
        if not equal(read_random(), random_before):
            return "changed the state of the random number generator, which the whole program shares"
        if not collect_is_on():
            return "switched the garbage collector off"
        for name, value in operators.items():
            if dump(name) != value:
                return f"registered another {name}"
        return ""

    return changed


def _settings_reader() -> Callable[[], list[tuple[str, Any]]]:
    """Return a function that reads torch's process-wide settings: other code would run with a kernel's changes."""
    smallest = torch.tensor([1e-42])  # denormal: zero only if torch flushes denormals
    readers: list[tuple[str, Callable[[], Any]]] = [
        ("torch.get_default_dtype()", torch.get_default_dtype),
        ("torch.get_num_threads()", torch.get_num_threads),
        ("torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision),
        ("torch.is_autocast_enabled()", torch._C.is_autocast_enabled),
        ("torch.backends.cudnn.allow_tf32", torch._C._get_cudnn_allow_tf32),
        ("torch.backends.cudnn.benchmark", torch._C._get_cudnn_benchmark),
        ("torch.set_flush_denormal()", lambda: bool((smallest * 1.0 == 0.0).any())),
        ("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled),
    ]

    def read_settings() -> list[tuple[str, Any]]:
        return [(name, read()) for name, read in readers]

    return read_settings


def is_candidates_call(candidate_file: str, depth: int) -> bool:
    """Return whether the frame `depth` above the caller belongs to the candidate's file."""
    return sys._getframe(depth + 1).f_code.co_filename == candidate_file
