"""`python -m phalanx.train.kernels.lab.candidate_process SOCKET`: forks one sandboxed process per candidate.

Importing torch takes two seconds, forking takes milliseconds. This process imports torch once, never runs a candidate
itself, and does not know inputs, exact results or seeds. A fork gives up access to files, network and other
processes, then runs the candidate on the inputs in the arena. A candidate can only change the messages of its fork:
the judge reads values from the arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from phalanx.train.kernels.lab.arena import NOTES_AT, NOTES_BYTES, Place, map_cuda, view_place
from phalanx.train.kernels.lab.file_rights import readable_folders, restrict_files
from phalanx.train.kernels.lab.process_watch import (
    CALLER_ATTRIBUTES,
    CALLER_EVENTS,
    hide_judge,
    is_candidates_call,
    watch_process,
)
from phalanx.train.kernels.lab.syscall_filter import forbid_calls
from phalanx.train.kernels.source_module import load_source

MESSAGE_BYTES = 64 * 1024
# Modules that a kernel may import; loaded before files are forbidden.
ALLOWED_MODULES = (
    "__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "math",
    "numbers", "operator", "torch", "triton", "types", "typing",
)  # fmt: skip
_LOADED_LATE = ("torch.fx.experimental.symbolic_shapes",)  # by PyTorch, at the first gradient
_FORBIDDEN_EVENTS = (
    "ctypes.dlopen", "ctypes.cdata", "fcntl.", "ftplib.", "glob.", "http.", "imaplib.", "mmap.", "nntplib.", "os.",
    "pathlib.", "poplib.", "pty.", "resource.", "shutil.", "signal.", "smtplib.", "socket.", "sqlite3.", "subprocess.",
    "syslog.", "tempfile.", "urllib.", "webbrowser.",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1

_clock, _dumps, _loads, _is_tensor = time.perf_counter, json.dumps, json.loads, torch.Tensor
_CANDIDATE = "candidate"  # name of the candidate's module and file


def main(arguments: Sequence[str]) -> int:
    """Fork candidates on request until the judge closes its end of the socket."""
    judge = socket.socket(fileno=int(arguments[0]))
    _die_with_parent()
    for name in (*ALLOWED_MODULES, *_LOADED_LATE):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = None  # type: ignore[assignment]  # a later import then fails without opening files
    gc.collect()
    gc.freeze()  # forks share memory that is not written to, and the collector would write to it
    judge.send(b"{}")
    while True:
        raw, files, _, _ = socket.recv_fds(judge, MESSAGE_BYTES, 2)
        if not raw:
            return 0
        request = _loads(raw)
        if request["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                try:
                    judge.close()
                    _serve_candidate(files[0], files[1], request)
                finally:
                    os._exit(0)
            for file in files:
                os.close(file)
            judge.send(_dumps({"pid": pid}).encode())
        else:
            os.kill(request["pid"], signal.SIGKILL)
            judge.send(_dumps({"status": os.waitpid(request["pid"], 0)[1]}).encode())


def _die_with_parent() -> None:
    """Let Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- in the fork, before the candidate runs --------------------------------------------------------------------------


def _serve_candidate(link_file: int, block_file: int, settings: dict[str, Any]) -> None:
    """Run one candidate: set up the sandbox, then answer requests until the judge closes the link."""
    _die_with_parent()
    os.setpgid(0, 0)
    _close_files(keep=(link_file, block_file))
    link = socket.socket(fileno=link_file)
    block = mmap.mmap(block_file, 0)
    os.close(block_file)
    data = torch.frombuffer(block, dtype=torch.uint8)
    device = torch.device(settings["device"])
    source = bytes(block[8 : 8 + int.from_bytes(block[0:8], "little")]).decode()
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings["threads"])
    if settings["cache"]:
        os.environ["TRITON_CACHE_DIR"] = os.environ["TMPDIR"] = settings["cache"]
    if device.type == "cuda":
        data = map_cuda(settings["cuda"])
    _warm_up(device)
    if settings["cache"] and sys.modules.get("triton") is not None:
        _start_triton(sys.modules["triton"])
    barriers = _lock_in(settings, device)
    _watch_events(block, settings, device)
    changes: Callable[[], str] = str  # without a watch: str() returns an empty text, no change
    if settings["watch"] and not settings["compile"]:
        changes = watch_process(globals(), hide_judge(globals()))
    link.send(_dumps({"barriers": barriers}).encode())
    kernel: Callable[..., Any] | None = None
    while raw := link.recv(MESSAGE_BYTES):
        request = _loads(raw)
        try:
            if request["do"] == "load":
                kernel = _load_kernel(source)
                answer: dict[str, Any] = {}
            elif request["do"] == "nothing":
                answer = {}
            else:
                assert kernel is not None
                answer = _run_kernel(kernel, data, request, device, changes)
            # A timed run was checked before its results were copied, and is checked again with the next request.
            if (request["do"] != "run" or request["poison"]) and (changed := changes()):
                answer = {"problem": changed}
        except _BadResultError as error:
            answer = {"problem": str(error)[:800]}
        except ModuleNotFoundError as error:
            module_name = error.name or "a module"
            answer = {
                "problem": f"imports {module_name}, which this machine does not have",
                "raised": "ModuleNotFoundError",
            }
        except BaseException as error:  # also SystemExit: a kernel must not end its process
            answer = {"problem": f"raised {type(error).__name__}: {error}"[:800], "raised": type(error).__name__}
        link.send(_dumps(answer).encode()[:MESSAGE_BYTES])


