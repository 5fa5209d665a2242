"""The `phalanx` command: finds the verb, imports that verb's module only, and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys

# Everything else is imported inside `main`'s guard: Ctrl-C in the first milliseconds must not print a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.cli.signals import CommandSignals
    from phalanx.errors import PhalanxError

# A full disk, quota or file-size limit, or a failing device, behind stdout. Other writes put their file in the error.
FULL_STDOUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# verb -> (module with `configure_parser(parser)` and `run_command(args) -> exit code`, public functions, help)
VERBS: dict[str, tuple[str, str, str]] = {
    "init": ("phalanx.cli.init", "init", "write a commented job file for this machine or a cluster"),
    "show": ("phalanx.cli.show", "show", "print every value of a job and where it came from"),
    "schema": ("phalanx.cli.schema", "job_schema", "print the JSON Schema of job files, for editors"),
    "cluster": (
        "phalanx.cli.cluster",
        "describe_cluster accelerators cluster_init cluster_health",
        "describe this machine or a cluster such as 8xH100:16; init and health for its operator",
    ),
    "probe": ("phalanx.cli.probe", "probe", "measure this machine in under 30 s, for later plans"),
    "plan": ("phalanx.cli.plan", "plan compare_plans", "find the best layout of a job, its reasons and its cost"),
    "sim": ("phalanx.cli.sim", "simulate simulate_queue", "simulate a step, months with failures, or a queue of jobs"),
    "fabric": (
        "phalanx.cli.fabric",
        "fabric.design fabric.decisions fabric.show fabric.catalogue fabric.simulate fabric.export fabric.collective",
        "design and simulate the network for N GPUs",
    ),
    "scale": (
        "phalanx.cli.scale",
        "scale.sweep scale.fit scale.allocate scale.predict",
        "train small models, fit a scaling law, and size a large model with it",
    ),
    "evolve": (
        "phalanx.cli.evolve",
        "evolve.plans evolve.schedules evolve.kernels evolve.export",
        "search plans, pipeline schedules or kernels for the best of every kind",
    ),
    "check": (
        "phalanx.cli.check",
        "check_project fix",
        "check a job, plan or run against the rules of the training specification",
    ),
    "rules": ("phalanx.cli.rules", "rules", "list the rules of the training specification"),
    "explain": ("phalanx.cli.explain", "explain", "explain one rule, with the numbers of a job"),
    "trace": ("phalanx.cli.trace", "trace", "trace one rank's step on fake tensors"),
    "train": ("phalanx.cli.train", "train dry_run run", "train a job, or continue a run; Ctrl-C saves a checkpoint"),
    "peers": (
        "phalanx.cli.peers",
        "peers.start peers.join peers.invite peers.members peers.revoke peers.go_on_alone",
        "train with peers on slow links that come and go",
    ),
    "watch": ("phalanx.cli.watch", "watch run", "follow a run in the terminal"),
    "report": ("phalanx.cli.report", "report", "write a run's report as HTML and Markdown"),
    "diff": ("phalanx.cli.diff", "diff", "compare two runs, plans or jobs"),
    "agent": ("phalanx.cli.agent", "join_run", "join a run as one of its hosts"),
    "launch": ("phalanx.cli.launch", "launch", "launch jobs in the background: on this machine, Slurm or Kubernetes"),
    "queue": ("phalanx.cli.queue", "queue", "list launched jobs and their states"),
    "why": ("phalanx.cli.why", "why", "say why a launched job is waiting, or why it ended"),
    "logs": ("phalanx.cli.logs", "logs", "print the log of a launched job, or of one of its ranks"),
    "cancel": ("phalanx.cli.cancel", "cancel", "end a launched job; its run folder stays"),
    "requeue": ("phalanx.cli.requeue", "requeue", "resume a launched job from its newest checkpoint"),
    "web": ("phalanx.cli.web", "web", "serve a live dashboard over a folder of runs"),
    "drill": (
        "phalanx.cli.drill",
        "drill drill_suite drill_outside list_outside_drills read_drill_record",
        "inject faults into a real run and prove that it recovers",
    ),
    "verify": ("phalanx.cli.verify", "verify", "prove that a layout computes what a single process computes"),
    "import": ("phalanx.cli.import_", "import_job", "convert another trainer's configuration to a job file"),
    "checkpoints": (
        "phalanx.cli.checkpoints",
        "checkpoints",
        "list a run's checkpoints, and find damaged ones",
    ),
    "export": ("phalanx.cli.export", "export", "write a run's weights as a Hugging Face folder"),
    "backtest": ("phalanx.cli.backtest", "backtest", "score the planner's predictions on published measurements"),
    "data": ("phalanx.cli.data", "data.build data.show data.checksum", "build, show and checksum datasets"),
    "metrics": (
        "phalanx.cli.metrics",
        "metrics grafana",
        "export a run's metrics to Prometheus, OTLP, TensorBoard, MLflow or W&B",
    ),
    "kernels": (
        "phalanx.cli.kernels",
        "kernels.operations kernels.bench kernels.verify kernels.new kernels.skill_eval",
        "list, measure, verify and start GPU kernels",
    ),
    "calibrate": ("phalanx.cli.calibrate", "calibrate", "fit the cost model to steps measured on your system"),
}
FORMER_NAMES = {"validate": "backtest"}  # until 0.7

# The order of `phalanx --help`, which a newcomer reads from the top: every verb is in one group.
VERB_GROUPS = {
    "prepare": "init import show schema data",
    "plan": "plan scale evolve cluster probe calibrate backtest",
    "check before training": "check rules explain verify trace",
    "train": "train peers agent drill checkpoints export kernels",
    "launch": "launch queue why logs cancel requeue",
    "watch and compare": "watch report diff web metrics",
    "network and simulation": "fabric sim",
}

# Verbs that test something are easily confused (docs/glossary.md), so the help of each names the rest: command, and
# what it tests.
TESTS = {
    "check": ("check", "rules of the training specification"),
    "verify": ("verify", "numbers a layout computes"),
    "backtest": ("backtest", "accuracy of predictions"),
    "drill": ("drill", "recovery from injected faults"),
    "data": ("data checksum", "files of a dataset"),
    "checkpoints": ("checkpoints --checksum", "files of a checkpoint"),
}

EPILOG = """\
start with: phalanx init job.toml && phalanx plan job.toml
exit codes: 0 success, 1 findings, 2 invalid job or command, 3 system failure, 130 interrupted
"""

INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM
PIPE_CLOSED = 141  # 128 + SIGPIPE: the reader of our output closed the pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of the process.

    `argv` defaults to the words of the command line; only then are signal handlers installed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Help prints a table: there is nothing to unwind, and importing `signal` would take a third of its time.
    if _asks_help(arguments):
        return _run_verb(None, arguments)
    try:
        from phalanx.cli.signals import CommandSignals, Terminated, die_of_sigterm

        stop = CommandSignals()
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        # This is the process's own command, not a call from a test or another program.
        if argv is None:
            stop.listen()
        if argv is None and arguments[0] in ("plan", "check", "report"):
            # These are short and keep nearly all objects they make: garbage collection, in between and once more at
            # exit, took 15 % of the time of a plan, and 8 % of that of the report of 131,072 ranks.
            import gc

            gc.disable()
            stop.code = _run_verb(stop, arguments)
            gc.freeze()
        else:
            stop.code = _run_verb(stop, arguments)
        return stop.code
    except Terminated:
        die_of_sigterm()
        return TERMINATED
    finally:
        stop.unwound()


def _asks_help(arguments: list[str]) -> bool:
    return not arguments or arguments[0] in ("-h", "--help", "help")


def _run_verb(stop: CommandSignals | None, arguments: list[str]) -> int:
    """Run the verb and return its exit code, also after errors and Ctrl-C; only SIGTERM passes through."""
    try:
        code = _dispatch_verb(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except Exception as error:
        # A library may turn Ctrl-C into its own error, as an import in C does; and the terminal sends Ctrl-C to the
        # ranks too, whose end is then reported as a failure.
        if stop is not None and stop.received:
            print(f"stopped by Ctrl-C ({type(error).__name__})", file=sys.stderr)
            return INTERRUPTED
        return _report_failure(error)


def _drop_output() -> None:
    """Point stdout to /dev/null: Python flushes stdout once more at exit and would print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_failure(error: Exception) -> int:
    """Print the error on stderr and return the exit code: the user's mistake, the system's failure, or a bug."""
    from phalanx.errors import PhalanxError

    if isinstance(error, PhalanxError):
        print(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError):
        from phalanx.io.write_errors import ENVIRONMENT, write_failure

        if error.filename is None and error.errno in FULL_STDOUT:
            place = _stdout_place()
            _drop_output()
            fix = "free space there, or redirect the output elsewhere"
            print(write_failure(place, error, fix=fix), file=sys.stderr)
            return 3
        if error.errno in ENVIRONMENT:
            place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "phalanx"
            failure = write_failure(place, error, verb="opened" if error.filename else "continued")
            print(failure, file=sys.stderr)
            return failure.exit_code
    return _report_bug(error)


