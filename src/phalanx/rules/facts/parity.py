"""Parity of a narrow number format: the losses of two runs of one training, in a narrow and in a wide format."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import UserError, mistake
from phalanx.io.values import at
from phalanx.record.run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.account.summary import Summary

NARROW = ("fp8", "fp4")
# Sections of the job that must be equal for two losses to be comparable; precision may differ.
SAME = ("model", "data", "batch", "optim")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityFacts:
    """The losses of two runs; `held_out` is true if they are losses on held-out text."""

    narrow: str  # name of the run
    wide: str
    narrow_format: str
    wide_format: str
    model: str
    tokens: int
    narrow_loss: float
    wide_loss: float
    held_out: bool

    @property
    def gap(self) -> float:
        """The loss of the narrow run relative to the wide one, less 1; positive where the narrow run learnt less."""
        return self.narrow_loss / self.wide_loss - 1.0


def parity_of(first: Run, second: Run) -> ParityFacts:
    """Return the parity of two runs, in either order; raises UserError where they cannot be compared."""
    # Deferred: the import takes 80 ms, and few checks need it.
    from phalanx.record.account.summary import summarize_briefly
    from phalanx.record.archive.history import RunHistory

    jobs = [at(run.plan(), "job") for run in (first, second)]
    formats = [str(at(job, "precision").get("compute")) for job in jobs]
    if (formats[0] in NARROW) == (formats[1] in NARROW):
        raise _refused_pair(
            first, second, f"compute in {formats[0]} and {formats[1]}", "one in fp8 or fp4, one in bf16 or fp32"
        )
    order = (0, 1) if formats[0] in NARROW else (1, 0)
    narrow, wide = ((first, second)[place] for place in order)
    differing = [name for name in SAME if jobs[0].get(name) != jobs[1].get(name)]
    if differing:
        raise _refused_pair(
            narrow, wide, f"differ in [{'], ['.join(differing)}]", "train the same job twice, but for precision"
        )
    summaries = [summarize_briefly(run, RunHistory.open(run)) for run in (narrow, wide)]
    if summaries[0].tokens != summaries[1].tokens or not summaries[0].tokens:
        message = f"saw {summaries[0].tokens:,} and {summaries[1].tokens:,} tokens"
        raise _refused_pair(narrow, wide, message, "let both end at the same step")
    return _parity_facts(narrow, wide, formats=[formats[place] for place in order], statement=summaries)


def _parity_facts(narrow: Run, wide: Run, *, formats: list[str], statement: list[Summary]) -> ParityFacts:
    held_out = all(summary.evaluation is not None and summary.evaluation.loss is not None for summary in statement)
    losses = [
        summary.evaluation.loss if held_out and summary.evaluation else summary.last_loss for summary in statement
    ]
    if any(loss is None or not math.isfinite(loss) or loss <= 0 for loss in losses):
        raise _refused_pair(
            narrow, wide, f"have the losses {losses[0]} and {losses[1]}", "runs that end with a finite loss"
        )
    return ParityFacts(
        narrow=narrow.name,
        wide=wide.name,
        narrow_format=formats[0],
        wide_format=formats[1],
        model=statement[0].model,
        tokens=statement[0].tokens,
        narrow_loss=float(losses[0] or 0.0),
        wide_loss=float(losses[1] or 0.0),
        held_out=held_out,
    )


def _refused_pair(first: Run, second: Run, what: str, fix: str) -> UserError:
    why = "parity is the loss of one training in two formats"
    return mistake(f"--parity {first.name} {second.name}", what, why=why, fix=fix)
