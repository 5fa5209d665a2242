"""The guard: runs a candidate kernel in a separate process and judges its results and its time in this one.

A cheat fails because the candidate's process never has the data it would need. Inputs are drawn here, from seeds of
the operating system, and are in memory that both processes map; results are read from that memory after the
candidate's process has ended, and only then is the exact result computed, in float64, here. Every timed run has new
inputs, and its results are judged like all others. The candidate's own clock is only a claim: the slower of its clock
and the guard's counts, in the slower of two processes.
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

# Timed batches in each of two processes, after one that is checked and not counted; and calls per batch, each with its
# own inputs. A GPU's kernel takes less time than a message: the guard's clock needs many calls per message.
BATCHES = {"cpu": 5, "cuda": 3}
BATCH_CALLS = {"cpu": 1, "cuda": 16}
# A result faster than this many times the speed of light is refused. More on a CPU: its caches are faster than its
# memory, and flushing does not fully empty them.
LIGHT_ALLOWANCE = {"cpu": 4.0, "cuda": 1.15}
# Times the estimated time of copying results out, which the guard's clock includes and the candidate's does not.
COPY_ALLOWANCE = 1.5
# Upper bound of the process's work between a request and the kernel. Also the most that is subtracted from the guard's
# clock for a message and its answer, which a candidate could slow down on purpose.
HANDLING_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTiming:
    """Seconds of one call at one shape, with backward where there are gradients; `seconds` is the official time."""

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
        """Fraction of the speed of light that the kernel reaches."""
        return self.least_s / self.seconds if self.seconds else math.inf

    @property
    def confirmed(self) -> bool:
        """True if the times of the two processes differ by at most 25 %."""
        return max(self.first_s, self.second_s) <= 1.25 * min(self.first_s, self.second_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelVerdict:
    """The guard's verdict on a candidate."""

    op: str
    device: str
    passed: bool
    # Reason of a refusal in one word: values, result, input, time, memory, crash, import, forbidden, …
    kind: str = ""
    reason: str = ""
    cases: int = 0
    worst_error: float = 0.0  # the largest error over the allowed one, of all cases
    with_gradients: bool = False
    barriers: tuple[str, ...] = ()
    timing: KernelTiming | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CandidateAnswer:
    """The results of one request, copied out of the arena; seconds are per call."""

    cases: Sequence[KernelCase]
    outputs: list[list[Tensor]]
    seconds: float = 0.0  # by the guard's clock, from the request to the answer
    claimed_s: float = 0.0
    message_s: float = 0.0  # the longest of a few empty round trips just before


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
    """Judge a candidate's source: values in every case, then its time.

    Never raises for anything the candidate does; raises SystemFailure where the GPU has too little memory to judge
    it.
    """
    differentiable = tuple(op.gradients) if gradients else ()
    verdict = KernelVerdict(op=op.name, device=device, passed=False, with_gradients=bool(differentiable))
    try:
        check_text(parse_candidate(source, op.name))
    except RefusedError as error:
        return replace(verdict, kind=error.kind, reason=str(error))
    trial = _CandidateTrial(source, op, server, torch.device(device), differentiable, limits or CandidateLimits())
    random_source = random.Random(os.urandom(16))
    tried_dtypes = tuple(dtypes) or tuple(op.dtypes)
    # The minimum work of an operation with gradients is defined for forward plus backward, so only both are timed.
    is_timed = timed and (gradients or not op.gradients)
    large = dict(shape) if shape else timed_shape(op, tried_dtypes[0], torch.device(device))
    cases = draw_cases(op, tried_dtypes, random_source, large=large, timed_dtype=tried_dtypes[0] if is_timed else None)
    uses = [batch for dtype in tried_dtypes for batch in draw_uses(op, dtype, random_source, gradients=gradients)]
    batches = _timed_batches(op, large, tried_dtypes[0], torch.device(device).type, random_source) if is_timed else []
    try:
        with trial:
            worst, count = trial.judge_values([*([case] for case in cases), *uses])
            timing = None
            if batches:
                timing, worst_timed = trial.judge_time(batches, machine)
                worst = max(worst, worst_timed)
    except RefusedError as error:
        return replace(verdict, kind=error.kind, reason=str(error), barriers=trial.barriers)
    # This process ran out of memory; in the candidate's it would have been a RefusedError.
    except torch.OutOfMemoryError as error:
        problem_text = "the GPU has too little memory to judge a kernel at these sizes"
        raise SystemFailure(Problem(where=op.name, what=problem_text, fix="time it at a smaller --shape")) from error
    return replace(
        verdict,
        passed=True,
        cases=count + sum(map(len, batches)),
        worst_error=worst,
        barriers=trial.barriers,
        timing=timing,
    )