def _stdout_place() -> str:
    """Return the file that stdout is redirected to, or "standard output" for a pipe or terminal."""
    try:
        place = os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}")
    except (OSError, ValueError):
        return "standard output"
    return place if place.startswith("/") else "standard output"


def _dispatch_verb(arguments: list[str]) -> int:
    """Import the verb's module, parse its options and run it; return its exit code."""
    if _asks_help(arguments):
        print(usage(), end="")
        return 0
    verb, *rest = arguments
    if verb in ("-V", "--version"):
        import phalanx

        print(f"phalanx {phalanx.__version__}")
        return 0
    if verb in FORMER_NAMES:
        print(f"note: phalanx {verb} is now called phalanx {FORMER_NAMES[verb]}", file=sys.stderr)
        verb = FORMER_NAMES[verb]
    if verb not in VERBS:
        raise _unknown_verb(verb)
    from importlib import import_module

    from phalanx.cli.parser import Parser

    module_name, _, help_line = VERBS[verb]
    module = import_module(module_name)
    parser = Parser(prog=f"phalanx {verb}", description=help_line, epilog=_see_also(verb))
    module.configure_parser(parser)
    return int(module.run_command(parser.parse_args(rest)))


def _see_also(verb: str) -> str | None:
    commands = (f"phalanx {command} ({subject})" for name, (command, subject) in TESTS.items() if name != verb)
    return f"see also: {', '.join(commands)}" if verb in TESTS else None


