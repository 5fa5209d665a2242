"""Kernels: list, measure, write and verify them, and score kernel writers; printed by `phalanx kernels`.

>>> phalanx.kernels.verify("kernel.py", allow_code=True).passed  # doctest: +SKIP
True
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.io.codec import json_text, json_values
from phalanx.io.files import write_text
from phalanx.io.path_probes import path_exists
from phalanx.io.tables import text_table
from phalanx.io.write_errors import write_failure
from phalanx.units import GIB, format_bytes, format_flops, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.train.kernels.kernel_op import KernelOp
    from phalanx.train.kernels.lab.bench import BenchTable
    from phalanx.train.kernels.lab.candidate_guard import KernelVerdict
    from phalanx.train.kernels.lab.skill_eval import SkillScore

MOST_RUNS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """One operation in the list; `chosen` is the selector's choice on this machine, empty if there is none."""

    name: str
    summary: str
    variants: tuple[str, ...]
    devices: tuple[str, ...]
    error_bounds: Mapping[str, float]
    shapes: int
    has_gradients: bool
    chosen: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class KernelCatalogue(PublicResult):
    """Every operation with Phalanx kernels.

    >>> [entry.name for entry in phalanx.kernels.operations().entries]  # doctest: +SKIP
    """

    entries: tuple[KernelEntry, ...]

    def __str__(self) -> str:
        if not self.entries:
            return "no operation has kernels of its own yet"
        head = ["operation", "variants", "runs on", "error bound", "shapes", "gradient", "chosen here"]
        rows = [head]
        for entry in self.entries:
            bounds = ", ".join(f"{name} {bound:.1e}" for name, bound in entry.error_bounds.items())
            back = "yes" if entry.has_gradients else "no"
            devices, variants = ", ".join(entry.devices), ", ".join(entry.variants) or "reference only"
            rows.append([entry.name, variants, devices, bounds, str(entry.shapes), back, entry.chosen or "–"])
        lines = text_table(rows)
        return "\n".join([*lines, "", *(f"{entry.name}: {entry.summary}" for entry in self.entries)])


