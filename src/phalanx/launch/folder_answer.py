"""What a run folder tells of a launched job where its system cannot be asked."""

from __future__ import annotations

from phalanx.io.values import text
from phalanx.launch.book import LaunchRecord
from phalanx.launch.system import CANCELLED, DONE, FAILED, RUNNING, WAITING, JobExplanation
from phalanx.record.run import open_run

RUN_STATES = {"done": DONE, "stopped": CANCELLED, "failed": FAILED}


def explain_from_folder(record: LaunchRecord, *, unseen: str, ask: str) -> JobExplanation:
    """`unseen` says why the system cannot be asked, `ask` how it can; raises UserError without the folder."""
    status = open_run(record.run).status()
    told = text(status, "state")
    said = "".join(f": {line}" for line in text(status, "message").splitlines()[:1])
    return JobExplanation(
        id=record.id,
        state=RUN_STATES.get(told, RUNNING if told == "running" else WAITING),
        reason=f"its run folder says {told or 'nothing yet'}{said} ({unseen})",
        cure=f"phalanx watch {record.run} follows it from here; {ask}",
    )