def _close_files(*, keep: tuple[int, ...]) -> None:
    """Redirect stdin, stdout and stderr to /dev/null and close all files except `keep`."""
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(empty, standard)
    below = 3
    for file in sorted(keep):
        os.closerange(below, file)
        below = file + 1
    os.closerange(below, 65536)


def _warm_up(device: torch.device) -> None:
    """Load what PyTorch loads at its first product, reduction and gradient, before opening files is forbidden."""
    for dtype in (torch.float32, torch.bfloat16):
        first = torch.ones(4, 4, dtype=dtype, device=device, requires_grad=True)
        product = torch.nn.functional.linear(first, first)
        mixed = torch.softmax(torch.nn.functional.silu(product), -1) + torch.nn.functional.layer_norm(product, (4,))
        torch.autograd.grad([mixed], [first], [torch.einsum("ab,ab->ab", mixed, mixed).detach()])
    _Identity.apply(torch.ones(1, device=device, requires_grad=True)).backward()
    if device.type == "cuda":
        torch.cuda.Event(enable_timing=True).record()
        torch.cuda.synchronize()


def _start_triton(triton: Any) -> None:
    """Make Triton run its two helper programs now, because a candidate may not start any.

    Its driver asks a program for the path of libcuda, and the cache key of compiled kernels asks ptxas for its
    version; both are cached in the process.
    """
    active = triton.runtime.driver.active
    active.utils  # noqa: B018
    triton.compiler.compiler.make_backend(active.get_current_target()).hash()


class _Identity(torch.autograd.Function):
    """The identity with custom gradients, which load further parts of PyTorch."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _lock_in(settings: dict[str, Any], device: torch.device) -> list[str]:
    """Set limits and barriers that the candidate cannot lift; return the names of those that are in effect."""
    on_gpu, compiling = device.type == "cuda", settings["compile"]
    barriers = ["a process of its own"]
    if not compiling:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(settings["seconds"]) + 5
    resource.setrlimit(
        resource.RLIMIT_CPU, (seconds * 64, seconds * 64)
    )  # over all threads; the judge's limit comes first
    if not on_gpu:  # drivers reserve more addresses than there is memory
        with open("/proc/self/statm") as file:
            limit_bytes = int(file.read().split()[0]) * mmap.PAGESIZE + settings["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        barriers.append("memory limit")
    elif restrict_files(writable=[settings["cache"]] if settings["cache"] else [], run_programs=compiling):
        barriers.append("landlock")
    if not compiling and forbid_calls(allow_reading=on_gpu):
        barriers.append("seccomp")
    return barriers


def _watch_events(block: mmap.mmap, settings: dict[str, Any], device: torch.device) -> None:
    """Refuse Python's audit events of files, network and processes, and note the first in the arena."""
    if settings["compile"]:
        return
    on_gpu = device.type == "cuda"
    readable = (*readable_folders(), "/dev", *([settings["cache"]] if settings["cache"] else []))
    own_prefix = str(settings["cache"] or "\0")

    is_asking = False

    def watch_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_asking
        walks = event in CALLER_EVENTS or (event == "object.__getattr__" and arguments[1] in CALLER_ATTRIBUTES)
        if walks and settings["watch"]:
            if is_asking:  # an event of is_candidates_call itself
                return
            is_asking = True
            try:
                if not is_candidates_call(f"{_CANDIDATE}.py", 1):
                    return
            finally:
                is_asking = False
        elif event == "open":
            path = arguments[0]
            is_library = isinstance(path, str) and path.startswith(readable) and "w" not in str(arguments[1])
            if (is_library and on_gpu) or isinstance(path, int):
                return
            # Lines of a traceback, or a late import: refused, but not noted as an attempt of the candidate.
            if is_library:
                raise PermissionError("a kernel may not use files")
        elif not event.startswith(_FORBIDDEN_EVENTS):
            return
        elif on_gpu and (
            event.startswith("ctypes.") or any(str(argument).startswith(own_prefix) for argument in arguments)
        ):
            return  # Triton's driver, and its folder of compiled kernels
        elif on_gpu and event in ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv"):
            return
        text = f"{event} {arguments[0] if arguments else ''}"[:300].encode("utf-8", "replace").replace(b"\0", b"?")
        if block[NOTES_AT] == 0:
            block[NOTES_AT : NOTES_AT + len(text)] = text
        raise PermissionError(f"a kernel may not use files, the network or other processes ({event})")

    assert NOTES_BYTES > 300
    sys.addaudithook(watch_event)


