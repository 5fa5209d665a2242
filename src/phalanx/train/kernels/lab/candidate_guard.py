"""The guard: a candidate kernel is run in a process of its own and judged here, by its bytes and by our clock.

What makes a cheat fail is where things are known. Inputs are drawn here, from seeds of the operating system, and lie in
memory that both processes map; results are read from that memory after the candidate's process has ended, and only then
is the truth computed, in float64, here. Timed runs have new inputs each, and their results are judged like all others.
The candidate's own clock is a claim: what counts is the slower of its clock and ours, in the slower of two processes.
"""

from __future__ import annotations

import itertools
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

from phalanx.errors import Problem, SystemFailure
from phalanx.io.values import printable
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.lab.arena import (
    DTYPES,
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
from phalanx.train.kernels.lab.error_rules import compare_values, find_truth, result_kinds
from phalanx.train.kernels.lab.machine_limits import MachineLimits, flush_caches, measure_limits, synchronize_device
from phalanx.train.kernels.lab.trial_inputs import (
    ORDINARY,
    KernelCase,
    draw_cases,
    draw_inputs,
    draw_output_gradients,
    draw_uses,
    op_patterns,
    timed_shape,
)
from phalanx.units import format_seconds

# Timed batches in each of two processes, after one that is checked and not counted; and calls in a batch, each on
# inputs of its own. A GPU's kernel is over in less time than a message takes: our clock needs many of them.
BATCHES = {"cpu": 5, "cuda": 3}
BATCH_CALLS = {"cpu": 1, "cuda": 16}
# A result faster than this many times the speed of light is refused. A CPU's caches outrun its memory, whatever is done
# to empty them.
LIGHT_ALLOWANCE = {"cpu": 4.0, "cuda": 1.15}
COPY_ALLOWANCE = 1.5  # our estimate of copying results out, which our clock sees and the candidate's does not
# What the process does between a request and the kernel, at most; also the most that is taken off our clock for a
# message there and back, which a candidate could slow down on purpose.
HANDLING_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    """Seconds of one call at one shape, forward and backward where there are gradients; `seconds` is what counts."""

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
class KernelVerdict:
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
class _CandidateAnswer:
    """What lay in the arena after one request, kept here; seconds are of one call."""

    cases: Sequence[KernelCase]
    outputs: list[list[Tensor]]
    seconds: float = 0.0  # by our clock, from the request to the answer
    claimed_s: float = 0.0
    message_s: float = 0.0  # the longest of a few messages there and back, just before


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
) -> KernelVerdict:
    """Try a candidate's text; never raises for what the candidate does."""
    wanted = tuple(op.gradients) if gradients else ()
    known = KernelVerdict(op=op.name, device=device, passed=False, with_gradients=bool(wanted))
    try:
        check_text(parse_candidate(source, op.name))
    except RefusedError as error:
        return replace(known, kind=error.kind, reason=str(error))
    trial = _CandidateTrial(source, op, server, torch.device(device), wanted, limits or CandidateLimits())
    random_source = random.Random(os.urandom(16))
    tried = tuple(dtypes) or tuple(op.dtypes)
    # The least work of an operation with gradients is that of both directions: one alone has no speed of light.
    is_timed = timed and (gradients or not op.gradients)
    large = dict(shape) if shape else timed_shape(op, tried[0], torch.device(device))
    cases = draw_cases(op, tried, random_source, large=large, timed_dtype=tried[0] if is_timed else None)
    uses = [batch for one in tried for batch in draw_uses(op, one, random_source, gradients=gradients)]
    batches = _timed_batches(op, large, tried[0], torch.device(device).type, random_source) if is_timed else []
    try:
        with trial:
            worst, count = trial.judge_values([*([case] for case in cases), *uses])
            timing = None
            if batches:
                timing, worst_timed = trial.judge_time(batches, machine)
                worst = max(worst, worst_timed)
    except RefusedError as error:
        return replace(known, kind=error.kind, reason=str(error), barriers=trial.barriers)
    except torch.OutOfMemoryError as error:  # ours: the candidate's is one of its process
        what = "the GPU has too little memory to judge a kernel at these sizes"
        raise SystemFailure(Problem(where=op.name, what=what, fix="time it at a smaller --shape")) from error
    return replace(
        known,
        passed=True,
        cases=count + sum(map(len, batches)),
        worst_error=worst,
        barriers=trial.barriers,
        timing=timing,
    )