def _timed_batches(
    op: KernelOp, shape: Shape, dtype: torch.dtype, device_type: str, random_source: random.Random
) -> list[list[KernelCase]]:
    """Draw the cases of both timed processes; each call has the next pattern of values, in a random order."""
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
    """The shared memory and the processes of one candidate."""

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

    # ---- processes, one after the other ----------------------------------------------------------------------------

    def judge_values(self, batches: Sequence[Sequence[KernelCase]]) -> tuple[float, int]:
        """Run all batches in one process, then compare; return the worst error ratio and the number of cases."""
        answers = self._run_batches(batches)
        return max(map(self._compare, answers)), sum(map(len, batches))

    def judge_time(
        self, batches: Sequence[Sequence[KernelCase]], machine: MachineLimits | None
    ) -> tuple[KernelTiming, float]:
        """Time the batches in two processes and compare every timed result; return the timing and the worst error."""
        half, case = len(batches) // 2, batches[0][0]
        limits = machine or measure_limits(self.device, case.dtype)
        runs = [self._run_batches(process_batches, timed=True) for process_batches in (batches[:half], batches[half:])]
        worst = max(self._compare(answer) for answers in runs for answer in answers)
        work = self.op.count_work(case.shape, case.dtype)
        copying = (
            COPY_ALLOWANCE * 2 * sum(tensor_bytes(output) for output in runs[0][0].outputs[0]) / limits.bytes_per_s
        )
        handling = HANDLING_S / len(batches[0])
        measured = []
        for answers in runs:
            counted = answers[1:]  # the first warms up
            claimed = median(answer.claimed_s for answer in counted)
            guard_s = median(answer.seconds for answer in counted) - copying
            fastest = min(answer.seconds for answer in counted)
            least = limits.least_seconds(work) / LIGHT_ALLOWANCE[self.device.type]
            if claimed < least:
                raise RefusedError(
                    "light",
                    f"claims {format_seconds(claimed)} by its own clock, above the speed of light:"
                    f" {work.read_bytes:,} bytes in, {work.written_bytes:,} out and {work.flops:,} FLOPs take"
                    f" {format_seconds(least)} here at least",
                )
            # A busy machine delays messages. Delaying them on purpose does not help: the guard's clock still counts.
            delayed = max(answer.message_s for answer in counted) / len(batches[0])
            if max(answer.claimed_s for answer in counted) + copying + handling + delayed < 0.5 * fastest:
                raise RefusedError(
                    "clock",
                    f"its own clock says {format_seconds(claimed)}, ours {format_seconds(fastest)} at least",
                )
            measured.append((max(claimed, guard_s), claimed))
        timing = KernelTiming(
            shape=case.shape,
            dtype=str(case.dtype).removeprefix("torch."),
            seconds=max(official_s for official_s, _ in measured),
            claimed_s=max(claimed for _, claimed in measured),
            first_s=measured[0][0],
            second_s=measured[1][0],
            least_s=limits.least_seconds(work),
            bytes_per_s=limits.bytes_per_s,
            flops_per_s=limits.flops_per_s,
        )
        return timing, worst

    def _run_batches(self, batches: Sequence[Sequence[KernelCase]], *, timed: bool = False) -> list[_CandidateAnswer]:
        """Compile Triton kernels if needed, then run batches in one new process; raise RefusedError on a violation."""
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
        """Start a process for the candidate and let it load its source."""
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
        """Compile Triton kernels in a separate process that may run programs and write to one cache folder.

        Its inputs are discarded, and later processes only read the folder.
        """
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="phalanx-kernels-")
        new_cases = {
            f"{case.dtype} {sorted(case.shape.items())} {self._asked(case)} {case.unused} {case.turned}": case
            for case in cases
        }
        new_cases = {key: case for key, case in new_cases.items() if key not in self._compiled}
        if not new_cases:
            return
        process = self._start_process(compiling=True)
        try:
            for case in new_cases.values():
                self._run_batch(process, [replace(case, seed=0, pattern=ORDINARY, kept_seed=None)], timed=False)
        finally:
            process.end()
        self._compiled |= set(new_cases)

    def _notes(self) -> str:
        """Return the forbidden actions that the candidate's process noted."""
        return printable(self._block.read_notes(), most=200) if self._block is not None else ""

    def _with_notes(self, error: RefusedError) -> RefusedError:
        """Return a refusal for the noted actions, if there are any, instead of `error`."""
        notes = self._notes()
        return RefusedError("forbidden", f"tried what a kernel may not: {notes}") if notes else error

    # ---- one run -----------------------------------------------------------------------------------------------------

    def _asked(self, case: KernelCase) -> tuple[int, ...]:
        """Return the indices of the inputs whose gradients a case requests."""
        return tuple(index for index in self.wanted if case.gradients_of is None or index in case.gradients_of)

    def _make_arena(self, batches: Sequence[Sequence[KernelCase]]) -> None:
        """Allocate the arena for the largest batch."""
        arena_bytes = 0
        by_size = {f"{sorted(cases[0].shape.items())} {cases[0].dtype} {len(cases)}": cases for cases in batches}
        for batch in by_size.values():
            end = HEADER_BYTES
            inputs = draw_inputs(self.op, batch[0], self.device)
            for _ in batch:
                end = self._place_case(inputs, self.wanted, end).end
            arena_bytes = max(arena_bytes, end)
        if self._data.numel() >= arena_bytes:
            return
        on_gpu = self.device.type == "cuda"
        self._data = torch.empty(0)
        if self._block is not None and not on_gpu:
            self._block.close()
            self._block = None
        if self._block is None:
            self._block = HostBlock(HEADER_BYTES if on_gpu else arena_bytes)
        self._data = self.server.gpu_memory(arena_bytes, self.device) if on_gpu else self._block.data

    def _place_case(self, inputs: Sequence[Tensor], wanted: tuple[int, ...], start: int) -> _CasePlaces:
        """Lay out the tensors of one case in the arena, from byte `start`."""
        kinds = [(_type_name(dtype), shape) for dtype, shape in result_kinds(self.op, inputs)]
        input_kinds = [(_type_name(tensor.dtype), tuple(tensor.shape)) for tensor in inputs]
        back_kinds = kinds if wanted else []
        gradient_kinds = [input_kinds[place] for place in wanted]
        places, end = place_tensors([*input_kinds, *kinds, *back_kinds, *gradient_kinds], start)
        next_places = iter(places)
        groups = [
            [next(next_places) for _ in group_kinds] for group_kinds in (input_kinds, kinds, back_kinds, gradient_kinds)
        ]
        return _CasePlaces(
            inputs=groups[0], outputs=groups[1], output_gradients=groups[2], gradients=groups[3], end=end
        )

    def _run_batch(self, process: CandidateProcess, batch: Sequence[KernelCase], *, timed: bool) -> _CandidateAnswer:
        """Fill the arena, request one run of every case, and copy the results out."""
        round_trips = [_timed_ask(process, {"do": "nothing"})[0] for _ in range(3)] if timed else [0.0]
        # A thread of the candidate that watches the arena must not start working before the guard's clock does.
        process.pause()
        end, placed, case_values, differentiable = HEADER_BYTES, [], [], self._asked(batch[0])
        for case in batch:
            inputs = draw_inputs(self.op, case, self.device)
            placed.append(self._place_case(inputs, differentiable, end))
            case_values.append([*inputs, *_draw_gradients(case, inputs, placed[-1].output_gradients)])
            end = placed[-1].end
        used = self._data[HEADER_BYTES:end]
        used[:] = batch[0].poison
        for places, values in zip(placed, case_values, strict=True):
            for place, value in zip([*places.inputs, *places.output_gradients], values, strict=True):
                view_place(self._data, place).copy_(value)
        del case_values
        before = used.clone()
        request: dict[str, Any] = {
            "do": "run",
            "poison": not timed,
            "overlap": batch[0].overlap,
            "unused": batch[0].unused,
            "turned": batch[0].turned,
            "inputs": [[place.to_json() for place in places.inputs] for places in placed],
            "outputs": [[place.to_json() for place in places.outputs] for places in placed],
            "output_gradients": [[place.to_json() for place in places.output_gradients] for places in placed],
            "gradients": [[place.to_json() for place in places.gradients] for places in placed],
            "differentiable": list(differentiable),
        }
        if timed:
            flush_caches(self.device, self._kept)
        synchronize_device(self.device)
        seconds, answer = _timed_ask(process, request)
        synchronize_device(self.device)
        # Everything except results must be unchanged: inputs, and the bands around all tensors.
        for places in placed:
            for place in (*places.outputs, *places.gradients):
                place_bytes = slice(place.offset - HEADER_BYTES, place.offset - HEADER_BYTES + place.num_bytes)
                before[place_bytes] = used[place_bytes]
        if not torch.equal(before, used):
            raise _changed_memory(before, used, placed)
        claimed_s = answer.get("seconds")
        if not isinstance(claimed_s, float) or not math.isfinite(claimed_s) or claimed_s < 0.0:
            raise RefusedError("nonsense", "its process sent no time of its own")
        return _CandidateAnswer(
            cases=batch,
            outputs=[
                [view_place(self._data, place).clone() for place in (*places.outputs, *places.gradients)]
                for places in placed
            ],
            seconds=max(0.0, seconds - min(median(round_trips), HANDLING_S)) / len(batch),
            claimed_s=claimed_s / len(batch),
            message_s=max(round_trips),
        )

    def _compare(self, answer: _CandidateAnswer) -> float:
        """Compute the exact results, now that the candidate's process is gone; return the worst error ratio."""
        worst = 0.0
        for case, outputs in zip(answer.cases, answer.outputs, strict=True):
            differentiable = self._asked(case)
            inputs = draw_inputs(self.op, case, self.device)
            output_gradients = _draw_gradients(
                case, inputs, self._place_case(inputs, differentiable, 0).output_gradients
            )
            results = len(outputs) - len(differentiable)
            numbers = [*self.op.decoded(tuple(outputs[:results]), inputs), *outputs[results:]]
            truth = find_truth(self.op, inputs, case.dtype, output_gradients, shape=case.shape)
            count = len(truth) - (len(self.op.gradients) if output_gradients else 0)
            truth = [*truth[:count], *(truth[count + self.op.gradients.index(place)] for place in differentiable)]
            worst = max(worst, compare_values(numbers, truth, str(case)))
        return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class _CasePlaces:
    """The places of one case's tensors: inputs, results, given gradients of results, requested gradients of inputs."""

    inputs: list[Place]
    outputs: list[Place]
    output_gradients: list[Place]
    gradients: list[Place]
    end: int


