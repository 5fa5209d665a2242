"""The guard: a candidate kernel is run in a process of its own and judged here, by its bytes and by our clock.

What makes a cheat fail is where things are known. Inputs are drawn here, from seeds of the operating system, and lie in
memory that both processes map; results are read from that memory after the candidate's process has ended, and only then
is the truth computed, in float64, here. Timed runs have new inputs each, and their results are judged like all others.
The candidate's own clock is a claim: what counts is the slower of its clock and ours, in the slower of two processes.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.lab.arena import (
    HEADER_BYTES,
    HostBlock,
    Place,
    place_tensors,
    share_cuda,
    tensor_bytes,
    view_place,
)
from phalanx.train.kernels.lab.candidate_file import check_text, parse_candidate
from phalanx.train.kernels.lab.candidate_server import (
    CandidateLimits,
    CandidateProcess,
    CandidateServer,
    RefusedError,
)
from phalanx.train.kernels.lab.cases import (
    Case,
    compare_values,
    draw_cases,
    draw_inputs,
    find_truth,
    result_kinds,
    timed_shape,
)
from phalanx.train.kernels.lab.machine_limits import MachineLimits, flush_caches, measure_limits, synchronize_device
from phalanx.units import format_seconds

REPEATS = 5  # timed runs in each of two processes, after one that is checked and not counted
# A result faster than this many times the speed of light is refused. A CPU's caches outrun its memory, whatever is done
# to empty them.
LIGHT_ROOM = {"cpu": 4.0, "cuda": 1.15}
COPY_ROOM = 1.5  # our estimate of copying results out, which our clock sees and the candidate's does not
HANDLING_S = 1e-3  # what the process does between a request and the kernel, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    """Seconds of one call at one shape; `seconds` is what counts."""

    shape: Shape
    dtype: str
    seconds: float
    claimed_s: float  # by the candidate's own clock
    first_s: float  # in the first process, the slower of both clocks
    second_s: float  # in the second process
    least_s: float  # at the speed of light
    bytes_per_s: float  # measured here, in this run
    flops_per_s: float

    @property
    def light(self) -> float:
        """Fraction of the speed of light."""
        return self.least_s / self.seconds if self.seconds else math.inf

    @property
    def confirmed(self) -> bool:
        """Whether the second process took about as long as the first."""
        return max(self.first_s, self.second_s) <= 1.25 * min(self.first_s, self.second_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the guard says of a candidate."""

    op: str
    device: str
    passed: bool
    kind: str = ""  # why it is refused, in one word: values, result, input, time, memory, crash, import, forbidden, …
    reason: str = ""
    cases: int = 0
    worst_error: float = 0.0  # the largest error over what is allowed, of all cases
    with_gradients: bool = False
    barriers: tuple[str, ...] = ()
    timing: KernelTiming | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What lay in the arena after one run, kept here."""

    case: Case
    outputs: list[Tensor]
    seconds: float = 0.0  # by our clock, from the request to the answer
    claimed_s: float = 0.0


def judge_candidate(
    source: str,
    op: KernelOp,
    *,
    server: CandidateServer,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (),
    gradients: bool = True,
    timed: bool = True,
    shape: Shape | None = None,
    limits: CandidateLimits | None = None,
    machine: MachineLimits | None = None,
) -> Verdict:
    """Try a candidate's text; never raises for what the candidate does."""
    wanted = tuple(op.gradients) if gradients else ()
    known = Verdict(op=op.name, device=device, passed=False, with_gradients=bool(wanted))
    try:
        check_text(parse_candidate(source, op.name))
    except RefusedError as error:
        return replace(known, kind=error.kind, reason=str(error))
    trial = _Trial(source, op, server, torch.device(device), wanted, limits or CandidateLimits())
    random_source = random.Random(os.urandom(16))
    cases = draw_cases(op, tuple(dtypes) or tuple(op.dtypes), random_source)
    timed_cases = []
    if timed:
        dtype = cases[0].dtype
        size = dict(shape) if shape else timed_shape(op, dtype, torch.device(device))
        timed_cases = [
            Case(shape=size, dtype=dtype, seed=random_source.getrandbits(31), timed=True)
            for _ in range(2 * (REPEATS + 1))
        ]
    try:
        with trial:
            worst, count = trial.judge_values(cases)
            timing = trial.judge_time(timed_cases, machine) if timed_cases else None
    except RefusedError as error:
        return replace(known, kind=error.kind, reason=str(error), barriers=trial.barriers)
    return replace(
        known, passed=True, cases=count + len(timed_cases), worst_error=worst, barriers=trial.barriers, timing=timing
    )


