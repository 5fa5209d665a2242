"""DAT001: the file names its training data, and the named data exists."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

NO_START = Impact(note="the job fails before its first step, after its devices were allocated")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check that data sources are named, and that none is missing in a folder of this machine."""
    data = evidence.data
    if data is None:
        return exempt("the data is not a matter of this file, or of this machine")
    at = f"setting:{data.setting}" if data.setting else "data.path"
    if data.named < limits.number("least_sources"):
        return failed(
            "the file names no data: no --data-path, --data-args-path or --mock-data",
            value=data.named,
            threshold=limits.number("least_sources"),
            at="plan:data",
            severity="warning",
            impact=NO_START,
            fix="--data-path PREFIX, or --mock-data for a test of speed",
        )
    if data.missing:
        return failed(
            f"{data.missing[0][:120]} is not there" + (f", nor {len(data.missing) - 1} more" * (len(data.missing) > 1)),
            value=len(data.missing),
            threshold=0,
            at=at,
            severity="warning",
            impact=NO_START,
            fix="correct the path; of a folder that only the cluster has, nothing is said",
        )
    return passed(f"{plural(data.named, 'source')} of data named", value=data.named, at=at)


RULE = Rule(
    id="DAT001",
    slug="data-named",
    severity="error",
    requires="J",
    requirement="The configuration names the data it trains on, and names nothing that is missing.",
    why="""
A data path that is empty, misspelt or left over from another machine is found when every rank has started, built its
model and opened its data: minutes of all devices, and another turn in the queue.
""",
    how="""
Megatron's arguments have `--data-path`, `--train-data-path`, `--data-args-path`, `--per-split-data-args-path` or
`--mock-data`, where they say how long to train. A prefix without its `.bin`, in a folder that is on this machine, is
missing; a folder that is not here is the cluster's and nothing is said of it. Of our own jobs `plan` and `train` tell a
folder that is not there.
""",
    limits={"least_sources": Limit(value=1, unit="sources", note="of data that are named")},
    bad="torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096",
    good="torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --data-path /data/c4_text_document",
    fix="Name the data.",
    waive="A wrapper that adds the data path when it is run.",
    history="2026.1: added in 0.7.",
    references=(Reference(text="NVIDIA/Megatron-LM megatron/training/arguments.py: _add_data_args", mark="recalled"),),
    check=check,
)