def _timed_ask(process: CandidateProcess, request: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Resume the process, send a request, and return the seconds until its answer with the answer."""
    start = time.perf_counter()
    process.resume()
    answer = process.ask(request)
    return time.perf_counter() - start, answer


def _draw_gradients(case: KernelCase, inputs: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """Draw the gradients of a case's results."""
    gradients = draw_output_gradients(case, inputs, [(DTYPES[place.dtype], place.shape) for place in places])
    # Zeros for the unused result, for which the candidate gets no gradient.
    return [torch.zeros_like(grad) if number == case.unused else grad for number, grad in enumerate(gradients)]


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _changed_memory(before: Tensor, after: Tensor, placed: Sequence[_CasePlaces]) -> RefusedError:
    """Return the refusal for a write outside of results: to an input, or outside of all tensors."""
    for places in placed:
        for number, place in enumerate((*places.inputs, *places.output_gradients)):
            place_bytes = slice(place.offset - HEADER_BYTES, place.offset - HEADER_BYTES + place.num_bytes)
            if not torch.equal(before[place_bytes], after[place_bytes]):
                is_input = number < len(places.inputs)
                return RefusedError(
                    "input", f"changed {f'input {number}' if is_input else 'the gradient it was given'}"
                )
    return RefusedError("outside", "wrote outside of its tensors")