# ---- the candidate ---------------------------------------------------------------------------------------------------


class _BadResultError(Exception):
    """Raised where a kernel's result violates the contract."""


def _load_kernel(source: str) -> Callable[..., Any]:
    """Run the candidate's source as a module and return its function kernel."""
    module = load_source(_CANDIDATE, source)
    kernel = getattr(module, "kernel", None)
    if not callable(kernel):
        raise _BadResultError("defines no function kernel")
    checked: Callable[..., Any] = kernel
    return checked


def _run_kernel(
    kernel: Callable[..., Any],
    data: Tensor,
    request: dict[str, Any],
    device: torch.device,
    changes: Callable[[], str],
) -> dict[str, Any]:
    """Call the kernel on each set of inputs of the request, and copy its results into the arena; return the seconds."""
    on_gpu, differentiable = device.type == "cuda", request["differentiable"]
    # New memory is filled with NaN only in untimed runs, because filling takes time.
    # (torch.use_deterministic_algorithms would import the compiler first.)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    torch._C._set_deterministic_algorithms(request["poison"], warn_only=True)
    # .data: autograd then counts in-place changes per tensor; views of one arena would share a counter.
    sets = [[view_place(data, place).data for place in _read_places(listed)] for listed in request["inputs"]]
    for inputs in sets:
        for place in differentiable:
            inputs[place].requires_grad_()
    places = [_read_places(listed) for listed in request["outputs"]]
    result_gradients = [
        [view_place(data, place).data for place in _read_places(listed)] for listed in request["output_gradients"]
    ]
    if request["turned"]:  # the same numbers with other strides: a sum's gradient has the stride 0
        result_gradients = [
            [grad.transpose(-1, -2).contiguous().transpose(-1, -2) if grad.dim() > 1 else grad for grad in grads]
            for grads in result_gradients
        ]
    begin = torch.cuda.Event(enable_timing=True) if on_gpu else None
    end = torch.cuda.Event(enable_timing=True) if on_gpu else None
    with torch.set_grad_enabled(bool(differentiable)):
        start = _clock()
        if begin is not None:
            begin.record()
        calls = [
            _KernelCall(kernel, inputs, outputs, output_gradients, differentiable, data, request)
            for inputs, outputs, output_gradients in zip(sets, places, result_gradients, strict=True)
        ]
        if request["overlap"]:
            for call in calls:
                call.compute_results()
        returned = [call.finish() for call in calls]
        if end is not None:
            end.record()
        seconds = _clock() - start
    # Checked before calling anything that a candidate may have replaced: that call could undo the replacement.
    if changed := changes():
        raise _BadResultError(changed)
    gradient_places = [_read_places(listed) for listed in request["gradients"]]
    for results, listed, gradients in zip(returned, places, gradient_places, strict=True):
        for result, place in zip(results, (*listed, *gradients), strict=True):
            view_place(data, place).copy_(result.detach())
    if begin is not None and end is not None:
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
    return {"seconds": seconds}


