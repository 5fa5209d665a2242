"""Records of drills: signed and written after each drill, read and checked again by `check` and others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, warn
from phalanx.errors import SystemFailure
from phalanx.io.codec import json_values
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.api.drills import DrillCall
    from phalanx.plan.plan import Plan
    from phalanx.train.drill.faults import Fault
    from phalanx.train.drill.peer_drill import PeerDrillResult
    from phalanx.train.drill.perform import DrillResult as DrillOutcome


def keep_record(
    call: DrillCall, faults: Sequence[Fault], outcome: DrillOutcome | PeerDrillResult, plan: Plan, **more: object
) -> Path:
    """Sign and write the record; copy it to the user's store if every verdict holds."""
    from phalanx.io.files import write_text
    from phalanx.job.load import job_to_dict
    from phalanx.record.drill_record import drill_subject, key_path, store_path
    from phalanx.rules.profiles import profile_of
    from phalanx.train.drill.drill_report import drill_key, store_record, write_record

    body = {
        "run": outcome.run.name,
        "job": call.job,
        "seed": call.seed if call.chaos else None,
        "agents": call.hosts,  # the key since 0.4, as in older records
        "spares": call.spares,
        "faults": [fault.text for fault in faults],
        "state": outcome.state,
        "ok": outcome.ok,
        "outcomes": json_values(outcome.outcomes),
        "verdicts": json_values(outcome.verdicts),
        "numbers": json_values(outcome.numbers),
        # The record counts only for this profile and this job.
        "profile": profile_of(plan.cluster).name,
        "subject": drill_subject(job_to_dict(plan.job), asdict(plan.layout), base=Path(call.job).parent),
        **more,
    }
    path = write_record(outcome.run, body, drill_key(key_path(os.environ)))
    if outcome.ok:
        try:
            store_record(path, store_path(os.environ))
        except SystemFailure as error:
            # The record itself is written: its result matters more than the copy.
            warn(error.problems, call.tell)
    if call.out is not None:
        write_text(call.out, path.read_text(encoding="utf-8"))
    return path


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DrillRecord(PublicResult):
    """A record of a drill: its contents, changes of its signature and evidence, and its failed verdicts."""

    path: Path
    record: dict[str, Any]
    wrong: tuple[str, ...]
    failed: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{plural(len(self.record['faults']), 'fault')}, {plural(len(self.record['files']), 'file')}"
        changes = self.wrong or ("signature and evidence are unchanged",)
        failed = f"  failed verdicts: {', '.join(self.failed) or 'none'}"
        return "\n".join([f"{self.path}: {counts}", *(f"  {text}" for text in changes), failed])

    def to_dict(self) -> dict[str, Any]:
        """Return the record and its problems."""
        ok = not self.wrong and not self.failed
        return {"ok": ok, "wrong": list(self.wrong), "failed": list(self.failed), "record": json_values(self.record)}

    @property
    def exit_code(self) -> int:
        """0 for a record that holds, 1 if it was changed or a verdict failed."""
        return 1 if self.wrong or self.failed else 0


def read_drill_record(path: str | Path) -> DrillRecord:
    """Read the record of a drill, and check its signature and the digests of its evidence.

    >>> read_drill_record("drill.json").wrong  # doctest: +SKIP
    ()
    """
    from phalanx.record.drill_record import check_record, key_path
    from phalanx.train.drill.drill_report import drill_key

    record, wrong = check_record(Path(path), drill_key(key_path(os.environ)))
    failed = tuple(str(verdict["name"]) for verdict in record["verdicts"] if not verdict["ok"])
    return DrillRecord(path=Path(path), record=record, wrong=tuple(wrong), failed=failed)
