"""Evaluation of the skill: the share of kernels that pass the guard, with the skill in the prompt and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.io.files import shipped_text
from phalanx.io.values import printable
from phalanx.train.kernels.kernel_op import KernelOp
from phalanx.train.kernels.lab.candidate_file import parse_candidate
from phalanx.train.kernels.lab.candidate_guard import judge_candidate
from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer
from phalanx.train.kernels.lab.new_kernel import reference_text
from phalanx.train.kernels.lab.proposers import NoAnswerError, Proposer, kernel_of_answer

SKILL_FOLDER = Path(__file__).parent / "skill"
WITH_SKILL, WITHOUT_SKILL = "with", "without"

_TASK = """Write a kernel in Python for the operation "{name}": {summary}.

Answer with one Python file in a fenced block. It holds the line OP = "{name}" and a function kernel(*inputs) that takes
the same tensors as the reference below and returns the same results: a tensor or a tuple of tensors, each of the type
that the reference gives for inputs of that type. Only torch, triton, math and typing may be imported.{remarks}

The reference:

```python
{imports}

{reference}
```
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillAttempt:
    """One answer and its verdict."""

    op: str
    skill: str  # "with" or "without"
    run: int
    passed: bool
    kind: str = ""  # the kind of the guard's verdict, or "no answer", "no kernel"
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillScore:
    """All attempts, and the share that passed."""

    attempts: tuple[SkillAttempt, ...]

    def pass_rate(self, skill: str) -> float:
        """Return the share of attempts that passed, with or without the skill."""
        attempts = [attempt for attempt in self.attempts if attempt.skill == skill]
        return sum(attempt.passed for attempt in attempts) / len(attempts) if attempts else 0.0


def skill_text() -> str:
    """Return the shipped SKILL.md without its front matter."""
    text = shipped_text(__file__, "skill/SKILL.md")
    return text.split("---\n", 2)[2].strip() if text.startswith("---\n") else text


def task_prompt(op: KernelOp, *, with_skill: bool) -> str:
    """Return the prompt for an operation, with or without the skill."""
    imports, reference, _ = reference_text(op)
    gradients_remark = (
        f" Its results must be differentiable in inputs {', '.join(map(str, op.gradients))}." if op.gradients else ""
    )
    codes_remark = (
        " Results are codes of numbers: what they stand for is compared, within rounding." if op.format else ""
    )
    task = _TASK.format(
        name=op.name,
        summary=op.summary.rstrip("."),
        remarks=gradients_remark + codes_remark,
        imports=imports,
        reference=reference.strip(),
    )
    return f"{skill_text()}\n\n---\n\n{task}" if with_skill else task


def evaluate_skill(
    ops: Sequence[KernelOp],
    proposer: Proposer,
    *,
    server: CandidateServer,
    runs: int,
    device: str,
    limits: CandidateLimits,
    tell: Callable[[str], None],
    record: Callable[[str], None] = lambda line: None,
) -> SkillScore:
    """Request a kernel for every operation with and without the skill, `runs` times each, and judge it.

    A failed attempt is counted and the evaluation continues; raises SystemFailure if there was no answer at all.
    """
    attempts = []
    for op in ops:
        for skill in (WITHOUT_SKILL, WITH_SKILL):
            prompt = task_prompt(op, with_skill=skill == WITH_SKILL)
            for run in range(runs):
                attempt = _attempt(op, skill, run, prompt, proposer, server, device, limits, record)
                attempts.append(attempt)
                outcome = "passed" if attempt.passed else f"{attempt.kind}: {attempt.reason}"
                tell(f"{op.name}, {skill} the skill, run {run + 1}: {outcome}"[:300])
    if attempts and all(attempt.kind == "no answer" for attempt in attempts):
        problem = Problem(where="proposer", what=f"gave no answer at all: {attempts[0].reason}")
        raise SystemFailure(problem)
    return SkillScore(attempts=tuple(attempts))


def _attempt(
    op: KernelOp,
    skill: str,
    run: int,
    prompt: str,
    proposer: Proposer,
    server: CandidateServer,
    device: str,
    limits: CandidateLimits,
    record: Callable[[str], None],
) -> SkillAttempt:
    """Request one kernel, record the answer, and judge it."""

    def failed(kind: str, reason: str) -> SkillAttempt:
        return SkillAttempt(op=op.name, skill=skill, run=run, passed=False, kind=kind, reason=reason)

    try:
        answer = proposer.propose(prompt)
    except NoAnswerError as error:
        return failed("no answer", str(error))
    record(json.dumps({"prompt": prompt, "answer": answer}))
    source = kernel_of_answer(answer)
    if not source:
        return failed("no kernel", f"the answer holds no function kernel: {printable(answer.strip()[:80])!r}")
    try:
        parse_candidate(source, "answer")
    except UserError as error:
        return failed("no kernel", error.problems[0].what)
    verdict = judge_candidate(source, op, server=server, device=device, timed=False, limits=limits)
    return SkillAttempt(
        op=op.name, skill=skill, run=run, passed=verdict.passed, kind=verdict.kind, reason=verdict.reason
    )
