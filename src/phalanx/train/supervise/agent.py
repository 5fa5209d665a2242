"""`python -m phalanx.train.supervise.agent RUN PARENT`: imports torch once, then forks every rank of the run.

Importing torch and the trainer costs 3 s of processor time; four ranks on two cores would pay it four times.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from phalanx.errors import PhalanxError, UserError
from phalanx.record.run import Run, open_run
from phalanx.train.supervise.process import Work, die_with
from phalanx.train.supervise.watch import Wishes, supervise

MARGIN_S = 10.0  # collectives give up after train.timeout_s themselves, and say more about it than we can


def main(arguments: list[str]) -> int:
    """Run the agent until the run is over."""
    folder, parent = arguments
    die_with(int(parent))
    wishes = Wishes.listen()  # before the imports: Ctrl-C in the first seconds is a wish like any other
    gc.disable()  # importing 2,100 modules makes no garbage: 2.9 s instead of 3.7 s of processor time, mean of 3
    run = open_run(folder)
    timeout_s = float(run.plan()["job"]["train"]["timeout_s"])
    world = int(run.launch()["world"])
    private = Path(tempfile.mkdtemp(prefix="phalanx-"))  # mode 0700: the rendezvous is nobody else's business
    try:
        work = _work(run, world=world, store=private / "store", timeout_s=timeout_s)
        _check(run)
        gc.freeze()  # what was imported is never freed: ranks then share its memory, and switch the collector on
        return supervise(work, run=run, world=world, timeout_s=timeout_s + MARGIN_S, wishes=wishes)
    except PhalanxError as error:
        print(error, file=sys.stderr)
        run.set_status("failed", message=str(error))
        return error.exit_code
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _check(run: Run) -> None:
    """Refuse what the trainer cannot run once, not on every rank."""
    from phalanx.plan.plan import Plan
    from phalanx.train.check import check_batches, refuse_layout
    from phalanx.train.data.batches import BatchPlan
    from phalanx.train.settings import Settings

    plan = Plan.from_json(run.plan_json.read_text(encoding="utf-8"), where=str(run.plan_json))
    settings = Settings.of(plan.job, plan.layout, on_gpu=plan.cluster.accelerator.family != "cpu")
    refuse_layout(plan.job.model, settings)
    job = plan.job
    sizes = BatchPlan.of(job.batch, sequence=job.data.sequence, tokens=plan.duration.tokens).batch_sizes
    if problems := check_batches(settings, sizes):
        raise UserError(problems)


def _work(run: Run, *, world: int, store: Path, timeout_s: float) -> Work:
    """The trainer as a function of the rank; imports everything the ranks share, and computes nothing."""
    from torch.distributed import FileStore  # type: ignore[attr-defined, unused-ignore]

    from phalanx.train.worker import run_rank

    def work(*, rank: int, stop: Callable[[], bool], heartbeat: Callable[[int], None]) -> None:
        meeting = FileStore(str(store), world)
        meeting.set_timeout(timedelta(seconds=timeout_s))
        run_rank(run=run.path, rank=rank, world=world, store=meeting, stop=stop, heartbeat=heartbeat)

    return work


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips torch's clean-up at exit: nothing here needs it, and it takes a second
