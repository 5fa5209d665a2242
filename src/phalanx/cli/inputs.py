"""What verbs that start nothing say of the files a job names."""

from __future__ import annotations

from phalanx.cli.output import note, warn
from phalanx.errors import UserError
from phalanx.job.load import ResolvedJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.plan.inputs import InputFindings


def told_inputs(resolved: ResolvedJob) -> InputFindings:
    """Look at the files of a job. Contradictions raise UserError; what is not on this machine is told, on stderr."""
    from phalanx.plan.inputs import look_at_inputs

    found = look_at_inputs(resolved.job, resolved.path.parent, origins=resolved.origins)
    if found.refused:
        raise UserError(found.refused)
    for line in found.remarks:
        note(line)
    warn(found.missing)
    return found