def usage() -> str:
    """Return the top-level help, made from the table of verbs alone."""
    groups = []
    for title, names in VERB_GROUPS.items():
        lines = [f"  {verb:<11} {VERBS[verb][2]}" for verb in names.split()]
        groups.append("\n".join([f"{title}:", *lines]))
    return (
        "usage: phalanx VERB [options]     phalanx VERB --help     phalanx --version\n\n"
        "Plan and run transformer training from one job file, on a laptop or on 100,000 GPUs.\n\n"
        + "\n\n".join(groups)
        + f"\n\n{EPILOG}"
    )


def _unknown_verb(verb: str) -> PhalanxError:
    from phalanx.errors import mistake, nearest

    close = nearest(verb, VERBS)
    fix = f"did you mean phalanx {close}?" if close else f"the verbs are {', '.join(VERBS)}"
    kind = "option" if verb.startswith("-") else "verb"
    return mistake("phalanx", f'there is no {kind} "{verb[:60]}"', fix=fix)


def _report_bug(error: Exception) -> int:
    if os.environ.get("PHALANX_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    from phalanx.io.visible import visible

    text = visible(str(error)).splitlines()
    print(
        f"phalanx: internal error: {type(error).__name__}: {text[0] if text else ''}",
        file=sys.stderr,
    )
    print("  this is a bug in Phalanx; PHALANX_DEBUG=1 prints the traceback, please report it", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
