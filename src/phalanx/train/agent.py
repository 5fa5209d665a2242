"""The agent of one host, a process that starts and watches the host's ranks.

Called as `python -m phalanx.train.agent [--allow-code] [--election=…] RUN HOST SLOTS ADDRESS PARENT [TASK]`. Imports
torch once, then keeps a process in every slot: forks it, watches it, passes on the coordinator's orders, and forks
another when it ends. Importing torch and the trainer costs 3 s of processor time; a fork costs 20 ms.

`--allow-code` is the consent of the user who starts the agent to run the code that the job names. It is never read
from the run folder, which another user may have written.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.elastic.handshake import read_secret
from phalanx.elastic.host_agent import HostAgent
from phalanx.elastic.local_launch import ALLOW_CODE, ELECTION, LauncherTask, StopSignals
from phalanx.elastic.rank_link import RankLink
from phalanx.elastic.rank_process import Work, die_with
from phalanx.elastic.transports import LIBRARIES, facts_here, interface_of, transport_notes, transport_warnings
from phalanx.errors import PhalanxError
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, open_run
from phalanx.train.flight import BUFFER_NAMES, RECORDED
from phalanx.train.listeners import raise_descriptor_limit
from phalanx.train.prepare import check_code

# Defaults of variables that torch reads when a group is made. Only the coordinator ends ranks: it knows which one
# failed, and keeps the others (train/leave.py).
NCCL_DEFAULTS = {
    # 0: a collective that failed or timed out ends no process. 1 and 3 end the process; 1 and 2 abort the
    # communicators, after which a rank continues unaware with whatever the kernels had computed.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Otherwise a watchdog thread that waits for the driver for 8 min ends the process.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Otherwise SIGABRT ends the rank before it can report the error.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # After a failed collective the watchdog holds its group for four times as long, even if it dumps nothing.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


def main(arguments: list[str]) -> int:
    """Run the agent until the run is over; return the exit code."""
    options = [word for word in arguments[:2] if word.startswith("--")]
    allow_code = ALLOW_CODE in options
    election = "".join(word.removeprefix(ELECTION) for word in options if word.startswith(ELECTION))
    folder, host, slots, address, parent, *rest = arguments[len(options) :]
    task = LauncherTask(**json.loads(rest[0])) if rest else None
    if int(parent):
        die_with(int(parent))
    # Before the imports: Ctrl-C in the first seconds must end the run like a later one.
    stop_requests = StopSignals.listen()
    raise_descriptor_limit()  # the ranks are its children
    # Importing 2,100 modules makes no garbage: 2.9 s instead of 3.7 s of processor time, mean of 3.
    gc.disable()
    for name in BUFFER_NAMES:  # torch reads them when the first group is made
        os.environ.setdefault(name, str(RECORDED))
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Makes torch look for GPUs through NVML: modules imported here may look, and after a call of CUDA's runtime in this
    # process no rank forked from it could use a GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if interface := interface_of(address):  # ranks listen on no other interface
        os.environ.update(dict.fromkeys(LIBRARIES, interface))
    run = open_run(folder)
    try:
        by_hand = not int(parent)
        plan = Plan.from_json(run.plan_text(), where=str(run.plan_json))
        check_code(plan.job, allowed=allow_code)
        agent = HostAgent(
            run,
            host=host,
            slots=int(slots),
            address=address,
            stop_requests=stop_requests,
            by_hand=by_hand,
            election=election,
        )
        agent.begin()  # the coordinator starts while we import
        agent.look(plan, quick=task is not None and task.local_rank > 0)
        facts = facts_here(plan, slots=int(slots))
        for problem in transport_warnings(facts) if facts is not None else ():
            print(f"warning: {problem.render()}", file=sys.stderr, flush=True)
        notes = transport_notes(facts) if facts is not None else ()
        work = _rank_work(run, agent, notes, task, allow_code=allow_code)
        _check_trainable(plan)
        agent.rescue = partial(_rescue_state, run, agent, plan.job.checkpoint.keep)
        # Imported objects are never freed, so forked ranks share their memory; ranks enable gc again.
        gc.freeze()
        return agent.serve(work)
    except PhalanxError as error:
        print(error, file=sys.stderr)
        # In later states the other hosts may continue without this one.
        if run.status().get("state") == "launching":
            run.set_status("failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code


def _rescue_state(run: Run, agent: HostAgent, keep: int, message: Mapping[str, Any]) -> None:
    """Write the step that only memory holds to disk, after the run has failed and its ranks are gone.

    The path is added to the run's status and printed on stderr.
    """
    from phalanx.train.state.paths import parse_location
    from phalanx.train.state.rescue import RescueOrder, rescue_places, rescue_state

    places = rescue_places(parse_location(run.checkpoints), run.path)
    newer_than = max(run.saved_steps(), default=0)
    try:
        saved = rescue_state(
            run.path,
            RescueOrder.from_json(message),
            host=agent.host,
            replica_store=agent.replica_store,
            places=places,
            keep=keep,
            newer_than=newer_than,
        )
    except (PhalanxError, OSError, ValueError, KeyError) as error:
        text = f"memory holds a newer step, which could not be written: {error}"
    else:
        if saved is None:
            return
        text = f"memory held step {saved.step:,}, which is now saved: {saved.path}"
        if saved.path.parent != places[0]:
            text += f"\n  move it to {places[0]} before you resume"
    status = run.status()
    with suppress(OSError):  # a full disk
        fields = {key: value for key, value in status.items() if key not in ("state", "message")}
        run.set_status(status["state"], message=f"{status.get('message', '')}\n  {text}", **fields)
    print(text, file=sys.stderr, flush=True)


def _check_trainable(plan: Plan) -> None:
    """Raise UserError for a layout that the trainer cannot run, once per host and not on every rank."""
    from phalanx.train.rank_settings import Settings, refuse_layout

    on_gpu = plan.cluster.accelerator.family != "cpu"
    settings = Settings.of(plan.job, plan.layout, on_gpu=on_gpu)
    refuse_layout(plan.job.model, settings)
    if on_gpu:
        # Imports Triton once per host, not half a second on each rank; training works without it.
        with suppress(Exception):
            import_module("phalanx.train.guard.sum_kernel")
    if settings.compile:
        from phalanx.train.parallel.compiling import load_compiler

        load_compiler(settings.compile_backend, on_gpu=on_gpu)


def _rank_work(
    run: Run, agent: HostAgent, notes: Sequence[str], task: LauncherTask | None, *, allow_code: bool
) -> Work:
    """Import everything that ranks share, and return the function that a forked rank runs on its link."""
    from phalanx.train.worker import Rank

    secret = read_secret(run.path / "secret")

    def work(link: RankLink) -> None:
        Rank(
            run=Path(run.path),
            link=link,
            replica_store=agent.replica_store,
            host=agent.host,
            address=agent.address,
            secret=secret,
            notes=notes,
            task=task,
            allow_code=allow_code,
        ).serve()

    return work


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips torch's clean-up at exit: nothing here needs it, and it takes a second.
    os._exit(code)
