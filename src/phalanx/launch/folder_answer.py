"""The state of a launched job from its run folder, where its system cannot be queried."""

from __future__ import annotations

from phalanx.io.values import text
from phalanx.launch.book import LaunchRecord
from phalanx.launch.system import CANCELLED, DONE, FAILED, RUNNING, WAITING, JobExplanation
from phalanx.record.run import open_run

RUN_STATES = {"done": DONE, "stopped": CANCELLED, "failed": FAILED}


def explain_from_folder(record: LaunchRecord, *, unseen: str, ask: str) -> JobExplanation:
    """Explain a job from its run folder; `unseen` is why the system cannot be queried, `ask` how it can be.

    Raises UserError without the folder.
    """
    status = open_run(record.run).status()
    run_state = text(status, "state")
    message = "".join(f": {line}" for line in text(status, "message").splitlines()[:1])
    return JobExplanation(
        id=record.id,
        state=RUN_STATES.get(run_state, RUNNING if run_state == "running" else WAITING),
        reason=f"its run folder says {run_state or 'nothing yet'}{message} ({unseen})",
        cure=f"phalanx watch {record.run} follows it from here; {ask}",
    )