class _Trial:
    """The memory and the processes of one candidate."""

    def __init__(
        self,
        source: str,
        op: KernelOp,
        server: CandidateServer,
        device: torch.device,
        wanted: tuple[int, ...],
        limits: CandidateLimits,
    ) -> None:
        self.source, self.op, self.server, self.device, self.wanted = source, op, server, device, wanted
        self.limits = limits if limits.threads else replace(limits, threads=torch.get_num_threads())
        self.barriers: tuple[str, ...] = ()
        self._block: HostBlock | None = None
        self._data = torch.empty(0)
        self._kept: dict[str, Tensor] = {}
        self._cache: tempfile.TemporaryDirectory[str] | None = None
        self._compiled: set[str] = set()

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._data = torch.empty(0)
        if self._block is not None:
            self._block.close()
        if self._cache is not None:
            self._cache.cleanup()

    # ---- one process after the other ---------------------------------------------------------------------------------

    def judge_values(self, cases: Sequence[Case]) -> tuple[float, int]:
        """Run all cases in one process, then compare; the worst error and the number of cases."""
        answers = self._run_cases(cases, wanted=self.wanted)
        return max(self._compare(one, self.wanted) for one in answers), len(answers)

    def judge_time(self, cases: Sequence[Case], machine: MachineLimits | None) -> KernelTiming:
        """Time in two processes; every timed result is compared too."""
        half = len(cases) // 2
        limits = machine or measure_limits(self.device, cases[0].dtype)
        runs = [self._run_cases(part, wanted=(), timed=True) for part in (cases[:half], cases[half:])]
        for answers in runs:
            for one in answers:
                self._compare(one, ())
        work = self.op.count_work(cases[0].shape, cases[0].dtype)
        copying = COPY_ROOM * 2 * sum(tensor_bytes(one) for one in runs[0][0].outputs) / limits.bytes_per_s
        measured = []
        for answers in runs:
            counted = answers[1:]  # the first warms up
            claimed = median(one.claimed_s for one in counted)
            ours = median(one.seconds for one in counted) - copying
            fastest = min(one.seconds for one in counted)
            least = limits.least_seconds(work) / LIGHT_ROOM[self.device.type]
            if claimed < least:
                raise RefusedError(
                    "light",
                    f"claims {format_seconds(claimed)} by its own clock, above the speed of light: {work.read_bytes:,} bytes"
                    f" in, {work.written_bytes:,} out and {work.flops:,} FLOPs take {format_seconds(least)} here at least",
                )
            if max(one.claimed_s for one in counted) + copying + HANDLING_S < 0.5 * fastest:
                raise RefusedError(
                    "clock",
                    f"its own clock says {format_seconds(claimed)}, ours {format_seconds(fastest)} at least",
                )
            measured.append((max(claimed, ours), claimed))
        return KernelTiming(
            shape=cases[0].shape,
            dtype=str(cases[0].dtype).removeprefix("torch."),
            seconds=max(one for one, _ in measured),
            claimed_s=max(one for _, one in measured),
            first_s=measured[0][0],
            second_s=measured[1][0],
            least_s=limits.least_seconds(work),
            bytes_per_s=limits.bytes_per_s,
            flops_per_s=limits.flops_per_s,
        )

    def _run_cases(self, cases: Sequence[Case], *, wanted: tuple[int, ...], timed: bool = False) -> list[_Answer]:
        self._make_arena(cases, wanted)
        if self.device.type == "cuda" and "triton" in self.source:
            self._compile_kernels(cases, wanted)
        process = self._start_process(compiling=False)
        try:
            answers = [self._run_case(process, case, wanted=wanted, timed=timed) for case in cases]
        except RefusedError as error:
            raise self._with_notes(error) from error
        finally:
            process.end()
        if notes := self._notes():
            raise RefusedError("forbidden", f"tried what a kernel may not: {notes}")
        return answers

    def _start_process(self, *, compiling: bool) -> CandidateProcess:
        assert self._block is not None
        self._block.write_source(self.source.encode())
        settings = {
            "device": str(self.device),
            "compile": compiling,
            "cuda": share_cuda(self._data) if self.device.type == "cuda" else None,
            "cache": self._cache.name if self._cache is not None else "",
        }
        process = self.server.fork_candidate(self._block.file, settings, self.limits)
        try:
            self.barriers = self.barriers if compiling else tuple(process.hear()["barriers"])
            if compiling:
                process.hear()
            process.ask({"do": "load"})
        except RefusedError as error:
            process.end()
            raise self._with_notes(error) from error
        return process

    def _compile_kernels(self, cases: Sequence[Case], wanted: tuple[int, ...]) -> None:
        """Triton's compiler runs programs and writes files: it gets a process of its own, inputs that are then thrown
        away, and one folder, which later processes only read."""
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="phalanx-kernels-")
        new = {f"{case.dtype} {sorted(case.shape.items())} {bool(wanted)}": case for case in cases}
        new = {key: case for key, case in new.items() if key not in self._compiled}
        if not new:
            return
        process = self._start_process(compiling=True)
        try:
            for case in new.values():
                self._run_case(process, replace(case, seed=0, wide=False), wanted=wanted, timed=False)
        finally:
            process.end()
        self._compiled |= set(new)

    def _notes(self) -> str:
        from phalanx.io.values import printable

        return printable(self._block.read_notes(), most=200) if self._block is not None else ""

    def _with_notes(self, error: RefusedError) -> RefusedError:
        notes = self._notes()
        return RefusedError("forbidden", f"tried what a kernel may not: {notes}") if notes else error

    # ---- one run -----------------------------------------------------------------------------------------------------

    def _make_arena(self, cases: Sequence[Case], wanted: tuple[int, ...]) -> None:
        """Memory for the largest case."""
        most = 0
        for case in {str(sorted(one.shape.items())) + str(one.dtype): one for one in cases}.values():
            inputs = draw_inputs(self.op, case, torch.device("cpu") if self.device.type == "cpu" else self.device)
            most = max(most, self._places(inputs, wanted)[-1])
        on_gpu = self.device.type == "cuda"
        if self._data.numel() >= most:
            return
        self._data = torch.empty(0)
        if self._block is not None and not on_gpu:
            self._block.close()
            self._block = None
        if self._block is None:
            self._block = HostBlock(HEADER_BYTES if on_gpu else most)
        self._data = torch.empty(most, dtype=torch.uint8, device=self.device) if on_gpu else self._block.data

    def _places(
        self, inputs: Sequence[Tensor], wanted: tuple[int, ...]
    ) -> tuple[list[Place], list[Place], list[Place], list[Place], int]:
        """Of inputs, results, gradients of results (given), gradients of inputs (asked for); and where all end."""
        kinds = result_kinds(self.op, inputs)
        given = [(_dtype_name(one), tuple(one.shape)) for one in inputs]
        back = kinds if wanted else []
        asked = [given[place] for place in wanted]
        places, end = place_tensors([*given, *kinds, *back, *asked])
        cuts = [0, len(given), len(given) + len(kinds), len(given) + len(kinds) + len(back), len(places)]
        parts = [places[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        return parts[0], parts[1], parts[2], parts[3], end

    def _run_case(self, process: CandidateProcess, case: Case, *, wanted: tuple[int, ...], timed: bool) -> _Answer:
        """Fill the arena, ask for one run, and take everything out again."""
        inputs = list(draw_inputs(self.op, case, self.device))
        first, results, back, asked, end = self._places(inputs, wanted)
        given = [*inputs, *_draw_gradients(case, back, self.device)]
        self._data[HEADER_BYTES:end] = case.poison
        for place, value in zip([*first, *back], given, strict=True):
            view_place(self._data, place).copy_(value)
        before = self._data[HEADER_BYTES:end].clone()
        request: dict[str, Any] = {
            "do": "run",
            "poison": not timed,
            "inputs": [one.to_json() for one in first],
            "outputs": [one.to_json() for one in results],
            "output_gradients": [one.to_json() for one in back],
            "gradients": [one.to_json() for one in asked],
            "differentiable": list(wanted),
        }
        seconds = 0.0
        if timed:
            rounds = [_timed_ask(process, {"do": "nothing"})[0] for _ in range(3)]
            flush_caches(self.device, self._kept)
        synchronize_device(self.device)
        seconds, answer = _timed_ask(process, request)
        if timed:
            seconds = max(0.0, seconds - median(rounds))
        synchronize_device(self.device)
        outputs = [view_place(self._data, place).clone() for place in (*results, *asked)]
        for place in (*results, *asked):  # all the rest must be as it was: inputs, and the bands around everything
            before[place.offset - HEADER_BYTES : place.offset - HEADER_BYTES + place.num_bytes] = self._data[
                place.offset : place.offset + place.num_bytes
            ]
        if not torch.equal(before, self._data[HEADER_BYTES:end]):
            raise _changed_memory(before, self._data[HEADER_BYTES:end], first, back)
        claimed = answer.get("seconds")
        if not isinstance(claimed, float) or not math.isfinite(claimed) or claimed < 0.0:
            raise RefusedError("nonsense", "its process sent no time of its own")
        return _Answer(case=case, outputs=outputs, seconds=seconds, claimed_s=claimed)

    def _compare(self, answer: _Answer, wanted: tuple[int, ...]) -> float:
        """Compute the truth, now that the candidate's process is gone."""
        inputs = draw_inputs(self.op, answer.case, self.device)
        back = _draw_gradients(answer.case, self._places(inputs, wanted)[2], self.device)
        return compare_values(answer.outputs, find_truth(self.op, inputs, answer.case.dtype, back), answer.case)


def _timed_ask(process: CandidateProcess, request: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    answer = process.ask(request)
    return time.perf_counter() - start, answer


def _draw_gradients(case: Case, places: Sequence[Place], device: torch.device) -> list[Tensor]:
    """Gradients of the results, which the candidate takes back to its inputs."""
    source = torch.Generator().manual_seed(case.seed ^ 0x6AD)
    from phalanx.train.kernels.lab.arena import DTYPES

    return [torch.randn(one.shape, generator=source).to(DTYPES[one.dtype]).to(device) for one in places]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _changed_memory(before: Tensor, after: Tensor, first: Sequence[Place], back: Sequence[Place]) -> RefusedError:
    for number, place in enumerate((*first, *back)):
        part = slice(place.offset - HEADER_BYTES, place.offset - HEADER_BYTES + place.num_bytes)
        if not torch.equal(before[part], after[part]):
            name = f"input {number}" if number < len(first) else "the gradient it was given"
            return RefusedError("input", f"changed {name}")
    return RefusedError("outside", "wrote outside of its tensors")