def operations(*, chosen: Mapping[str, str] | None = None) -> KernelCatalogue:
    """Return the operations with their variants, devices, error bounds, and the choice on this machine.

    `chosen` are choices to show in place of those in the user's cache.

    >>> print(phalanx.kernels.operations())  # doctest: +SKIP
    """
    from phalanx.train.kernels.selector import chosen_here

    entries = []
    chosen = chosen_here(list(_known_ops()), os.environ) if chosen is None else chosen
    for op in _known_ops().values():
        bounds = {str(dtype).removeprefix("torch."): float(op.error_bound(dtype)) for dtype in op.dtypes}
        entries.append(
            KernelEntry(
                name=op.name,
                summary=op.summary,
                variants=tuple(op.variants),
                devices=tuple(op.devices),
                error_bounds=bounds,
                shapes=len(op.shapes),
                has_gradients=bool(op.gradients),
                chosen=chosen.get(op.name, ""),
            )
        )
    return KernelCatalogue(entries=tuple(entries))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class KernelBench(PublicResult):
    """Measured variants of one operation.

    >>> phalanx.kernels.bench("rms-norm").write("results")  # doctest: +SKIP
    """

    table: BenchTable

    def __str__(self) -> str:
        t = self.table
        lines = [
            f"{t.op}, {t.dtype}, on {t.device} ({t.device_name}), torch {t.torch}, triton {t.triton}",
            f"  speed of light here: {format_bytes(t.bytes_per_s)}/s copied, {format_flops(t.flops_per_s)} in products",
        ]
        rows = [["shape", "variant", "time", "bytes", "FLOPs", "bytes/s", "of light", "error/bound"]]
        for row in t.rows:
            shape = ", ".join(f"{name} {size}" for name, size in row.shape.items())
            if row.problem:
                rows.append([shape, row.name, "–", "–", "–", "–", "–", row.problem])
                continue
            error = "not compared" if math.isnan(row.error) else f"{row.error:.2g}"
            rate = f"{format_bytes(row.moved_bytes / row.seconds)}/s"
            work = [format_bytes(row.moved_bytes), f"{row.flops:.3g}", rate, f"{row.light:.0%}", error]
            rows.append([shape, row.name, format_seconds(row.seconds), *work])
        return "\n".join([*lines, *text_table(rows, right=(2, 3, 4, 5, 6), indent=2)])

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements, with the date and the software."""
        return dict(json_values(self.table))

    def write(self, folder: str | Path) -> tuple[str, ...]:
        """Write the numbers as JSON and the roofline as SVG, under names that begin with the date; return the names."""
        from phalanx.train.kernels.lab.bench import roofline_svg

        where, t = _make_folder(folder), self.table
        stem = f"{t.date}-{t.op}-{t.dtype}-{t.device}"
        files = {f"{stem}.json": json_text(t, indent=1) + "\n"}
        if picture := roofline_svg(t):
            files[f"{stem}.svg"] = picture + "\n"
        for name, text in files.items():
            write_text(where / name, text, fix="name another folder with --out")
        return tuple(files)


def bench(
    op: str,
    *,
    shapes: Sequence[str | Mapping[str, int]] = (),
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = True,
    progress: bool | Tell = False,
) -> KernelBench:
    """Time every variant of an operation against eager PyTorch and torch.compile.

    `shapes` are texts such as "tokens=4096,width=2048" or mappings; without it, a shape of a real model that this
    device measures in reasonable time. `compiled` False leaves torch.compile out.

    >>> phalanx.kernels.bench("rms-norm", device="cpu", compiled=False)  # doctest: +SKIP
    """
    from phalanx.train.kernels.lab.bench import measure_op
    from phalanx.train.kernels.lab.candidate_file import find_op
    from phalanx.train.kernels.lab.trial_inputs import parse_shape

    operation = find_op(op, _known_ops())
    sizes = [parse_shape(shape) if isinstance(shape, str) else shape for shape in shapes]
    table = measure_op(operation, shapes=sizes, dtype=dtype, device=device, compiled=compiled, tell=teller(progress))
    return KernelBench(table=table)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class VerifiedKernel(PublicResult):
    """The guard's result for a kernel file, summarized by `passed` and `reason`.

    >>> phalanx.kernels.verify("kernel.py", allow_code=True).reason  # doctest: +SKIP
    ''
    """

    file: str
    verdict: KernelVerdict

    @property
    def passed(self) -> bool:
        """True if the kernel is correct in every case tried."""
        return self.verdict.passed

    @property
    def reason(self) -> str:
        """The reason of a refusal; empty if it passed."""
        return self.verdict.reason

    @property
    def exit_code(self) -> int:
        """0 passed, 1 refused."""
        return 0 if self.passed else 1

    def __str__(self) -> str:
        v = self.verdict
        if not v.passed:
            return f"{self.file}: refused ({v.kind}): {v.reason}" + self._barrier_line()
        back = ", with gradients" if v.with_gradients else ""
        lines = [
            f"{self.file}: passed as {v.op} on {v.device}: {plural(v.cases, 'case')}{back},"
            f" largest error {v.worst_error:.2f} of what is allowed"
        ]
        if t := v.timing:
            sizes = ", ".join(f"{name} {size}" for name, size in t.shape.items())
            second = "confirmed" if t.confirmed else "NOT confirmed; the slower counts"
            lines += [
                f"  {format_seconds(t.seconds)} at {sizes}, {t.dtype}: {t.light:.0%} of the speed of light"
                f" ({format_seconds(t.least_s)})",
                f"  first process {format_seconds(t.first_s)}, second {format_seconds(t.second_s)} ({second});"
                f" its own clock {format_seconds(t.claimed_s)}",
            ]
        return "\n".join(lines) + self._barrier_line()

    def _barrier_line(self) -> str:
        return f"\n  barriers: {', '.join(self.verdict.barriers)}" if self.verdict.barriers else ""

    def to_dict(self) -> dict[str, Any]:
        """Return file and verdict."""
        values = dict(json_values(self.verdict))
        if self.verdict.timing is not None:
            values["timing"] |= {"light": self.verdict.timing.light, "confirmed": self.verdict.timing.confirmed}
        return {"file": self.file, **values}


def verify(
    file: str | Path,
    *,
    op: str | None = None,
    device: str | None = None,
    shape: str | Mapping[str, int] | None = None,
    gradients: bool = True,
    timed: bool = True,
    time_limit_s: float = 60.0,
    memory_limit_bytes: int = 4 * GIB,
    allow_code: bool = False,
) -> VerifiedKernel:
    """Run a kernel file in a separate process and judge it: values, gradients, memory, time.

    `shape` is the shape for timing. Raises UserError if the file is not a kernel, or without `allow_code`: the file is
    a program, and verifying it runs it.

    >>> phalanx.kernels.verify("kernel.py", op="rms-norm", allow_code=True)  # doctest: +SKIP
    """
    from phalanx.train.kernels.lab.candidate_file import candidate_op, read_candidate
    from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer

    source = read_candidate(Path(file))
    operation = candidate_op(source, str(file), op, _known_ops())
    _ask_consent(str(file), allow_code)
    if not 0.0 < time_limit_s <= 3600.0:
        raise mistake("--time-limit", f"{time_limit_s:g} s is not in 1 to 3600 s")
    with CandidateServer() as server:
        from phalanx.train.kernels.lab.bench import find_device
        from phalanx.train.kernels.lab.candidate_guard import judge_candidate
        from phalanx.train.kernels.lab.trial_inputs import check_shape, parse_shape

        sizes = parse_shape(shape) if isinstance(shape, str) else shape
        if sizes is not None:
            check_shape(operation, sizes)
        verdict = judge_candidate(
            source,
            operation,
            server=server,
            device=str(find_device(device)),
            gradients=gradients,
            timed=timed,
            shape=sizes,
            limits=CandidateLimits(seconds=time_limit_s, memory_bytes=memory_limit_bytes),
        )
    return VerifiedKernel(file=str(file), verdict=verdict)


def _ask_consent(where: str, allowed: bool) -> None:
    if not allowed:
        why = "it is kept from files, network and other processes, and still it is somebody's program on your machine"
        raise mistake(where, "would be run", why=why, fix="read it, then give --allow-code (allow_code=True in Python)")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NewKernel(PublicResult):
    """The files of a new kernel.

    >>> phalanx.kernels.new("rms-norm", "my-kernel").files  # doctest: +SKIP
    ('kernel.py', 'reference.py', 'test_kernel.py', 'bench_kernel.py')
    """

    op: str
    folder: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"wrote {', '.join(self.files)} to {self.folder}\n"
            f"  verify it: phalanx kernels verify {Path(self.folder) / 'kernel.py'} --allow-code"
        )


def new(op: str, out: str | Path) -> NewKernel:
    """Write the template of a kernel with its reference, test and benchmark; the unchanged template passes the guard.

    Raises UserError if a file with one of these names exists.

    >>> phalanx.kernels.new("rms-norm", "my-kernel")  # doctest: +SKIP
    """
    from phalanx.train.kernels.lab.candidate_file import find_op
    from phalanx.train.kernels.lab.new_kernel import template_files

    files = template_files(find_op(op, _known_ops()))
    folder = Path(out)
    existing = [name for name in files if path_exists(folder / name)]
    if existing:
        raise mistake(str(folder / existing[0]), "is there already", fix="name another folder with --out")
    _make_folder(folder)
    for name, text in files.items():
        write_text(folder / name, text, fix="name another folder with --out")
    return NewKernel(op=op, folder=str(out), files=tuple(files))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SkillLift(PublicResult):
    """Pass rates of generated kernels with and without the skill in the prompt.

    >>> phalanx.kernels.skill_eval(proposer="./propose", allow_code=True).with_skill  # doctest: +SKIP
    0.75
    """

    score: SkillScore

    @property
    def with_skill(self) -> float:
        """Share of kernels that passed with SKILL.md in the prompt."""
        return self.score.pass_rate("with")

    @property
    def without_skill(self) -> float:
        """Share of kernels that passed without it."""
        return self.score.pass_rate("without")

    def __str__(self) -> str:
        rows = [["operation", "without the skill", "with the skill"]]
        names = list(dict.fromkeys(attempt.op for attempt in self.score.attempts))
        for name in names:
            cells = []
            for skill in ("without", "with"):
                results = [
                    attempt.passed for attempt in self.score.attempts if (attempt.op, attempt.skill) == (name, skill)
                ]
                cells.append(f"{sum(results)} of {len(results)}")
            rows.append([name, *cells])
        rows.append(["all", f"{self.without_skill:.0%}", f"{self.with_skill:.0%}"])
        kinds: dict[str, int] = {}
        for attempt in self.score.attempts:
            if not attempt.passed:
                kinds[attempt.kind] = kinds.get(attempt.kind, 0) + 1
        lines = text_table(rows, right=(1, 2))
        if kinds:
            counts_text = ", ".join(
                f"{kind} {count}" for kind, count in sorted(kinds.items(), key=lambda kind_count: -kind_count[1])
            )
            lines.append(f"why the others did not pass: {counts_text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return both rates and every attempt."""
        rates = {"with_skill": self.with_skill, "without_skill": self.without_skill}
        return dict(json_values({**rates, "attempts": self.score.attempts}))


