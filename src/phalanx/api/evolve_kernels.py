"""`phalanx.evolve.kernels`: search kernel templates and their parameters by measured time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.evolve_search import FinishedSearch, finish_search, picture_lines
from phalanx.api.results import PublicResult, Tell, teller
from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.evolve.kernel_problem import Evaluator, KernelMeasurement, KernelProblem
from phalanx.io.files import write_text
from phalanx.io.tables import text_table
from phalanx.units import plural

WHERE = "phalanx evolve kernels"
OPS = ("rms-norm",)
SHAPES = {"cuda": (16384, 4096), "cpu": (2048, 2048)}  # tokens, width
# Seconds a measuring process may take: to start, and for each candidate.
START_S, EACH_S = 120.0, 20.0
MOST_ANSWER = 4 << 20
# Candidates judged, fastest first, until the guard accepts one.
MOST_JUDGED = 3


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvolvedKernels(PublicResult):
    """A search over kernels; `write` saves the fastest as a candidate file.

    >>> search = phalanx.evolve.kernels("rms-norm", device="cpu", evaluations=24)  # doctest: +SKIP
    >>> search.light_share  # doctest: +SKIP
    """

    op: str
    device: str
    search: FinishedSearch
    source: str  # of the fastest; empty if none was correct, or the guard refused them
    light_share: float | None
    first_share: float | None  # of the first correct one
    guard: str  # the result of `phalanx kernels verify` on the fastest; empty if there is none, or after Ctrl-C

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C."""
        return self.search.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return the fastest, and the best of every cell."""
        from phalanx.io.codec import json_values

        return {
            "op": self.op,
            "device": self.device,
            "light_share": self.light_share,
            "first_light_share": self.first_share,
            "guard": self.guard,
            "source": self.source,
            **json_values(self.search.to_dict()),
        }

    def write(self, path: str | Path) -> None:
        """Write the fastest as a file for `phalanx kernels verify`."""
        if not self.source:
            reason = f"the guard {self.guard}" if self.guard else ""
            raise mistake(WHERE, "no kernel was right, so there is none to write", why=reason, fix="search on")
        write_text(Path(path), self.source, fix="name another --out")

    def __str__(self) -> str:
        elites = [self.search.archive.entries[place] for place in self.search.archive.elites.values()]
        rows = [["share of light", "time", "values"]]
        for entry in sorted(elites, key=lambda elite: -elite.fitness)[:8]:
            seconds = entry.outcome.details.get("seconds")
            time_text = f"{1e6 * seconds:.1f} µs" if isinstance(seconds, float) else ""
            genes = {name: value for name, value in entry.genome.items() if name != "source"}
            words = ", ".join(f"{name} {value}" for name, value in genes.items())
            rows.append(
                [f"{entry.fitness:.1%}", time_text, words + (", own source" if "source" in entry.genome else "")]
            )
        first = f", first {self.first_share:.1%}" if self.first_share is not None else ""
        head = f"best {self.light_share:.1%} of the speed of light{first}" if self.light_share else "none was right"
        return "\n".join(
            [
                f"{self.op} on {self.device}: {head}",
                *([f"guard: {self.guard}"] if self.guard else []),
                "",
                *text_table(rows, right=range(2)),
                "",
                *picture_lines(self.search),
                "",
                *self.search.summary_lines(),
            ]
        )


def kernels(
    op: str = "rms-norm",
    *,
    device: str = "auto",
    tokens: int = 0,
    width: int = 0,
    evaluations: int = 120,
    seed: int = 0,
    archive: str | Path | None = None,
    proposer: str = "",
    picture: str | Path | None = None,
    evaluate: Evaluator | None = None,
    progress: bool | Tell = False,
) -> EvolvedKernels:
    """Search kernels of an operation by MAP-Elites: templates and their parameters, by measured share of light speed.

    `device` is cuda, cpu or auto. `evaluate` measures sources (a KernelMeasurement each) in place of the built-in
    processes; only with such an evaluator may a `proposer` write its own sources. Raises UserError for a device that
    is missing and for an archive of another operation, shape or device.

    >>> search = phalanx.evolve.kernels("rms-norm", device="cpu", evaluations=24)  # doctest: +SKIP
    >>> search.write("fastest.py")  # doctest: +SKIP
    """
    if op not in OPS:
        raise mistake(WHERE, f'there are no templates of "{op[:40]}"', fix=f"use {', '.join(OPS)}")
    tell = teller(progress)
    place = _find_device(device, tell)
    sizes = (tokens or SHAPES[place][0], width or SHAPES[place][1])
    for option, size in zip(("--tokens", "--width"), sizes, strict=True):
        if not 8 <= size <= 1 << 20 or sizes[0] * sizes[1] > 1 << 31:
            raise mistake(option, f"{size:,} is not between 8 and {1 << 20:,}, or the two are too large together")
    shape = {"tokens": sizes[0], "width": sizes[1]}
    # The guard takes seconds per candidate: it judges the fastest at the end, not all during the search.
    measure = evaluate or ProcessEvaluator(op=op, device=place, shape=shape)
    about = measure.about() if isinstance(measure, ProcessEvaluator) else {}
    problem = KernelProblem(
        op=op, device=place, shape=shape, about=about, evaluator=measure, allows_source=evaluate is not None
    )
    search = finish_search(
        problem,
        archive=Path(archive) if archive is not None else None,
        evaluations=evaluations,
        seed=seed,
        proposer=proposer,
        picture=picture,
        title=f"{op} on {place}: share of the speed of light",
        show=lambda value: f"{value:.1%} of light",
        tell=tell,
    )
    elites = sorted(
        (search.archive.entries[place_or_elite] for place_or_elite in search.archive.elites.values()),
        key=lambda place_or_elite: -place_or_elite.fitness,
    )
    best, guard, is_refused = search.archive.best(), "", False
    if elites and not search.exit_code:
        passed, guard = _judge_fastest(
            op, place, [problem.source(elite.genome) for elite in elites[:MOST_JUDGED]], tell
        )
        best, is_refused = (elites[passed], False) if passed is not None else (best, True)
        if passed is not None and place == "cuda":
            _remember(op, elites[passed].genome, sizes[1], tell)
    first = next((entry for entry in search.archive.entries if entry.outcome.fitness is not None), None)
    return EvolvedKernels(
        op=op,
        device=place,
        search=search,
        source=problem.source(best.genome) if best and not is_refused else "",
        light_share=best.fitness if best else None,
        first_share=first.fitness if first else None,
        guard=guard,
    )


def _judge_fastest(op: str, device: str, sources: Sequence[str], tell: Tell) -> tuple[int | None, str]:
    """Return the position of the first source that the guard accepts, fastest first, and its message."""
    from phalanx.train.kernels.lab.candidate_guard import judge_candidate
    from phalanx.train.kernels.lab.candidate_server import CandidateServer
    from phalanx.train.kernels.operations import load_all

    guard_message = ""
    with CandidateServer() as server:
        for place, source in enumerate(sources):
            # Templates are forward only, and an operation with gradients has no speed of light in one direction.
            verdict = judge_candidate(
                source, load_all()[op], server=server, device=device, gradients=False, timed=False
            )
            if verdict.passed:
                return place, f"passed, {plural(verdict.cases, 'case')}"
            guard_message = f"refused the {len(sources[: place + 1])} fastest: {verdict.reason}"
            tell(f"the guard refuses number {place + 1}: {verdict.reason}")
    return None, guard_message


def _remember(op: str, genome: Mapping[str, Any], width: int, tell: Tell) -> None:
    """Add the winner to the variants that the selector measures; a source written by a language model is not added."""
    if "source" in genome:
        return
    from phalanx.hardware.kernel_choices import kernel_cache_folder
    from phalanx.train.kernels.evolved_norm import remember_winner

    folder = kernel_cache_folder(os.environ)
    if folder is not None:
        remember_winner(op, genome, width, "cuda", folder)
        tell(f"the winner is in the selector's cache: training measures it for rows of {width:,} on this GPU")


def _find_device(device: str, tell: Tell) -> str:
    from phalanx.hardware.discover import discover

    if device not in ("auto", "cuda", "cpu"):
        raise mistake("--device", f'"{device[:40]}" is not known', fix="use auto, cuda or cpu")
    gpus = 0 if device == "cpu" else len(discover().gpus)
    if device == "cuda" and not gpus:
        raise mistake("--device", "there is no GPU on this machine", fix="--device cpu searches plain PyTorch kernels")
    if device == "auto" and not gpus:
        tell("no GPU on this machine: plain PyTorch kernels are searched on one core")
    return "cuda" if gpus else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEvaluator:
    """Measures sources in separate processes; a source that crashes or hangs ends only its own process."""

    op: str
    device: str
    shape: dict[str, int]

    def about(self) -> dict[str, Any]:
        """Return what times depend on besides the source."""
        head, _ = self._run([])
        return {"on": head.get("name"), "torch": head.get("torch")}

    def __call__(self, sources: Sequence[str]) -> list[KernelMeasurement]:
        measurements: list[KernelMeasurement] = []
        while len(measurements) < len(sources):
            head, answers = self._run(sources[len(measurements) :])
            measurements += [self._measurement(head, answer) for answer in answers]
            if len(measurements) < len(sources):  # the process ended during this source
                measurements.append(KernelMeasurement(accepted=False, why="it ended its process, or took too long"))
        return measurements

    def _measurement(self, head: dict[str, Any], answer: dict[str, Any]) -> KernelMeasurement:
        seconds, bytes_moved = answer.get("seconds"), answer.get("bytes")
        if not isinstance(seconds, float) or not isinstance(bytes_moved, int):
            return KernelMeasurement(accepted=False, why=str(answer.get("why", ""))[:500])
        share = bytes_moved / head["bytes_per_s"] / seconds
        if share > 1.05 and self.device == "cuda":  # on a CPU the inputs may be in a cache
            return KernelMeasurement(accepted=False, why=f"{share:.0%} of the speed of light: not believed")
        return KernelMeasurement(accepted=True, seconds=seconds, light_share=share)

    def _run(self, sources: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the facts about the device, and the answers until the process ended."""
        request = {"op": self.op, "device": self.device, "shape": self.shape, "sources": list(sources)}
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.train.kernels.candidate_timing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(json.dumps(request).encode(), timeout=START_S + EACH_S * len(sources))
        except subprocess.TimeoutExpired as late:
            out, err = late.stdout or b"", late.stderr or b""
        finally:
            _end_process(process)
        lines = [line for line in out[:MOST_ANSWER].decode(errors="replace").splitlines() if line.startswith("{")]
        if not lines:
            last = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise SystemFailure(
                Problem(
                    where=WHERE,
                    what=f"the process that measures kernels did not start: {last[0][:300]}",
                    fix="needs PyTorch: pip install 'phalanx[train]'",
                )
            )
        values = []
        for line in lines:
            try:
                values.append(json.loads(line))
            except ValueError:
                break  # cut off at the end of the process
        return values[0], values[1:]


def _end_process(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