class _KernelCall:
    """One call of a kernel: its results, then the gradients of the requested inputs.

    In checked runs results are copied before gradients are computed: autograd waits for other streams, and would hide
    work left on one. Where calls overlap, as those of a model's layers do, all results are computed before any
    gradient and copied after the last call, which reveals a kernel that returns memory its next call overwrites.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        inputs: list[Tensor],
        places: list[Place],
        given: list[Tensor],
        wanted: list[int],
        data: Tensor,
        request: dict[str, Any],
    ) -> None:
        self._kernel, self._inputs, self._places, self._given = kernel, inputs, places, given
        self._wanted, self._data = wanted, data
        self._overlap, self._unused = request["overlap"], request["unused"]
        self._at_once = request["poison"] and not self._overlap
        self._outputs: tuple[Any, ...] = ()

    def compute_results(self) -> None:
        """Call the kernel and check its results; raise _BadResultError if they violate the contract."""
        returned = self._kernel(*self._inputs)
        self._outputs = returned if isinstance(returned, tuple) else (returned,)
        _check_results(self._outputs, self._places, self._data, "result")

    def finish(self) -> list[Tensor]:
        """Return results, then gradients; raise _BadResultError if they violate the contract."""
        if not self._overlap:
            self.compute_results()
        outputs, differentiable = self._outputs, self._wanted
        results = [tensor.detach().clone() for tensor in outputs] if self._at_once else list(outputs)
        if not differentiable:
            return results
        pairs = [
            (tensor, grad)
            for number, (tensor, grad) in enumerate(zip(outputs, self._given, strict=True))
            if tensor.requires_grad and number != self._unused
        ]
        if not pairs:
            raise _BadResultError("has no gradients: its results do not depend on its inputs as far as autograd sees")
        sources = [self._inputs[place] for place in differentiable]
        gradients = self._differentiate(pairs, sources, again=False)
        # A second backward through the same graph may raise, but must not return other gradients.
        if self._overlap:
            with contextlib.suppress(RuntimeError):
                gradients = self._differentiate(pairs, sources, again=True)
        kinds = [Place(0, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in sources]
        for number, (gradient, kind) in enumerate(zip(gradients, kinds, strict=True)):
            if gradient is None:
                raise _BadResultError(f"has no gradient for input {differentiable[number]}")
            _check_results((gradient,), [kind], self._data, "gradient", own_memory=False)
        return [*results, *gradients]

    def _differentiate(self, pairs: list[tuple[Tensor, Tensor]], sources: list[Tensor], *, again: bool) -> list[Any]:
        """Return the gradients of `sources`; `again` marks the second backward through the same graph."""
        outputs, output_gradients = [output for output, _ in pairs], [grad for _, grad in pairs]
        keep = self._overlap and not again
        gradients = torch.autograd.grad(outputs, sources, output_gradients, allow_unused=True, retain_graph=keep)
        if self._unused is None:
            return list(gradients)
        # No gradient for an input that only the unused result depends on: it is zero.
        return [
            torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, gradients, strict=True)
        ]


def _read_places(listed: list[Any]) -> list[Place]:
    return [Place(offset, dtype, tuple(shape)) for offset, dtype, shape in listed]


def _check_results(
    outputs: tuple[Any, ...], places: list[Place], data: Tensor, noun: str, *, own_memory: bool = True
) -> None:
    """Raise _BadResultError unless each tensor has its place's shape and dtype, and its own contiguous memory."""
    if len(outputs) != len(places):
        raise _BadResultError(f"returned {len(outputs)} tensors, not {len(places)}")
    first, last = data.data_ptr(), data.data_ptr() + data.numel()
    for number, (output, place) in enumerate(zip(outputs, places, strict=True)):
        name = f"{noun} {number}"
        if type(output) is not _is_tensor:
            raise _BadResultError(f"{name} is of type {type(output).__name__}, not a plain torch.Tensor")
        if tuple(output.shape) != place.shape:
            raise _BadResultError(f"{name} has shape {list(output.shape)}, not {list(place.shape)}")
        if str(output.dtype) != f"torch.{place.dtype}":
            raise _BadResultError(f"{name} is {str(output.dtype).removeprefix('torch.')}, not {place.dtype}")
        if output.device.type != data.device.type:
            raise _BadResultError(f"{name} is on {output.device.type}, not on {data.device.type}")
        if own_memory and output.numel() and first <= output.data_ptr() < last:
            raise _BadResultError(f"{name} shares memory with an input")
        if own_memory and not output.is_contiguous():
            raise _BadResultError(f"{name} is not contiguous: a view stands in for values that were not written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