def skill_eval(
    *,
    proposer: str | None = None,
    endpoint: str | None = None,
    model: str = "",
    replay: str | Path | None = None,
    record: str | Path | None = None,
    ops: Sequence[str] = (),
    runs: int = 1,
    device: str | None = None,
    timeout_s: float = 300.0,
    allow_code: bool = False,
    progress: bool | Tell = False,
) -> SkillLift:
    """Let a proposer write kernels with and without Phalanx's SKILL.md in the prompt, and judge each with the guard.

    The proposer is a command (prompt on stdin, answer on stdout), an OpenAI-compatible `endpoint` with a `model` (its
    key from PHALANX_PROPOSER_KEY or OPENAI_API_KEY), or a transcript that `record` wrote.

    >>> phalanx.kernels.skill_eval(proposer="./propose", runs=3, allow_code=True)  # doctest: +SKIP
    """
    from phalanx.train.kernels.lab.candidate_file import find_op
    from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer
    from phalanx.train.kernels.lab.proposers import CommandProposer, EndpointProposer, Proposer, ReplayProposer

    if sum(source is not None for source in (proposer, endpoint, replay)) != 1:
        raise mistake("phalanx kernels skill-eval", "needs one of --proposer, --endpoint and --replay")
    if not 1 <= runs <= MOST_RUNS:
        raise mistake("--runs", f"{runs} is not in 1 to {MOST_RUNS}")
    operations_by_name = _known_ops()
    chosen = [find_op(name, operations_by_name, where="--op") for name in ops] or list(operations_by_name.values())
    writer: Proposer
    if proposer is not None:
        writer = CommandProposer(proposer, timeout_s=timeout_s)
    elif endpoint is not None:
        writer = EndpointProposer(endpoint, model, environment=os.environ, timeout_s=timeout_s)
    else:
        writer = ReplayProposer(Path(str(replay)))
    _ask_consent("what the proposer writes", allow_code)
    lines: list[str] = []
    with CandidateServer() as server:
        from phalanx.train.kernels.lab.bench import find_device
        from phalanx.train.kernels.lab.skill_eval import evaluate_skill

        try:
            score = evaluate_skill(
                chosen,
                writer,
                server=server,
                runs=runs,
                device=str(find_device(device)),
                limits=CandidateLimits(),
                tell=teller(progress),
                record=lines.append,
            )
        finally:
            if record is not None and lines:
                write_text(Path(record), "\n".join(lines) + "\n", fix="name another file with --record")
    return SkillLift(score=score)


def _known_ops() -> dict[str, KernelOp]:
    try:
        from phalanx.train.kernels.operations import load_all
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = Problem(where="phalanx kernels", what="needs PyTorch", fix="pip install 'phalanx[train]'")
        raise SystemFailure(problem) from error
    return load_all()


def _make_folder(folder: str | Path) -> Path:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(folder, error, fix="name a writable folder") from error
    return Path(folder)


__all__ = [
    "KernelBench",
    "KernelCatalogue",
    "NewKernel",
    "SkillLift",
    "VerifiedKernel",
    "bench",
    "new",
    "operations",
    "skill_eval",
    "verify",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__"])