def _timed_batches(
    op: KernelOp, shape: Shape, dtype: torch.dtype, device_type: str, random_source: random.Random
) -> list[list[KernelCase]]:
    """Cases of both timed processes; every call has the next pattern of values, in an order that no kernel knows."""
    patterns = op_patterns(op)
    random_source.shuffle(patterns)
    endless = itertools.cycle(patterns)
    return [
        [
            KernelCase(shape=shape, dtype=dtype, seed=random_source.getrandbits(31), pattern=next(endless), timed=True)
            for _ in range(calls)
        ]
        for calls in 2 * (BATCHES[device_type] + 1) * [BATCH_CALLS[device_type]]
    ]


class _CandidateTrial:
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

    def __enter__(self) -> _CandidateTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self._data = torch.empty(0)
        if self._block is not None:
            self._block.close()
        if self._cache is not None:
            self._cache.cleanup()

    # ---- one process after the other ---------------------------------------------------------------------------------

    def judge_values(self, batches: Sequence[Sequence[KernelCase]]) -> tuple[float, int]:
        """Run all batches in one process, then compare; the worst error and the number of cases."""
        answers = self._run_batches(batches)
        return max(map(self._compare, answers)), sum(map(len, batches))

    def judge_time(
        self, batches: Sequence[Sequence[KernelCase]], machine: MachineLimits | None
    ) -> tuple[KernelTiming, float]:
        """Time in two processes, and compare every timed result; the worst error of them."""
        half, case = len(batches) // 2, batches[0][0]
        limits = machine or measure_limits(self.device, case.dtype)
        runs = [self._run_batches(part, timed=True) for part in (batches[:half], batches[half:])]
        worst = max(self._compare(answer) for answers in runs for answer in answers)
        work = self.op.count_work(case.shape, case.dtype)
        copying = COPY_ALLOWANCE * 2 * sum(tensor_bytes(one) for one in runs[0][0].outputs[0]) / limits.bytes_per_s
        handling = HANDLING_S / len(batches[0])
        measured = []
        for answers in runs:
            counted = answers[1:]  # the first warms up
            claimed = median(one.claimed_s for one in counted)
            ours = median(one.seconds for one in counted) - copying
            fastest = min(one.seconds for one in counted)
            least = limits.least_seconds(work) / LIGHT_ALLOWANCE[self.device.type]
            if claimed < least:
                raise RefusedError(
                    "light",
                    f"claims {format_seconds(claimed)} by its own clock, above the speed of light:"
                    f" {work.read_bytes:,} bytes in, {work.written_bytes:,} out and {work.flops:,} FLOPs take"
                    f" {format_seconds(least)} here at least",
                )
            # A busy machine delays messages; who delays them on purpose is held to our clock all the same.
            delayed = max(one.message_s for one in counted) / len(batches[0])
            if max(one.claimed_s for one in counted) + copying + handling + delayed < 0.5 * fastest:
                raise RefusedError(
                    "clock",
                    f"its own clock says {format_seconds(claimed)}, ours {format_seconds(fastest)} at least",
                )
            measured.append((max(claimed, ours), claimed))
        timing = KernelTiming(
            shape=case.shape,
            dtype=str(case.dtype).removeprefix("torch."),
            seconds=max(one for one, _ in measured),
            claimed_s=max(one for _, one in measured),
            first_s=measured[0][0],
            second_s=measured[1][0],
            least_s=limits.least_seconds(work),
            bytes_per_s=limits.bytes_per_s,
            flops_per_s=limits.flops_per_s,
        )
        return timing, worst

    def _run_batches(self, batches: Sequence[Sequence[KernelCase]], *, timed: bool = False) -> list[_CandidateAnswer]:
        self._make_arena(batches)
        if self.device.type == "cuda" and "triton" in self.source:
            self._compile_kernels([case for batch in batches for case in batch[:1]])
        process = self._start_process(compiling=False)
        try:
            answers = [self._run_batch(process, batch, timed=timed) for batch in batches]
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

    def _compile_kernels(self, cases: Sequence[KernelCase]) -> None:
        """Triton's compiler runs programs and writes files: it gets a process of its own, inputs that are then thrown
        away, and one folder, which later processes only read."""
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="phalanx-kernels-")
        new = {
            f"{case.dtype} {sorted(case.shape.items())} {self._asked(case)} {case.unused} {case.turned}": case
            for case in cases
        }
        new = {key: case for key, case in new.items() if key not in self._compiled}
        if not new:
            return
        process = self._start_process(compiling=True)
        try:
            for case in new.values():
                self._run_batch(process, [replace(case, seed=0, pattern=ORDINARY, kept_seed=None)], timed=False)
        finally:
            process.end()
        self._compiled |= set(new)

    def _notes(self) -> str:
        return printable(self._block.read_notes(), most=200) if self._block is not None else ""

    def _with_notes(self, error: RefusedError) -> RefusedError:
        notes = self._notes()
        return RefusedError("forbidden", f"tried what a kernel may not: {notes}") if notes else error

    # ---- one run -----------------------------------------------------------------------------------------------------

    def _asked(self, case: KernelCase) -> tuple[int, ...]:
        """The inputs whose gradients are asked for in a case."""
        return tuple(one for one in self.wanted if case.gradients_of is None or one in case.gradients_of)

    def _make_arena(self, batches: Sequence[Sequence[KernelCase]]) -> None:
        """Memory for the largest batch."""
        most = 0
        by_size = {f"{sorted(one[0].shape.items())} {one[0].dtype} {len(one)}": one for one in batches}
        for batch in by_size.values():
            end = HEADER_BYTES
            inputs = draw_inputs(self.op, batch[0], self.device)
            for _ in batch:
                end = self._place_case(inputs, self.wanted, end).end
            most = max(most, end)
        if self._data.numel() >= most:
            return
        on_gpu = self.device.type == "cuda"
        self._data = torch.empty(0)
        if self._block is not None and not on_gpu:
            self._block.close()
            self._block = None
        if self._block is None:
            self._block = HostBlock(HEADER_BYTES if on_gpu else most)
        self._data = self.server.gpu_memory(most, self.device) if on_gpu else self._block.data

    def _place_case(self, inputs: Sequence[Tensor], wanted: tuple[int, ...], start: int) -> _CasePlaces:
        kinds = [(_type_name(dtype), shape) for dtype, shape in result_kinds(self.op, inputs)]
        given = [(_type_name(one.dtype), tuple(one.shape)) for one in inputs]
        back = kinds if wanted else []
        asked = [given[place] for place in wanted]
        places, end = place_tensors([*given, *kinds, *back, *asked], start)
        rest = iter(places)
        parts = [[next(rest) for _ in part] for part in (given, kinds, back, asked)]
        return _CasePlaces(inputs=parts[0], outputs=parts[1], output_gradients=parts[2], gradients=parts[3], end=end)

    def _run_batch(self, process: CandidateProcess, batch: Sequence[KernelCase], *, timed: bool) -> _CandidateAnswer:
        """Fill the arena, ask for one run of every case, and take everything out again."""
        rounds = [_timed_ask(process, {"do": "nothing"})[0] for _ in range(3)] if timed else [0.0]
        process.pause()  # a thread that watches the arena must not begin before our clock does
        end, placed, given, wanted = HEADER_BYTES, [], [], self._asked(batch[0])
        for case in batch:
            inputs = draw_inputs(self.op, case, self.device)
            placed.append(self._place_case(inputs, wanted, end))
            given.append([*inputs, *_draw_gradients(case, inputs, placed[-1].output_gradients)])
            end = placed[-1].end
        used = self._data[HEADER_BYTES:end]
        used[:] = batch[0].poison
        for places, values in zip(placed, given, strict=True):
            for place, value in zip([*places.inputs, *places.output_gradients], values, strict=True):
                view_place(self._data, place).copy_(value)
        del given
        before = used.clone()
        request: dict[str, Any] = {
            "do": "run",
            "poison": not timed,
            "overlap": batch[0].overlap,
            "unused": batch[0].unused,
            "turned": batch[0].turned,
            "inputs": [[one.to_json() for one in places.inputs] for places in placed],
            "outputs": [[one.to_json() for one in places.outputs] for places in placed],
            "output_gradients": [[one.to_json() for one in places.output_gradients] for places in placed],
            "gradients": [[one.to_json() for one in places.gradients] for places in placed],
            "differentiable": list(wanted),
        }
        if timed:
            flush_caches(self.device, self._kept)
        synchronize_device(self.device)
        seconds, answer = _timed_ask(process, request)
        synchronize_device(self.device)
        for places in placed:  # all but results must be as it was: inputs, and the bands around everything
            for place in (*places.outputs, *places.gradients):
                part = slice(place.offset - HEADER_BYTES, place.offset - HEADER_BYTES + place.num_bytes)
                before[part] = used[part]
        if not torch.equal(before, used):
            raise _changed_memory(before, used, placed)
        claimed = answer.get("seconds")
        if not isinstance(claimed, float) or not math.isfinite(claimed) or claimed < 0.0:
            raise RefusedError("nonsense", "its process sent no time of its own")
        return _CandidateAnswer(
            cases=batch,
            outputs=[
                [view_place(self._data, place).clone() for place in (*places.outputs, *places.gradients)]
                for places in placed
            ],
            seconds=max(0.0, seconds - min(median(rounds), HANDLING_S)) / len(batch),
            claimed_s=claimed / len(batch),
            message_s=max(rounds),
        )

    def _compare(self, answer: _CandidateAnswer) -> float:
        """Compute the truth, now that the candidate's process is gone."""
        worst = 0.0
        for case, outputs in zip(answer.cases, answer.outputs, strict=True):
            wanted = self._asked(case)
            inputs = draw_inputs(self.op, case, self.device)
            back = _draw_gradients(case, inputs, self._place_case(inputs, wanted, 0).output_gradients)
            results = len(outputs) - len(wanted)
            numbers = [*self.op.decoded(tuple(outputs[:results]), inputs), *outputs[results:]]
            truth = find_truth(self.op, inputs, case.dtype, back, shape=case.shape)
            count = len(truth) - (len(self.op.gradients) if back else 0)
            truth = [*truth[:count], *(truth[count + self.op.gradients.index(place)] for place in wanted)]
            worst = max(worst, compare_values(numbers, truth, str(case)))
        return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class _CasePlaces:
    """Where the tensors of one case lie: given are inputs and gradients of results, asked for are the others."""

    inputs: list[Place]
    outputs: list[Place]
    output_gradients: list[Place]
    gradients: list[Place]
    end: int


def _timed_ask(process: CandidateProcess, request: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    process.resume()
    answer = process.ask(request)
    return time.perf_counter() - start, answer


def _draw_gradients(case: KernelCase, inputs: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    found = draw_output_gradients(case, inputs, [(DTYPES[one.dtype], one.shape) for one in places])
    # The truth has zeros where the candidate is given no gradient.
    return [torch.zeros_like(one) if number == case.unused else one for number, one in enumerate(found)]


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _changed_memory(before: Tensor, after: Tensor, placed: Sequence[_CasePlaces]) -> RefusedError:
    for places in placed:
        for number, place in enumerate((*places.inputs, *places.output_gradients)):
            part = slice(place.offset - HEADER_BYTES, place.offset - HEADER_BYTES + place.num_bytes)
            if not torch.equal(before[part], after[part]):
                inside = number < len(places.inputs)
                return RefusedError("input", f"changed {f'input {number}' if inside else 'the gradient it was given'}")
    return RefusedError("outside", "wrote outside of its tensors")
